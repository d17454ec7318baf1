"""One training: its configuration, the federation made of it, and the ways to run it.

`configuration` has the fields of a run, `training` makes a federation of them. Each further module
is one way to run it: clients in threads, streams or side by side, passes compiled or in a CUDA
graph. Here belongs a new way, or a new setting of a run. Files and records belong to `runs`.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "configuration": "RUN_KEYS WHERE_KEYS RunConfig digest_of from_outside",
        "training": (
            "CrossEntropy Data ImageFeed Training accuracy_on errors_in_file load_data outcomes "
            "pack_flags"
        ),
        "text_feed": "TextFeed",
        "watching": "MaskWatch Row UpdateWatch",
        "client_threads": "ClientThreads goes_a_client_a_thread",
        "client_streams": "ClientStreams goes_a_client_a_stream",
        "side_by_side": "SideBySide goes_side_by_side",
        "compiled": "goes_compiled passes",
        "cuda_graph": "DeferredLink GraphRounds goes_static",
    },
)
