"""Real processes for tests: ranks forked from one server that has imported torch once."""

import contextlib
import multiprocessing
import os
import socket

import tcs_lab as lab
import torch

FORKSERVER = multiprocessing.get_context("forkserver")  # one for all: each list replaces the last
FORKSERVER.set_forkserver_preload(["tcs_core", "torch._dynamo", "pytest", "hypothesis"])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_rank(rank, size, port, folder, timeout, work, arguments, answers):
    """In a process of its own: what torchrun would set, then work(ranks, ...). With no timeout, the
    work joins the ranks itself."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), LOCAL_RANK=str(rank), TCS_CACHE=str(folder / "cache"))
    os.environ.pop("TCS_TIMEOUT", None)
    torch.set_num_threads(1)
    small = lab.synthetic_dataset(60, 40).resized(16)
    lab.synthetic_dataset = lambda: small
    try:
        join = lab.joined_ranks("cpu", timeout) if timeout else contextlib.nullcontext()
        with join as ranks:
            answers.put((rank, work(ranks, folder, *arguments)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))


def start(size, folder, work, *arguments, timeout=60, absent=()):
    """The answers of `size` ranks that each call work(ranks, folder, *arguments), by rank; an
    exception is its text."""
    answers, port = FORKSERVER.Queue(), free_port()
    processes = [
        FORKSERVER.Process(
            target=as_rank, args=(rank, size, port, folder, timeout, work, arguments, answers)
        )
        for rank in range(size)
        if rank not in absent
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=90) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return [found.get(rank) for rank in range(size)]
