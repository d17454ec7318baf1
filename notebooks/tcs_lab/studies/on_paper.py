"""What a GPU would have to do for a round as a CUDA graph, found without one: a trace on fake
tensors, which have shapes, types and devices, and no values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import tcs_core
from tcs_core import Federation, build_model
from tcs_lab.tasks.images import Batches, Dataset
from tcs_lab.training.configuration import RunConfig
from tcs_lab.training.cuda_graph import GraphRounds
from tcs_lab.training.training import CrossEntropy, ImageFeed


class GPU(NamedTuple):
    """What its maker publishes: bytes a second, and operations a second, dense."""

    name: str
    bandwidth: float
    bf16: float  # on tensor cores
    fp32: float  # beside them

    def seconds(self, op: Op) -> float:
        """The least one operation can take: its bytes, or its arithmetic, at the peak."""
        return max(op.bytes / self.bandwidth, op.flops / (self.bf16 if op.half else self.fp32))


class Op(NamedTuple):
    """One operation that launches a kernel, or a few."""

    name: str
    bytes: int
    flops: int  # of products of matrices and convolutions; what else there is waits for memory
    half: bool  # these in bfloat16
    waits: bool  # the host waits for a value, or for how many there are


_UNTOUCHED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach",
              "_unsafe_view")  # fmt: skip
_ONLY_WRITTEN = ("copy_", "fill_", "zero_")  # the first tensor
_AT_PLACES = ("index", "index_select", "index_add_", "index_copy_", "index_fill_",
              "scatter_")  # of the first one  # fmt: skip


class Trace(TorchDispatchMode):
    """Keeps in `ops` what is done while it is on. Every operation reads its inputs once and writes
    its outputs once; a tensor that is indexed counts for the entries that the index names."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, packet = func(*args, **(kwargs or {})), func.overloadpacket
        name = packet.__name__
        if func.namespace == "aten" and not func.is_view and name not in _UNTOUCHED:
            flops = flop_registry.get(packet, lambda *_, **__: 0)
            done = flops(*args, **(kwargs or {}), out_val=out)
            half = any(t.dtype == torch.bfloat16 for t in _tensors(args))
            moved = _moved(name, args, kwargs or {}, out)
            self.ops.append(Op(name, moved, done, half, _waits(func, args)))
        return out


def _waits(func: Any, args: tuple) -> bool:
    if torch.Tag.dynamic_output_shape in func.tags:  # an index may be a mask
        masks = any(t.dtype == torch.bool for t in _tensors(args[1:]))
        return masks or func.overloadpacket is not torch.ops.aten.index
    return torch.Tag.data_dependent_output in func.tags


def _moved(name: str, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that one operation reads and writes."""
    read = {id(t): t for t in _tensors([v for k, v in kwargs.items() if k != "out"])}
    read |= {id(t): t for t in _tensors(args[1:] if name in _ONLY_WRITTEN else args)}
    sides = [*read.values(), *_tensors(out)]
    if name not in _AT_PLACES:
        return sum(_size(t) for t in sides)
    others = [t for t in _tensors(args[1:]) if t is not args[0]]
    most = out.numel() if out is not args[0] else max(t.numel() for t in others)
    return sum(min(_size(t), most * t.element_size()) for t in sides)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Bytes of memory that a tensor covers; an expanded one has fewer than its entries say."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def fake_mode() -> FakeTensorMode:
    """Where it is on, tensors have no values; what tables there are on the CPU may enter."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_feed(
    config: RunConfig, data: Dataset, mode: FakeTensorMode, device: str = "cpu"
) -> ImageFeed:
    """The batches of a data set as fake tensors, on a device that need not be there."""
    batches, clients = Batches(data, torch.device("cpu"), config.crop_padding), config.client_count
    tensors = {k: v for k, v in vars(batches).items() if isinstance(v, Tensor)}
    with mode:
        vars(batches).update({k: torch.empty_like(v, device=device) for k, v in tensors.items()})
        samples_NM = torch.arange(len(data.train_labels)).view(clients, -1)
        return ImageFeed(batches, samples_NM, config, range(clients))


def _make_fake_(model: nn.Module, mode: FakeTensorMode) -> None:
    """Parameters and buffers become fake ones, which lie in memory as they did."""
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            tensors = vars(module)[kind]
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = mode.from_tensor(tensor)


def static_round(config: RunConfig, data: Dataset) -> tuple[list[Op], list[Op]]:
    """What one client does in such a round: augmentation, passes and local steps; and what follows:
    the compression of all clients, and the server's step.

    `data` has as many training images as the clients need for one round, or a multiple. The fake
    device is a CPU, since a backward pass asks a GPU for its streams; so the core is told that it
    may not look at values.
    """
    config, mode = replace(config, device="cpu"), fake_mode()
    feed = fake_feed(config, data, mode)
    model, loss = build_model(config.model, config.width), CrossEntropy(config)
    _make_fake_(model, mode)
    with mode, mock.patch.object(tcs_core, "may_look", lambda tensor: False):
        decay = config.weight_decay
        federation = Federation(model, feed, config.scheme, 0.1, loss=loss, weight_decay=decay)
        compressor = federation.compressor
        compressor.keep_errors_in(torch.zeros(compressor.errors_ND.shape))
        compressor.rule.observe(federation.theta_D)  # a mask to start with
        rounds = GraphRounds(federation, feed.rounds)
        feed.hold(range(feed.rounds))
        with federation.trainer.lent(), Trace() as client:
            federation.trainer.difference(0, rounds.index, rounds.eta)
        deltas_ND = torch.empty(feed.clients, federation.flat.dimension)
        made = mock.patch.object(federation.trainer, "difference", lambda n, *_: deltas_ND[n])
        with made, Trace() as server:
            rounds._round()
    return client.ops, server.ops
