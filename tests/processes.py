"""Real processes for tests, ranks and commands: forked from one server that has imported all once."""

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import tcs_lab as lab
import torch
import torch.distributed as dist
from tcs_lab.__main__ import main
from tcs_lab.studies.loopback import free_port

FORKSERVER = multiprocessing.get_context("forkserver")  # one for all: each list replaces the last
FORKSERVER.set_forkserver_preload(
    ["tcs_lab.commands", "torch._dynamo", "pytest", "hypothesis", "pandas", "matplotlib.pyplot",
     "ipykernel.kernelapp", "ipykernel.ipkernel"]
)  # fmt: skip


def few_images(train=120):
    """In this process: so many synthetic images of 16 x 16 instead of 10,000, where no size is
    given."""
    make = lab.tasks.images.synthetic_dataset
    images = make(train, 40).resize(16)
    lab.tasks.images.synthetic_dataset = lambda *sizes: make(*sizes) if sizes else images


class Ranks(NamedTuple):
    """The processes of a group: this one's number, and how many there are."""

    rank: int
    size: int


def as_rank(rank, size, port, folder, joined, work, arguments, answers, all_are_done):
    """In a process of its own: what torchrun would set, then work(ranks, ...)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_RANK=str(rank), TCS_CACHE=str(folder / "cache"))
    torch.set_num_threads(1)
    few_images(60)
    try:
        if joined:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        answers.put((rank, work(Ranks(rank, size), folder, *arguments)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    all_are_done.wait(60)  # the others may still need this rank, which has the store if it is 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # the end of a process group may abort in one of gloo's threads


def start(size, folder, work, *arguments, joined=True):
    """The answers of `size` ranks that each call work(ranks, folder, *arguments), by rank; an
    exception is its text. Unless they are `joined`, the work has to initialize its process group."""
    answers, all_are_done, port = FORKSERVER.Queue(), FORKSERVER.Event(), free_port()
    processes = [
        FORKSERVER.Process(
            target=as_rank,
            args=(rank, size, port, folder, joined, work, arguments, answers, all_are_done),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=90) for _ in processes)
    all_are_done.set()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    print(*(answer for answer in found.values() if isinstance(answer, str)), sep="\n")
    return [found.get(rank) for rank in range(size)]


class ForkedWorkers:
    """Stands in for `tcs_lab.runs.workers._CONTEXT`: workers that need not import all once more."""

    Pipe = staticmethod(FORKSERVER.Pipe)

    @staticmethod
    def Process(target, args):
        *arguments, _ = args
        return FORKSERVER.Process(target=as_worker, args=(dict(os.environ), target, arguments))


def as_worker(variables, target, arguments):
    """In a process of its own, with these variables: the work of a worker. It ends with its parent, the
    server."""
    os.environ.update(variables)
    target(*arguments, os.getppid())


def as_command(words, folder, name, disturb):
    """In a process and process group of its own: the command line, its output in folder/name; what
    it trains is logged."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the tests run with nohup
    os.environ["TCS_CACHE"] = str(folder / "cache")
    out = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    torch.set_num_threads(1)
    few_images()
    log_runs(folder, name)
    if disturb:
        disturb()
    sys.exit(main(words))  # as the command ends: not before its threads do


def log_runs(folder, name):
    """In this process: the schemes it trains and the epochs it makes, in folder/trained, /epochs."""
    train = lab.runs.runs._train

    def log(file, what):
        with (folder / file).open("a", encoding="utf-8") as lines:
            lines.write(f"{name} {what}\n")

    def logged(config, data, on_epoch):
        def told(row):
            log("epochs", row["epoch"])
            on_epoch(row)

        log("trained", config.scheme.name)
        return train(config, data, told)

    lab.runs.runs._train = logged


def logged(path):
    """What was written down: pairs of the command's name and a scheme, or an epoch."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line.split() for line in text.splitlines()]


def start_command(words, folder, name="output", disturb=None):
    """The process, begun: `disturb` is called in it first."""
    process = FORKSERVER.Process(target=as_command, args=(words, folder, name, disturb))
    process.start()
    return process


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
