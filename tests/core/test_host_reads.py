"""How often an eager step of compression stops for the host: on a GPU each time with an empty queue.
Counted on a CPU, with the operations that a GPU would do."""

import pytest
import torch
import torch.distributed as dist
from common import deltas_like_training
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tcs_core as tcs

SIZES, ROUNDS = [900, 100], 6
PARAMETERS = [torch.zeros(size) for size in SIZES]
LOOKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}


class Reads(TorchDispatchMode):
    """Counts what needs a value on the host: a number, or how many places a mask has."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        places = args[1] if name.startswith(("index", "_index")) and len(args) > 1 else ()
        masks = [p for p in places if p is not None] if isinstance(places, (list, tuple)) else []
        self.count += name in LOOKS or any(p.dtype == torch.bool for p in masks)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors, where the core takes numpy's arrays on a CPU."""
    monkeypatch.setattr(tcs, "_array", lambda tensor: tensor)


@pytest.mark.parametrize(
    ("name", "a_client", "server"), [("TCS", 6, 5), ("TCS-Q5", 6, 5), ("top-K", 5, 2)]
)
def test_what_an_eager_sparse_round_reads(name, a_client, server, as_on_a_gpu):
    for clients in (2, 6):
        compressor = tcs.Compressor(tcs.Scheme.named(name), SIZES, clients)
        *before, last_ND = deltas_like_training(ROUNDS, clients, SIZES)
        for deltas_ND in before:
            compressor.step(deltas_ND)
        with Reads() as reads:
            compressor.step(last_ND)
        assert reads.count == a_client * clients + server


class Bucket:
    """A gradient as DDP hands it to a hook, of the only rank of a group."""

    def __init__(self, gradient_D):
        self.gradient_D = gradient_D

    def buffer(self):
        return self.gradient_D

    def parameters(self):
        return PARAMETERS

    def is_last(self):
        return True


class Alone:
    """A group of one rank; a collective's work, done at once."""

    def __init__(self, *sent):
        self.sent = list(sent)

    def size(self):
        return 1

    def rank(self):
        return 0

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self.sent)
        return future


def test_what_a_step_of_the_hook_reads(as_on_a_gpu, monkeypatch):
    """A client's 6, the next mask's 3, and twice whether all is finite; copies to the host: of the
    mask, for its checksum, of the message's parts, and of what a rank sent."""
    plain, copies = torch.Tensor.cpu, []

    def gather(gathered, part, group, async_op):
        gathered[0].copy_(part)
        return Alone(gathered)

    monkeypatch.setattr(dist, "all_reduce", lambda sent, group, async_op: Alone(sent))
    monkeypatch.setattr(dist, "all_gather", gather)

    def on_the_host(work):
        def unseen(*args):
            with _disable_current_modes():
                return work(*args)

        return unseen

    for coding in ("encode_message", "decode_message"):
        monkeypatch.setattr(tcs, coding, on_the_host(getattr(tcs, coding)))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copies.append(t) or plain(t))
    state = tcs.TCSState(Alone(), phi_global=0.05, phi_local=0.02, start_iter=2)
    *before, last_ND = deltas_like_training(ROUNDS, 1, SIZES)
    for deltas_ND in before:
        tcs.tcs_hook(state, Bucket(deltas_ND[0])).wait()
    copies.clear()
    with Reads() as reads:
        tcs.tcs_hook(state, Bucket(last_ND[0])).wait()
    assert (reads.count, len(copies)) == (11, 6)
