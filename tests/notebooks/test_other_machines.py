"""Notebooks on other machines: text has its encoding, and papermill sees what it may set."""

import ast

import nbformat
import papermill
import pytest
import tcs_lab as lab
from tcs_lab.runs.parameters import read_literals

NOTEBOOKS = lab.ROOT / "notebooks"
IPYNB = sorted(NOTEBOOKS.glob("*.ipynb"))
CODE = [
    path
    for folder in (NOTEBOOKS, lab.ROOT / "tests")
    for path in sorted(folder.rglob("*.py"))
    if path.name != "runs.py"  # its files are ASCII only
]


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


def test_text_is_read_and_written_as_utf_8():
    """LC_ALL=C, and Windows, have other encodings."""
    calls = [(path, n) for path in CODE for n in ast.walk(ast.parse(path.read_bytes()))]
    assert not [
        f"{path.relative_to(lab.ROOT)}:{n.lineno}"
        for path, n in calls
        if isinstance(n, ast.Call) and without_encoding(n)
    ]


def test_papermill_sees_every_parameter_with_its_value():
    """It does not understand a line whose comment holds an equals sign."""
    for path in IPYNB:
        (cell,) = [
            c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])
        ]
        seen = papermill.inspect_notebook(str(path))
        found = {name: ast.literal_eval(one["default"]) for name, one in seen.items()}
        assert found == read_literals(cell.source), path.stem


def test_text_from_papermills_p_is_told_of_its_y():
    with pytest.raises(ValueError, match=r"^wire: got 'true' \(str\).*write -y \"wire: true\""):
        lab.plan({"schemes": ["TCS"], "wire": "true"})
    with pytest.raises(ValueError, match=r"^seeds: .*write -y \"seeds: \[0, 1\]\""):
        lab.plan({"schemes": ["TCS"], "seeds": "[0, 1]"})
    with pytest.raises(ValueError, match=r"^learning_rate: .*write 1.0e-3"):
        lab.plan({"schemes": ["TCS"], "learning_rate": "1e-3"})
    with pytest.raises(ValueError, match=r"^lags: got '\[1\]'.*write -y \"lags: \[1\]\""):
        lab.check_values({"lags": "[1]"}, lags=list[lab.WholeNumber])
    for nothing in ("maybe", "[", "[0.5]", "!!python/object:os.system []"):
        with pytest.raises(ValueError) as raised:
            lab.plan({"schemes": ["TCS"], "seeds": nothing})
        assert "-y" not in str(raised.value)
