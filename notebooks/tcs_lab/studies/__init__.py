"""Measurements beside the runs: speed, the hook on real networks and optimizers, Flower.

Here belongs an experiment that is no run of a RunConfig. The commands `tcs bench`, `tcs optimizers` and
`tcs links` make their measurements.
"""

from tcs_lab.support.lazy import lazily

_MODULES = (
    "flower", "frontier", "links", "loopback", "nodes", "optimizers", "paper_size", "power_sgd",
)  # fmt: skip

__getattr__, __dir__ = lazily(__name__, {"bench": "BENCHES", **dict.fromkeys(_MODULES, "")})
