"""The index: records by what they are, whatever their files are called."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from tcs_lab.runs.jobs import Job
from tcs_lab.runs.records import Record, read_json_record, results_folder
from tcs_lab.runs.runs import Run
from tcs_lab.support.errors import reject_unknown


def find_records(
    kind: type[Job] = Run, results: str | Path | None = None, **facts: Any
) -> dict[Path, Record]:
    """The records of this kind that have these facts, by file, sorted by name.

    Facts of a run are the profile (its folder), its settings, `scheme` as a name, `status` and
    `digest`: find_records(profile="gpu", epochs=300, scheme="TCS"). Of another kind they are what
    `kind.facts` says. ValueError names a file that can't be read, and a fact that there is none of.
    """
    folders = _Wanted({key: glob.escape(str(value)) for key, value in facts.items()})
    there = sorted(results_folder("", results).glob(kind.pattern.format_map(folders)))
    found = {}
    for path in there:
        record = read_json_record(path)
        known = kind.facts(record, path)
        reject_unknown(facts, known, "fact of a record")
        if all(known[key] == value for key, value in facts.items()):
            found[path] = record
    return found


class _Wanted(dict):
    """Parts of a file's path: as they are wanted, or any."""

    def __missing__(self, key: str) -> str:
        return "*"
