"""Errors above a limit live in a file. That records stay the same: test_resume.py."""

import errno
import gc
import os
import pathlib

import pytest
import tcs_lab as lab
from common import config
from tcs_lab.training.training import Training, move_errors_to_file

import tcs_core as tcs


def mapped_errors():
    """Files of errors that this process has mapped."""
    lines = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "errors-" in line]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc (Linux)")
@pytest.mark.parametrize("share, there", [(0.99, True), (1.01, False)])
def test_errors_above_the_limit_are_in_a_file_that_ends_with_the_training(share, there):
    dimension = 1420  # of the tiny net
    wanted = config(errors_limit=share * 4e-6 * 3 * dimension)
    training = Training(wanted, lab.load_data(wanted))
    assert len(training.theta_D) == dimension and bool(mapped_errors()) == there
    folder = pathlib.Path(os.environ["TCS_CACHE"])
    assert not list(folder.glob("errors-*"))  # it has no name any more
    del training
    gc.collect()
    assert not mapped_errors()


def test_errors_in_a_file_need_room_and_a_cpu(monkeypatch, tmp_path):
    compressor = tcs.Compressor(tcs.Scheme.named("TCS"), [100], 2)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    before = compressor.errors_ND
    with pytest.raises(OSError, match="No space left"):
        move_errors_to_file(compressor)
    assert compressor.errors_ND is before and not list((tmp_path / "cache").glob("errors-*"))
    compressor.errors_ND = before.to("meta")
    with pytest.raises(ValueError, match="errors_limit: got errors on meta"):
        move_errors_to_file(compressor)
