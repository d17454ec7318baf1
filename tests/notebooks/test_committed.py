"""The notebooks: pairs in sync, executed, links and parameters known; nbval runs them."""

import base64
import fnmatch
import functools
import platform
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import jupytext
import matplotlib
import nbformat
import pytest
import tcs_lab as lab
from jupytext.config import load_jupytext_config
from nbconvert import HTMLExporter, NotebookExporter
from tcs_lab.runs.parameters import read_literals
from tcs_lab.runs.records import code_sha256
from tcs_lab.tables.verdicts import VERDICTS_FOLDER
from traitlets.config import Config

import tcs_core as tcs

NOTEBOOKS = lab.ROOT / "notebooks"
PY = sorted(NOTEBOOKS.glob("*.py"))
IPYNB = sorted(NOTEBOOKS.glob("*.ipynb"))
README = (lab.ROOT / "README.md").read_text(encoding="utf-8")
by_name = {"ids": lambda path: path.stem}


@functools.cache
def read(path):
    return nbformat.read(path, 4)


@functools.cache
def committed_text(path):
    """As the last commit has it: what a reader ran and saved is no business of these tests."""
    name = f"HEAD:./{path.relative_to(lab.ROOT).as_posix()}"
    done = subprocess.run(["git", "-C", str(lab.ROOT), "show", name], capture_output=True)
    return path.read_text(encoding="utf-8") if done.returncode else done.stdout.decode()


def committed(path):
    text = committed_text(path)
    return nbformat.reads(text, 4), text


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters_of(notebook):
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return cell.source


def test_every_notebook_has_its_pair():
    assert [p.stem for p in PY] == [p.stem for p in IPYNB] != []


@pytest.mark.parametrize("py", PY, **by_name)
def test_the_pair_is_in_sync(py):
    """By content: what the .ipynb would write as text is the .py."""
    ipynb = py.with_suffix(".ipynb")
    config = load_jupytext_config(str(ipynb))
    text = jupytext.writes(jupytext.read(ipynb, config=config), fmt="py:percent", config=config)
    assert text == py.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_executed_in_order_without_errors(path):
    notebook, text = committed(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    written = load_jupytext_config(str(path)).cell_metadata_filter  # else its order is by chance
    assert notebook.metadata.jupytext.cell_metadata_filter == written
    code = code_of(notebook)
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1)), "not run in order"
    outputs = [o for c in code for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    rendered = [o.get("data", {}).get("text/markdown", "") for o in outputs]
    assert not [words for words in rendered if "\x1b" in words], "a terminal's code in Markdown"
    figures = [o.data for o in outputs if "<Figure" in o.get("data", {}).get("text/plain", "")]
    assert all("image/png" in data for data in figures), "a figure that is shown as words"
    assert "/root/" not in text and "/home/" not in text and 'papermill": {' not in text


def test_all_were_executed_on_one_state_of_the_core():
    """On that of the commit, of its code: a mended comment or docstring changes nothing here
    (lab.core_sha256). Says which are stale: execute them again (tests/execute_notebooks.py) and commit.

    The checksum is of a syntax tree as text, which another version of Python may write in another way.
    """
    on = defaultdict(list)
    for path in IPYNB:
        printed = re.findall(r"(?:core |checksum )([0-9a-f]{12})\b", committed(path)[1])
        on[printed[-1] if printed else "none printed"].append(path.stem)
    assert len(on) == 1, dict(on)
    made_with = read(IPYNB[0]).metadata.language_info.version.split(".")
    if made_with[:2] == platform.python_version_tuple()[:2]:
        assert list(on) == [code_sha256(committed_text(lab.ROOT / "tcs_core.py").encode())[:12]]


def printed(notebook):
    """The text that a notebook's cells have put out."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    kinds = ("text/markdown", "text/plain")
    texts = [o.get("text") or [o.get("data", {}).get(kind, "") for kind in kinds] for o in outputs]
    return "\n".join(text if isinstance(text, str) else "\n".join(text) for text in texts)


NUMBER = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?![\w-])")  # not in a name, as in ResNet-18


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_numbers_of_the_answer_at_the_top_are_those_of_the_cells(path):
    """What stands under "In short" is worked out below, to the digits said."""
    notebook = read(path)
    answer = re.search(r"\*\*In short\.\*\*(.*?)(?:\n\n|\Z)", notebook.cells[0].source, re.S)
    given = set(NUMBER.findall(printed(notebook)))
    given |= {str(value) for value in read_literals(parameters_of(notebook)).values()}
    said = NUMBER.findall(answer[1]) if answer else []
    assert [number for number in said if number not in given] == []


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_statements_are_asserted_at_the_notebooks_own_parameters(path):
    """Else execute the notebook again (tests/execute_notebooks.py)."""
    notebook = read(path)
    code = "\n".join(cell.source for cell in code_of(notebook))
    names = re.findall(r'lab\.Statements\(globals\(\), "(\w*)"\)', code)
    assert names == [path.stem] * (VERDICTS_FOLDER / f"{path.stem}.json").exists()
    if names:
        kept = lab.tables.verdicts.read_verdicts(path.stem)
        assert kept.parameters == read_literals(parameters_of(notebook)) and kept.verdicts


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_pictures_have_alternative_text(path):
    """A picture without words is lost on a reader who cannot see it."""
    outputs = [output for cell in code_of(read(path)) for output in cell.outputs]
    pictures = [o.metadata for o in outputs if "image/png" in o.get("data", {})]
    texts = [known.get("image/png", known).get("alt", "") for known in pictures]
    assert [text for text in texts if len(text) < 10] == []


def nbconvert_words(kind):
    """The words of README's only command that converts a notebook to this kind."""
    (line,) = re.findall(rf"jupyter nbconvert (--to {kind} .*?)\n\n", README, re.S)
    return shlex.split(line.replace("\\\n", ""))


HIDDEN = "remove-input"  # the tag that README's command for HTML pages names


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_cells_that_are_folded_have_the_tag_that_hides_them_in_html(path):
    cells = code_of(read(path))
    folded = [c.get("metadata", {}).get("jupyter", {}).get("source_hidden", False) for c in cells]
    assert folded == [HIDDEN in c.metadata.get("tags", []) for c in cells]


def test_the_html_page_shows_open_code_and_hides_folded_code():
    notebook = nbformat.v4.new_notebook()
    opened, folded = (nbformat.v4.new_code_cell(f"x = '{name}'") for name in ("seen", "hidden"))
    folded.metadata = {"jupyter": {"source_hidden": True}, "tags": [HIDDEN]}
    notebook.cells = [opened, folded]
    words = nbconvert_words("html")
    exporter = HTMLExporter(
        template_name=words[words.index("--template") + 1],
        config=Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {HIDDEN}}}),
    )
    options = [word for word in words if word.startswith("--TagRemovePreprocessor.")]
    assert options == ["--TagRemovePreprocessor.enabled=True",
                       f"--TagRemovePreprocessor.remove_input_tags={HIDDEN}"]  # fmt: skip
    page, _ = exporter.from_notebook_node(notebook)
    assert "seen" in page and "hidden&" not in page and "'hidden'" not in page


def test_copies_for_students_have_exercises_and_no_solutions():
    words = nbconvert_words("notebook")
    options = [word for word in words if word.startswith("--TagRemovePreprocessor.")]
    assert options == ["--TagRemovePreprocessor.enabled=True",
                       "--TagRemovePreprocessor.remove_cell_tags=solution"]  # fmt: skip
    paths = [path for path in IPYNB if fnmatch.fnmatch(str(path), f"*/{words[-1]}")]
    assert [path.stem[:2] for path in paths] == ["01", "02", "03", "06", "07"]
    config = {"TagRemovePreprocessor": {"enabled": True, "remove_cell_tags": {"solution"}}}
    for notebook in map(read, paths):
        copy, _ = NotebookExporter(config=Config(config)).from_notebook_node(notebook)
        for text in ("<summary>Solution", "judge_solution"):
            assert any(text in cell.source for cell in notebook.cells) and text not in copy
        assert "check_exercise" in copy


def test_the_picture_that_13_shows_is_the_one_in_results():
    """Else execute 13 again (tests/execute_notebooks.py)."""
    (notebook,) = (read(path) for path in IPYNB if path.stem == "13_evidence")
    shown = [o.data["image/png"] for c in code_of(notebook) for o in c.outputs
             if "image/png" in o.get("data", {})]  # fmt: skip
    saved = (lab.ROOT / "results/evidence/intervals.png").read_bytes()
    assert base64.b64decode(shown[0]) == saved
    assert (lab.ROOT / "results/evidence/intervals.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_links_lead_to_files(path):
    texts = [c.source for c in read(path).cells if c.cell_type == "markdown"]
    links = re.findall(r"\]\((?!https?:|attachment:)([^)#]+)[^)]*\)", "\n".join(texts))
    assert links and [link for link in links if not (NOTEBOOKS / link).exists()] == []


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_the_code_it_shows_is_the_code_it_runs(path):
    """Execute a notebook again when a function that it prints has changed."""
    files = [Path(tcs.__file__), *Path(lab.__file__).parent.rglob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    there = {line.strip() for text in texts for line in text.splitlines()}
    for cell in code_of(read(path)):
        if "lab.show_code(" in cell.source:
            (output,) = cell.outputs
            first, *shown, last = output.data["text/markdown"].splitlines()
            assert (first, last) == ("```python", "```")
            assert shown and not [line for line in shown if line.strip() not in there]


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_no_notebook_takes_a_parameter_that_it_does_not_know(path):
    """Its own cells up to the check, as after papermill has put in a cell of its own."""
    cells = code_of(read(path))
    checked = next(n for n, cell in enumerate(cells) if "notebook_params(globals()" in cell.source)
    (own,) = (n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    assert checked == own + 1
    namespace = {"In": [cells[own].source, "# Parameters\nevidenz = 'cpu'\n"]}
    with matplotlib.rc_context():
        for cell in cells[:checked]:
            exec(cell.source, namespace)
        with pytest.raises(ValueError, match="unknown parameter: evidenz"):
            exec(cells[checked].source, namespace)


# What a reader may write: into the cell of parameters, beside a number that is calculated, or below.
TYPED = {
    "a name": ("{own}\nevidenz = 3", "evidenz"),
    "with a type": ("{own}\nevidenz: int = 3", "evidenz"),
    "beside a calculation": ("{own}\nevidenz = 1 / 3", "evidenz"),
    "in another cell": ("{own}", "evidenz = 'cpu'  # the profile", "evidenz"),
}


@pytest.mark.parametrize("path", IPYNB, **by_name)
def test_no_notebook_ignores_a_name_that_a_reader_adds(path):
    cells = code_of(read(path))
    (own,) = (n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    running = cells[own + 1].source
    for *typed, name in TYPED.values():
        typed = [cell.format(own=cells[own].source) for cell in typed]
        namespace = {"In": ["import tcs_lab as lab", *typed, running]}
        with matplotlib.rc_context():
            for cell in cells[: own + 1]:
                exec(cell.source, namespace)
            with pytest.raises(ValueError, match=f"unknown parameter: {name}; allowed: "):
                exec(running, namespace)
    # what a reader assigns later, and the notebook's own names, are no such names
    for later in (["x = f()\nmu = 0.1"], ["mu = f()"]):
        lab.check_notebook_params({"In": [*typed[:1], *later, running]}, lab.PARAMETERS)
    lab.check_notebook_params({"In": [*typed[:1], running]}, lab.PARAMETERS)


DEVICELESS = ("01", "02", "03", "04", "05")


@pytest.mark.parametrize("path", [p for p in IPYNB if p.stem[:2] in DEVICELESS], **by_name)
def test_what_a_notebook_would_override_is_named(path):
    cells = code_of(read(path))
    (own,) = (n for n, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    for name in ["device", "learning_rate" if path.stem[:2] == "04" else "jobs"]:
        cell = f"{cells[own].source}\n{name} = 'cuda'"
        with pytest.raises(ValueError, match=f"unknown parameter: {name}; allowed: "):
            exec(cells[own + 1].source, {"lab": lab, "In": [cell, cells[own + 1].source]})
