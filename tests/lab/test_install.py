"""Install: the core needs torch and numpy; what the lab needs is named, and said in one line."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
import tcs_lab as lab

PROJECT = tomllib.loads((lab.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
LAB = sorted((lab.ROOT / "notebooks" / "tcs_lab").rglob("*.py"))
NOTEBOOKS = sorted((lab.ROOT / "notebooks").glob("*.py"))
EXAMPLES = sorted((lab.ROOT / "notebooks" / "examples").glob("*.py"))
TESTS = sorted((lab.ROOT / "tests").rglob("*.py"))


def names(requirements):
    """The names of packages that requirements ask for, as package indexes spell them."""
    found = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


CORE = names(PROJECT["project"]["dependencies"])
OF_LAB = CORE | names(EXTRAS["lab"])
OF_TESTS = OF_LAB | names(PROJECT["dependency-groups"]["dev"])


def imported(paths):
    """The packages of others that these files import, anywhere in them."""
    modules = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_bytes()))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    tops = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    own = {"tcs_core", "tcs_lab", *(path.stem for path in (*EXAMPLES, *TESTS))}
    brought = packages_distributions() | {"flwr": ["flwr"]}  # installed for notebook 18 alone
    return names(brought[name][0] for name in tops - own)


def test_all_that_is_imported_is_named_where_it_is_needed():
    assert imported([lab.ROOT / "tcs_core.py"]) == CORE == {"torch", "numpy"}
    flower = [path for path in LAB if path.stem == "flower"]
    assert imported(flower) - OF_LAB == names(EXTRAS["flower"])
    assert imported(set(LAB) - set(flower)) <= OF_LAB
    assert imported([*NOTEBOOKS, *EXAMPLES]) <= OF_LAB
    assert imported(TESTS) - names(EXTRAS["flower"]) <= OF_TESTS


PROGRAMS = {
    "tcs-core",  # with its extra
    "ipykernel", "jupyterlab", "papermill",  # run notebooks
    "jupytext",  # keeps them in pairs
    "mypy", "types-pyyaml", "ruff", "pytest-xdist",  # check
}  # fmt: skip


def test_nothing_is_named_that_is_used_nowhere():
    everything = imported([lab.ROOT / "tcs_core.py", *LAB, *NOTEBOOKS, *TESTS])
    assert OF_TESTS | names(EXTRAS["flower"]) == (everything | PROGRAMS)
    assert names(PROJECT["tool"]["uv"]["constraint-dependencies"]) <= everything | PROGRAMS


IMPORT_ALL = """
import importlib, pkgutil, tcs_lab
for module in pkgutil.walk_packages(tcs_lab.__path__, "tcs_lab."):
    if module.name not in ("tcs_lab.__main__", "tcs_lab.studies.flower"):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_where_the_extra_alone_is_installed(tmp_path):
    """A new environment: half a minute, and gigabytes unless uv has them in its cache."""
    python = tmp_path / "bin" / "python"
    for words in (
        ["uv", "venv", "--python", sys.executable, str(tmp_path)],
        ["uv", "pip", "install", "--python", str(python), "-e", f"{lab.ROOT}[lab]"],
    ):
        subprocess.run(words, check=True, capture_output=True)
    done = subprocess.run([python, "-c", IMPORT_ALL], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(LAB) - 3  # without __main__, flower and tcs_lab itself
    without = subprocess.run([python, "-c", "import pytest"], capture_output=True)
    assert without.returncode == 1


def test_the_extra_is_part_of_what_uv_brings():
    assert "tcs-core[lab]" in PROJECT["dependency-groups"]["dev"]
    assert "dev" in PROJECT["tool"]["uv"].get("default-groups", ["dev"])


def test_what_the_lab_asks_for_is_what_the_extra_brings():
    packages = {"yaml": "pyyaml", "PIL": "pillow"}
    asked = {packages.get(name, name) for name in lab._NEEDED}
    assert asked <= names(EXTRAS["lab"])


WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("pandas", "PIL") else found(name, *rest)
sys.argv[0] = {command!r}
import tcs_lab
"""


@pytest.mark.parametrize("command", ["/usr/bin/tcs", "-m", "notebook.py"])
def test_without_the_extra_one_line_says_what_to_install(command):
    words = [sys.executable, "-c", WITHOUT.format(command=command)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8")
    line = "tcs_lab needs pandas, PIL: pip install 'tcs-core[lab]'"
    assert done.returncode == 1
    if command == "notebook.py":
        assert done.stderr.rstrip().endswith(f"ModuleNotFoundError: {line}")
    else:
        assert done.stderr == f"error: {line}\n"
