"""What the tests' own conftest promises."""

import pytest
from conftest import patient


def test_a_kernel_that_dies_at_its_start_is_started_again():
    calls = []

    def start(name, cwd=None):
        calls.append((name, cwd))
        if len(calls) < 3:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return "manager", "client"

    assert patient(start)("python3", cwd="here") == ("manager", "client")
    assert calls == [("python3", "here")] * 3


def test_a_kernel_that_never_starts_raises_its_own_error():
    def start():
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        patient(start)()
