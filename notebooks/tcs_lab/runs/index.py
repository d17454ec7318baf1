"""The index: it finds records by what they are, whatever their files are called."""

from __future__ import annotations

import glob
from collections import defaultdict
from pathlib import Path
from typing import Any

from tcs_lab.runs.jobs import Job
from tcs_lab.runs.records import Record, read_json_record, results_folder
from tcs_lab.runs.runs import Run
from tcs_lab.support.errors import reject_unknown


def find_records(
    kind: type[Job] = Run, results: str | Path | None = None, **facts: Any
) -> dict[Path, Record]:
    """Find the records of this kind that have these facts, by file, sorted by name.

    Facts of a run are its profile (the name of its folder), its settings, `scheme` as a name,
    `status` and `digest`: find_records(profile="gpu", epochs=300, scheme="TCS"). `Job.facts` says
    what the facts of other kinds are. ValueError names a file that can't be read, or a fact that
    records of this kind do not have.
    """
    facts = {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}  # as in JSON
    # A part of the path that is not given may be any.
    folders = defaultdict(lambda: "*", {k: glob.escape(str(v)) for k, v in facts.items()})
    there = sorted(results_folder("", results).glob(kind.pattern.format_map(folders)))
    records = {}
    for path in there:
        record = read_json_record(path)
        known = kind.facts(record, path)
        reject_unknown(facts, known, "fact of a record")
        if all(known[key] == value for key, value in facts.items()):
            records[path] = record
    return records
