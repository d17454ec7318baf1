"""Notebooks on other machines: text has its encoding, and papermill sees what it may set."""

import ast

import nbformat
import papermill
import pytest
import tcs_lab as lab
from tcs_lab.teaching.cells import literals

NOTEBOOKS = lab.ROOT / "notebooks"
IPYNB = sorted(NOTEBOOKS.glob("*.ipynb"))
ROOMS = {room: path.glob("*.py") for room, path in {
    "notebooks": NOTEBOOKS, "tests": lab.ROOT / "tests",
    "tests/lab": lab.ROOT / "tests/lab", "tests/notebooks": lab.ROOT / "tests/notebooks"}.items()}  # fmt: skip
LAB = (NOTEBOOKS / "tcs_lab").rglob("*.py")
CODE = [
    path for files in (*ROOMS.values(), LAB) for path in files if path.name != "runs.py"
]  # ASCII only
by_name = {"ids": lambda path: path.stem}


def without_encoding(call):
    """Whether a call reads or writes text in whatever encoding the machine has."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg for keyword in call.keywords}
    words = [a.value for a in call.args if isinstance(a, ast.Constant)]
    if "encoding" in given or any(str(word).startswith(("/proc/", "/dev/")) for word in words):
        return False
    if name in ("read_text", "write_text"):
        return "/proc/" not in ast.unparse(call)
    of_tar = ast.unparse(call.func) in ("tarfile.open", "zipfile.open")
    of_process = name in ("run", "Popen", "check_output") and "text" in given
    return of_process or (name == "open" and not of_tar and words[-1:] in (["a"], ["w"], ["r"]))


@pytest.mark.parametrize("path", sorted(CODE), ids=lambda p: p.relative_to(lab.ROOT).as_posix())
def test_text_is_read_and_written_as_utf_8(path):
    """LC_ALL=C, and Windows, have other encodings."""
    calls = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, ast.Call)]
    assert not [f"{path.name}:{c.lineno}" for c in calls if without_encoding(c)]


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_papermill_sees_every_parameter_with_its_value(path):
    """It does not understand a line whose comment holds an equals sign."""
    (cell,) = [
        c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])
    ]
    seen = papermill.inspect_notebook(str(path))
    found = {name: ast.literal_eval(one["default"]) for name, one in seen.items()}
    assert found == literals(cell.source)
    assert all(one["help"] for one in seen.values()), "a comment each"


def test_text_from_papermills_p_is_told_of_its_y():
    with pytest.raises(ValueError, match=r"^wire: got 'true' \(str\).*write -y \"wire: true\""):
        lab.plan({"schemes": ["TCS"], "wire": "true"})
    with pytest.raises(ValueError, match=r"^seeds: .*write -y \"seeds: \[0, 1\]\""):
        lab.plan({"schemes": ["TCS"], "seeds": "[0, 1]"})
    with pytest.raises(ValueError, match=r"^learning_rate: .*write 1.0e-3"):
        lab.plan({"schemes": ["TCS"], "learning_rate": "1e-3"})
    with pytest.raises(ValueError, match=r"^lags: got '\[1\]'.*write -y \"lags: \[1\]\""):
        lab.check_values({"lags": "[1]"}, lags=list[lab.Count])
    for nothing in ("maybe", "[", "[0.5]", "!!python/object:os.system []"):
        with pytest.raises(ValueError) as raised:
            lab.plan({"schemes": ["TCS"], "seeds": nothing})
        assert "-y" not in str(raised.value)
