"""Any method in a fair table: methods from a file, tuned and scored on the same track as the others.

What `tcs compare` does belongs here: the track, a method's file, its row, the table and the picture.
The classes that a per-tensor method becomes are in `tcs_lab.schemes.tensors`.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    dict.fromkeys(("command", "methods", "probe", "rows", "scoring", "table", "track"), ""),
)
