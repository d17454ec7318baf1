"""What several test files share."""

import contextlib
import copy
import io
import json
import tarfile
import weakref

import tcs_lab as lab
import torch
import torch.distributed as dist
from PIL import Image
from tcs_lab import RunConfig  # with all schemes, STC, -D2, + and others
from torch import Tensor
from torch.optim.sgd import sgd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Imported before a test replaces a name that it binds. An older checkout, which the oracle asks, has none.
with contextlib.suppress(ModuleNotFoundError):
    import tcs_lab.commands

# A run of a tenth of a second.
TINY = {"model": "resnet8", "width": 2, "batch_size": 4, "clients": 3, "epochs": 3, "train_samples": 60,
        "test_samples": 40, "reference_batch": None, "threads": 1}  # fmt: skip


READERS = ("ci", "quick")  # profiles whose results a reader makes


def config(scheme="TCS-L2-Q5", **changes):
    return RunConfig(scheme, **(TINY | changes))


def tiny_command(folder, **changes):
    """The words of a command that makes TINY runs under `folder`."""
    path = folder / "tiny.yaml"
    lines = [f"{k}: {json.dumps(v)}\n" for k, v in (TINY | changes).items()]
    path.write_text("".join(lines), encoding="utf-8")
    return ["run", "--params", str(path), "--results", str(folder)]


def numbers(record):
    """All of a record that a rerun, by any number of processes, must repeat bit for bit."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["rows"]]
    return record["config"], record["status"], record["reason"], record["dimension"], rows


def image_bytes(colour, size=(8, 8), mode="RGB", form="PNG"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, form)
    return buffer.getvalue()


IMAGES = {
    f"{part}/{name}/{i}.png": image_bytes((30 * c, 10 * i, 200))
    for part, count in (("train", 4), ("test", 2))
    for c, name in enumerate(["cat", "dog"])
    for i in range(count)
}


def as_folder(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def as_tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def load_images(path):
    """A folder or tar of images, read afresh."""
    lab.load_dataset.cache_clear()
    return lab.load_dataset("folder", str(path))


# Trainings ────────────────────────────────────────────────────────────────────────────────────────


def sgd_steps(model, batches, eta, loss, weight_decay=0.0, momentum=0.0):
    """The parameters after a step of torch's own SGD on each batch, on a copy of the model.

    The function behind torch.optim.SGD: making one of those imports torch._dynamo, for seconds."""
    model = copy.deepcopy(model).train()
    parameters = list(model.parameters())
    for p in parameters:
        p.data = p.data.clone()
    buffers = [None] * len(parameters)
    for batch in batches:
        gradients = list(torch.autograd.grad(loss(model, batch), parameters))
        with torch.no_grad():
            sgd(parameters, gradients, buffers, foreach=False, fused=False, weight_decay=weight_decay,
                momentum=momentum, lr=eta, dampening=0.0, nesterov=False, maximize=False)  # fmt: skip
    return [p.detach() for p in parameters]


def same_state(one, two):
    """Whether two states hold the same, tensors to the bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same_state(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same_state, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def whole_state(*objects):
    """All that objects of the core hold, by value, at any depth; to be compared by `same_state`.
    Only thresholds are left out, which speed a selection up and change no result."""
    seen = {}

    def by_value(one):
        if isinstance(one, torch.Tensor):
            return one.detach().clone(), one.requires_grad
        if isinstance(one, dict):
            return {key: by_value(value) for key, value in one.items()}
        if isinstance(one, list | tuple):
            return [by_value(value) for value in one]
        module = getattr(type(one), "__module__", "")
        if not module.startswith(("tcs_core", "tcs_lab")) or not hasattr(one, "__dict__"):
            return copy.deepcopy(one)
        if id(one) in seen:
            return seen[id(one)]
        seen[id(one)] = type(one).__name__
        return {key: by_value(value) for key, value in vars(one).items()}

    return [by_value(one) for one in objects]


def deltas_like_training(rounds, clients, sizes):
    """Deltas whose important positions drift slowly, with layers of different scale."""
    generator = torch.Generator().manual_seed(3)
    dimension = sum(sizes)
    scale = torch.cat([torch.full((s,), 2.0**-i) for i, s in enumerate(sizes)])
    drift = torch.randn(dimension, generator=generator)
    for _ in range(rounds):
        drift = 0.9 * drift + 0.3 * torch.randn(dimension, generator=generator)
        yield scale * (drift + torch.randn(clients, dimension, generator=generator))


class HeldFeed:
    """A feed with one list of batches per client, in which no batch is used twice. `hold` prepares it for
    static rounds."""

    def __init__(self, batches_N, local_steps=1):
        self.batches_N, self.steps, self.clients = batches_N, local_steps, len(batches_N)

    def batch(self, n, round, tau):
        if not isinstance(round, torch.Tensor):
            return self.batches_N[n][round * self.steps + tau]
        place = (round * self.steps + tau).view(
            1
        )  # part[place] of a 0-d tensor would read its value
        return tuple(part.index_select(0, place)[0] for part in self.held[n])

    def hold(self, rounds):
        span = slice(rounds.start * self.steps, rounds.stop * self.steps)
        columns = [zip(*batches[span], strict=True) for batches in self.batches_N]
        self.held = [[torch.stack(parts) for parts in column] for column in columns]


# Memory ───────────────────────────────────────────────────────────────────────────────────────────


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within it held at one time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage):
        if storage.data_ptr() not in self.known:
            size, place = storage.nbytes(), storage.data_ptr()
            self.known[place] = weakref.finalize(storage, self._freed, place, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _freed(self, place, size):
        del self.known[place]
        self.live -= size


# The DDP hook without processes ────────────────────────────────────────────────────────────────────


class Bucket:
    """A gradient as DDP hands it to a hook, of the only rank of a group."""

    def __init__(self, gradient_D, parameters, last=True):
        self.gradient_D, self._parameters, self.last = gradient_D, parameters, last
        for p in parameters:
            torch.autograd.graph.increment_version(p)  # as after an optimizer's step

    def buffer(self):
        return self.gradient_D

    def parameters(self):
        return self._parameters

    def gradients(self):
        parts = self.gradient_D.split([p.numel() for p in self._parameters])
        return [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self):
        return self.last


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


def alone_in_a_group(monkeypatch):
    """Collectives of the only rank of a group."""

    def gather(gathered, part, group, async_op=False):
        gathered[0].copy_(part)
        return Alone(gathered)

    monkeypatch.setattr(dist, "all_reduce", lambda sent, group, async_op: Alone(sent))
    monkeypatch.setattr(dist, "all_gather", gather)
