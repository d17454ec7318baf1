"""The rooms of the lab: nothing imports upwards, no two rooms import each other."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tcs_lab as lab

LAB = Path(lab.__file__).parent
FLOORS = [  # from the ground; a room imports only from floors below its own
    {"support", "schemes"},
    {"tasks"},
    {"training"},
    {"runs", "tables"},
    {"evidence", "studies", "teaching"},
    {"compare"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imported(source):
    """The modules of the lab that a module's text imports, wherever in it, as tuples of names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "tcs_lab"}
    return found


def upwards(room, source):
    """The rooms that a module of a room imports and that are not below it. None of them may be the
    lab as a whole, which is above all rooms."""
    below = {other for other in FLOOR_OF if FLOOR_OF[other] < FLOOR_OF[room]} | {room}
    others = [names for names in imported(source) if names[:2] != ("support", "lazy")]
    return {names[0] if names else "tcs_lab" for names in others} - below


def test_every_module_is_in_a_room_and_every_room_on_a_floor():
    assert {path.parent.name for path in LAB.glob("*/__init__.py")} == FLOOR_OF.keys()
    above = {"__init__", "__main__", "commands"}  # the command line
    assert {path.stem for path in LAB.glob("*.py")} == above


@pytest.mark.parametrize(
    "path", sorted(LAB.glob("*/*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_a_room_imports_from_below(path):
    assert not upwards(path.parent.name, path.read_text(encoding="utf-8"))


def test_lazy_names_import_nothing_of_the_lab():
    assert not imported((LAB / "support" / "lazy.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "room, line, found",
    [
        ("tasks", "from tcs_lab.training.configuration import RunConfig", {"training"}),
        ("tables", "from tcs_lab.runs import records", {"runs"}),  # on the same floor
        ("runs", "def f():\n    import tcs_lab.evidence.claims", {"evidence"}),
        ("runs", "from tcs_lab import evidence", {"evidence"}),
        ("runs", "import tcs_lab", {"tcs_lab"}),
        ("runs", "import tcs_lab.runs.plans, tcs_lab.training", set()),
        ("schemes", "from tcs_lab.support.files import hold_lock", {"support"}),
    ],
)
def test_an_import_from_above_is_found(room, line, found):
    assert upwards(room, line) == found


def test_what_a_room_offers_is_there():
    rooms = [lab, *(getattr(lab, room) for room in FLOOR_OF)]
    for room in rooms:
        for name in dir(room):
            assert name == "flower" or getattr(room, name) is not None  # needs an extra of its own


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match=r"^module 'tcs_lab' has no attribute 'recoded'"):
        lab.recoded  # noqa: B018
    with pytest.raises(ImportError):
        from tcs_lab.tables import summry  # noqa: F401


def test_importing_the_lab_imports_nothing_heavy():
    code = "import sys, tcs_lab; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    heavy = {"torch", "numpy", "pandas", "matplotlib", "scipy", "pydantic", "tcs_core"}
    assert not heavy & set(done.stdout.split())
    assert "tcs_lab" in done.stdout.split()


def test_every_module_of_the_studies_is_offered():
    folder = LAB / "studies"
    names = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert names <= set(dir(importlib.import_module("tcs_lab.studies")))
