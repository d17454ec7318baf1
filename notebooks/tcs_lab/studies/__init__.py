"""Measurements beside the runs: speed, the hook on real networks and optimizers, Flower.

Here belongs an experiment that is no run of a RunConfig. The commands `tcs bench`, `tcs optimizers` and
`tcs links` make their measurements.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "bench": (
            "BENCHES USUAL Bench bench_codecs bench_compiled bench_round bench_step bench_table "
            "run_benches"
        ),
        "nodes": "Half Job Node Rounds",
        "paper_size": "PaperSize",
        "loopback": "free_port",
        "optimizers": "",
        "frontier": "",
        "power_sgd": "",
        "links": "",
        "flower": "",
    },
)
