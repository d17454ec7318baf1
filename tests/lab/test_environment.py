"""Environment variables that the lab reads: a wrong one is named, with what is allowed."""

import os
import sys
from pathlib import Path

import pytest
import tcs_lab as lab
from tcs_lab.studies.loopback import Loopback
from tcs_lab.support.files import hold_lock


def test_a_cache_folder_that_is_a_file_is_named(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TCS_CACHE", "")
    for name in ("XDG_CACHE_HOME", "TCS_CACHE"):
        monkeypatch.setenv(name, str(file))
        with pytest.raises(ValueError, match=rf"^\${name}: got .*file.*allowed: a folder$"):
            lab.cache_folder()
    monkeypatch.setenv("TCS_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert lab.cache_folder() == tmp_path / "tcs-core"
    monkeypatch.setenv("TCS_CACHE", str(tmp_path / "new"))
    assert lab.cache_folder() == tmp_path / "new"


@pytest.mark.parametrize("name", ["below a file", "not to be written"])
def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TCS_CACHE", str(tmp_path / "file" / "cache"))
    if name == "not to be written":
        monkeypatch.setenv("TCS_CACHE", "/proc/tcs")
    with (
        pytest.raises(ValueError, match=r"the cache folder: got .*allowed: .*\$TCS_CACHE"),
        hold_lock(tmp_path / "x"),
    ):
        pass


def test_flowers_programs_are_found_where_no_path_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("PATH")
    path = Loopback(tmp_path).environment["PATH"]
    assert path.startswith(f"{Path(sys.executable).parent}{os.pathsep}")
