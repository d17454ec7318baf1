"""One training: its configuration, the federation made of it, and the different ways to run it.

`configuration` has the fields of a run, and `training` makes a federation of them. `text_feed` has
the batches of a text, and `watching` counts how masks change. Each further module is one way to run a
training: clients in threads, streams or side by side, rounds as a CUDA graph, or convolutions in bf16 on
processors without AVX-512. A new way to
run, or a new setting of a run, belongs here. Files and records belong to `runs`.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    dict.fromkeys(
        (
            "bf16_convolutions",
            "client_streams",
            "client_threads",
            "configuration",
            "cuda_graph",
            "side_by_side",
            "text_feed",
            "training",
            "watching",
        ),
        "",
    ),
)
