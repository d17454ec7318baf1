"""Anybody's method in a fair table: methods from a file, their tuning and score on one track.

Here belongs what `tcs compare` does: the track, a method's file, its row, the table and the picture.
The classes that a per-tensor method becomes are in `tcs_lab.schemes.tensors`.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    dict.fromkeys(("command", "methods", "probe", "rows", "scoring", "table", "track"), ""),
)
