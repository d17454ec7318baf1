"""What every room uses: errors in one line, files written whole, where folders lie.

Here belongs what knows nothing of schemes, runs and records. It imports no other room.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "errors": "cut one_line reject_unknown short_errors shown text_hint validated",
        "files": "alone cache_folder say_waiting write_json write_whole",
        "places": "IS_CLONE LAB ROOT",
        "lazy": "lazily",
    },
)
