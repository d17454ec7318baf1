"""What every room uses: errors in one line, files written whole, where folders lie.

Here belongs what knows nothing of schemes, runs and records. It imports no other room.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__, dict.fromkeys(("errors", "files", "lazy", "paths", "processes"), "")
)
