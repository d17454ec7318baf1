"""What the tests of the DDP hook share: a model whose hook is looked over the shoulder."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs

SHARES = {"phi_global": 0.05, "phi_local": 0.02}
D, L = 1509, 6  # entries and parameters of small_net: 20 30 + 30, 30 25 + 25, 25 4 + 4


def small_net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 25), nn.Linear(25, 4)
    return nn.Sequential(*layers).to(dtype)


def flat(tensors):
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])


class Recorded:
    """A model under DDP whose hook keeps what every rank put in and what came out, by parameter.
    Its state is given, None for no hook, or made from these settings; `named`: with the model."""

    def __init__(self, state, model=None, named=False, **options):
        self.seen = []
        self.model = DistributedDataParallel(model or small_net(), **options)
        if isinstance(state, dict):
            state = tcs.TCSState(**state, **({"model": self.model} if named else {}))
        self.state = state
        self.dtype = next(self.model.parameters()).dtype
        if state is not None:

            def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
                parameters, gradients = bucket.parameters(), bucket.gradients()
                self.seen[-1] |= {p: g.clone() for p, g in zip(parameters, gradients, strict=True)}
                return tcs.tcs_hook(state, bucket)

            self.model.register_comm_hook(state, hook)

    def step(self, number, times=1.0, device="cpu"):
        """One backward pass on data of this rank's own, of its loss so many times; the averaged
        gradients."""
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.seen.append({})
        for p in self.model.parameters():
            torch.autograd.graph.increment_version(p)  # as after an optimizer's step
        self.model.zero_grad()
        x = torch.randn(8, 20, generator=generator).to(device, self.dtype)
        (self.model(x).float().square().mean() * times).backward()
        return [p.grad.clone() for p in self.model.parameters()]

    def inputs(self):
        """The last step's gradients of this rank before averaging."""
        return [self.seen[-1][p] for p in self.model.parameters()]

    def errors(self):
        of = self.kept("errors")
        return [e.view_as(p) for e, p in zip(of, self.model.parameters(), strict=True)]

    def masks(self):
        """The shared mask of every parameter, one after the other."""
        return torch.cat(self.kept("mask"))

    def kept(self, what):
        return kept(self.state, self.model.parameters(), what)


def kept(state, parameters, what):
    """What a hook's state has of these parameters: "errors" or "mask", parameter by parameter."""
    of = state.state_dict()["parameters"]
    return [of[state._names[p]][what] for p in parameters]
