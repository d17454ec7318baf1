"""Notebooks on other machines: text has its encoding, papermill sees what it may set, and an edited
.py is not passed over."""

import ast
import os

import jupytext
import nbformat
import papermill
import pytest
import tcs_lab as lab
from tcs_lab.runs.twins import check_twin
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


@pytest.fixture
def pair(tmp_path):
    """A notebook and its .py, which is the older."""
    cells = [
        nbformat.v4.new_markdown_cell("# A"),
        *(nbformat.v4.new_code_cell(f"a = {i}") for i in range(3)),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    for form in ("py:percent", "ipynb"):
        jupytext.write(notebook, tmp_path / f"a.{form[:5].split(':')[0]}", fmt=form)
    older(tmp_path / "a.py", tmp_path / "a.ipynb", by=5)
    return tmp_path / "a.py"


def older(path, than, by):
    at = than.stat().st_mtime
    os.utime(path, (at - by, at - by))


def test_a_notebook_that_is_older_than_its_edited_py_does_not_run(pair):
    run, ipynb = ["a = 0", "a = 1"], pair.with_suffix(".ipynb")
    check_twin(run, pair.parent)
    older(ipynb, pair, by=5)  # as after a checkout: the code is the same
    check_twin(run, pair.parent)
    text = pair.read_text(encoding="utf-8")
    for edited in (text.replace("a = 2", "a = 3"), text + "\n# %%\na = 4\n"):
        pair.write_text(edited, encoding="utf-8")
        older(ipynb, pair, by=5)
        with pytest.raises(ValueError, match=r"^a\.ipynb: a\.py .*--update"):
            check_twin(run, pair.parent)
        check_twin(["a = 5"], pair.parent)  # another notebook
    older(pair, ipynb, by=5)  # the notebook itself was edited, where no .py is kept
    check_twin(run, pair.parent)


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_a_committed_pair_is_not_taken_for_an_old_one(path, tmp_path):
    for part in (path, path.with_suffix(".py")):
        (tmp_path / part.name).write_bytes(part.read_bytes())
    older(tmp_path / path.name, tmp_path / f"{path.stem}.py", by=5)
    run = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"][:2]
    check_twin(run, tmp_path)
    py = tmp_path / f"{path.stem}.py"
    py.write_text(py.read_text(encoding="utf-8") + "\n# %%\nedited = 1\n", encoding="utf-8")
    older(tmp_path / path.name, py, by=5)
    with pytest.raises(ValueError, match=rf"{path.stem}\.py was edited after it"):
        check_twin(run, tmp_path)


def test_a_notebook_that_is_run_asks_for_its_py(pair, monkeypatch):
    pair.write_text("# %%\nother = 1\n", encoding="utf-8")
    older(pair.with_suffix(".ipynb"), pair, by=5)
    (pair.parent / "notebooks").mkdir()
    for part in (pair, pair.with_suffix(".ipynb")):
        part.rename(pair.parent / "notebooks" / part.name)
    monkeypatch.setattr(lab.runs.parameters, "ROOT", pair.parent)
    cells = ["", "a = 0", "# Parameters\na = 7\n", "a = 1"]
    for check in (lab.notebook_params, lab.given_notebook_params, lab.check_notebook_params):
        with pytest.raises(ValueError, match=r"^a\.ipynb: a\.py "):
            check({"In": cells})
