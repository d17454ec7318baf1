"""A clone that cannot be written to, and a full disk: notebooks show everything and say once that
nothing was saved; a clean-up never hides the first error."""

import errno
import os
from pathlib import Path

import nbformat
import pytest
import tcs_lab as lab
from nbclient import NotebookClient
from tcs_lab.support import files

NOTEBOOKS = lab.ROOT / "notebooks"


class NoUnlink(type(Path())):
    """In a file system that is read-only, or full."""

    number = errno.EROFS

    def open(self, *_, **__):
        raise OSError(self.number, os.strerror(self.number), str(self))

    def unlink(self, missing_ok=False):
        raise OSError(errno.EACCES, "the clean-up fails, too", str(self))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_a_clean_up_does_not_hide_the_first_error(tmp_path, monkeypatch, number):
    monkeypatch.setattr(NoUnlink, "number", number)
    with pytest.raises(OSError) as raised:
        files.write_whole(NoUnlink(tmp_path / "table.md"), lambda file: file.write(b"x"))
    assert raised.value.errno == number


def test_what_is_shown_is_returned_and_one_line_says_that_it_is_not_saved(monkeypatch, capsys):
    monkeypatch.setattr(files, "_unsaved", [])
    table = lab.summary([], {}, lab.plan({"schemes": ["TCS"], "epochs": 2}))
    for _ in range(2):
        text = lab.save_table(table, "/proc/tcs/table1", "A title")
        assert text.startswith("**A title**") and "TCS" in text
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "/proc/tcs" in said


SPOILED = """
import errno, os, pathlib
from tcs_lab.support import files

def nothing_can_be_written(path, mode="r", *rest, **more):
    if str(path).startswith(RESULTS) and set(mode) & set("wxa"):
        raise OSError(NUMBER, os.strerror(NUMBER), str(path))
    return opened(path, mode, *rest, **more)

opened, pathlib.Path.open = pathlib.Path.open, nothing_can_be_written
"""


@pytest.mark.parametrize(("notebook", "number"), [("08", errno.EROFS)])
def test_a_notebook_shows_all_and_says_once_that_nothing_is_saved(notebook, number):
    read = nbformat.read(next(NOTEBOOKS.glob(f"{notebook}_*.ipynb")), 4)
    spoil = SPOILED.replace("RESULTS", repr(str(lab.ROOT / "results"))).replace(
        "NUMBER", str(number)
    )
    read.cells.insert(0, nbformat.v4.new_code_cell(spoil))
    NotebookClient(read, kernel_name="python3", timeout=600).execute(cwd=str(NOTEBOOKS))
    outputs = [out for cell in read.cells for out in cell.get("outputs", [])]
    printed = "".join(out.get("text", "") for out in outputs)
    assert printed.count(os.strerror(number)) == 1
    shown = [out.data for out in outputs if out.output_type == "display_data"]
    assert any("image/png" in data for data in shown)
    assert any("| ---" in data.get("text/markdown", "") for data in shown)
