"""Experiments other than runs of a RunConfig: speed, the hook with real links and optimizers, Flower.

A new experiment that is no run of a RunConfig belongs here. `tcs bench` makes those of speed, and
`tcs queue` those with a plan. Notebooks 10 and 18 use the rest.
"""

from tcs_lab.support.lazy import lazily

_MODULES = (
    "flower", "frontier", "hook_choice", "links", "loopback", "nodes", "optimizers", "paper_size",
    "power_sgd",
)  # fmt: skip

__getattr__, __dir__ = lazily(__name__, {"bench": "BENCHES", **dict.fromkeys(_MODULES, "")})
