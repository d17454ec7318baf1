"""Install: the core needs torch and numpy; what the lab needs is said in one line."""

import subprocess
import sys
import tomllib

import pytest
import tcs_lab as lab

PROJECT = tomllib.loads((lab.ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements):
    return {word.split(">")[0].split("=")[0].split("[")[0] for word in requirements}


def test_the_core_brings_two_packages_and_uv_all_of_them():
    assert names(PROJECT["project"]["dependencies"]) == {"torch", "numpy"}
    assert "tcs-core[lab]" in PROJECT["dependency-groups"]["dev"]
    assert "dev" in PROJECT["tool"]["uv"].get("default-groups", ["dev"])


def test_what_the_lab_asks_for_is_what_the_extra_brings():
    packages = {"yaml": "pyyaml", "PIL": "pillow"}
    asked = {packages.get(name, name) for name in lab._NEEDED}
    assert asked <= names(PROJECT["project"]["optional-dependencies"]["lab"])


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
