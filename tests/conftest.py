"""Shared fixtures. Caches and results of the tests go to temporary folders."""

import atexit
import functools
import inspect
import multiprocessing
import os
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

if sys.dont_write_bytecode:  # else each of the many processes would compile torch's bytecode anew
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp("-bytecode")
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)
# the nets are tiny: more threads only get in each other's way, in every process of the tests
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

# The same examples every time; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure():
    """A kernel that dies at its start is started again: it chooses its ports before it opens them,
    and another process, such as the other worker's kernel, may take one of them in between."""
    from jupyter_client.provisioning import local_provisioner
    from kernels import launch_kernel
    from nbval import kernel

    kernel.start_new_kernel = patient(kernel.start_new_kernel)
    if "forkserver" in multiprocessing.get_all_start_methods():
        local_provisioner.launch_kernel = launch_kernel


def patient(start, attempts: int = 3):
    """`start`, called again after a RuntimeError, at most `attempts` times in all."""

    @functools.wraps(start)
    def start_again(*arguments, **options):
        for attempt in range(attempts):
            try:
                return start(*arguments, **options)
            except RuntimeError:
                if attempt == attempts - 1:
                    raise

    return start_again


LONG = [
    "04_", "10_", "03_", "05_", "02_", "test_resume", "test_many_runs", "test_determinism", "01_",
    "12_", "11_", "00_", "15_", "16_", "test_compare", "test_command_line",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    """What takes long first, so that no worker begins it when the others are done."""
    order = {name: place for place, name in enumerate(LONG)}

    def place(item) -> int:
        return min((p for name, p in order.items() if item.path.name.startswith(name)), default=99)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch, request):
    """No test reads or leaves anything in the user's cache, or uses a GPU unless it is about that:
    what is promised bit for bit is promised on CPUs."""
    import torch  # not by the process that only hands out the tests

    torch.set_num_threads(1)  # whatever a test before has left
    monkeypatch.setenv("TCS_CACHE", str(tmp_path / "cache"))
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of processes that a test starts
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:  # results are compared with those of CPUs, so they must be exact and repeatable
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def random():
    import torch

    return torch.Generator().manual_seed(7)


@pytest.fixture
def registry():
    """What is registered in a test is taken out again."""
    import tcs_core as tcs

    tables = (tcs.RULES, tcs.FAMILIES, tcs.QUANTIZERS, tcs.CODES)
    before, suffixes = [dict(table) for table in tables], list(tcs.SUFFIXES)
    yield lambda: ([list(table) for table in tables], list(tcs.SUFFIXES))
    for table, entries in zip(tables, before, strict=True):
        table.clear(), table.update(entries)
    tcs.SUFFIXES[:] = suffixes


@pytest.fixture
def uniform(registry):
    """The quantizer in `register_quantizer`'s docstring."""
    import torch

    import tcs_core as tcs

    lines = inspect.getdoc(tcs.register_quantizer).splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    names = {"torch": torch, "register_quantizer": tcs.register_quantizer}
    exec(example, names)
    return names["uniform_quantize"]


@pytest.fixture
def development_data() -> Path:
    """CIFAR-10 as JPEGs in a tar, named by $TCS_TEST_DATA; users need not have it."""
    path = os.environ.get("TCS_TEST_DATA")
    if not path or not Path(path).exists():
        pytest.skip("TCS_TEST_DATA does not name a tar of train/<class>/*, test/<class>/*")
    return Path(path)


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of queues are forked, where what they do is tested and not how they start."""
    import tcs_lab as lab
    from processes import ForkedWorkers

    monkeypatch.setattr(lab.runs.workers, "_CONTEXT", ForkedWorkers)


@pytest.fixture
def small(monkeypatch):
    """160 images instead of 10,000, in this process."""
    import tcs_lab as lab

    images = lab.synthetic_dataset(120, 40).resize(16)
    monkeypatch.setattr(lab.tasks.images, "synthetic_dataset", lambda: images)
    lab.load_dataset.cache_clear()
    yield
    lab.load_dataset.cache_clear()
