"""One training: its configuration, the federation made of it, and the ways to run it.

`configuration` has the fields of a run, `training` makes a federation of them. Each further module
is one way to run it: clients in threads, streams or side by side, passes compiled or in a CUDA
graph. Here belongs a new way, or a new setting of a run. Files and records belong to `runs`.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    dict.fromkeys(
        (
            "client_streams",
            "client_threads",
            "compiled",
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
