"""Records: read back as they were written, or named; made again from themselves."""

import copy
import functools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tcs_lab as lab
from common import READERS, config
from tcs_lab.__main__ import main

import tcs_core as tcs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One record's text, made once."""
    folder = tmp_path_factory.mktemp("finished")
    images = lab.synthetic_dataset(120, 40).resize(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TCS_CACHE", str(folder / "cache"))
        patch.setattr(lab.tasks.images, "synthetic_dataset", lambda: images)
        lab.load_dataset.cache_clear()
        lab.run(config(), folder)
        lab.load_dataset.cache_clear()
    return lab.record_path(config(), folder).read_text(encoding="utf-8")


def refused(folder, text):
    """What read_record says of this text in the place of a record; a run leaves it alone."""
    path = lab.record_path(config(), folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(path.name)) as raised:
        lab.read_record(path, config())
    with pytest.raises(ValueError) as again:
        lab.run(config(), folder)
    assert str(raised.value) == str(again.value) and "\n" not in str(raised.value)
    assert path.read_text(encoding="utf-8") == text
    return str(raised.value)


BROKEN = {
    "version": ('"version": 1', '"version": 2'),
    "status": ('"finished"', '"fine"'),
    "config": ('"seed": 0', '"seed": 5'),
    "epochs [1, 9, 3]": ('"epoch": 2', '"epoch": 9'),
    "accuracy": ('"accuracy": 0', '"accuracy": 8'),
    "bits_up": ('"bits_up"', '"bits"'),
    "dimension": ('"dimension": ', '"dimension": -'),
    "as text": ('"accuracy": 0', '"accuracy": "x", "a": 0'),
    "not what was written": ('"train_loss": ', '"train_loss": 1'),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_record_that_is_none_is_named_and_left_alone(tmp_path, finished, case):
    said = refused(tmp_path, finished.replace(*BROKEN[case], 1))
    assert case in said or case == "as text"
    assert said.endswith("delete it to run again")


def places(value, path=()):
    """The places of all numbers, texts and lists in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


EDITS = {
    "removed": None, "NaN": math.nan, "infinity": math.inf, "another number": 0.123456789, "minus": -1, "null": None,
    "text": "x", "list": [], "true": True, "huge": 10**400,
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_every_value_of_a_record_changed_by_hand_is_noticed(tmp_path, finished, edit):
    """Each in turn: the configuration, every number of every row, the provenance."""
    path = tmp_path / "edited.json"
    everywhere = list(places(json.loads(finished)))
    assert len(everywhere) >= 100
    for place in everywhere:
        record = json.loads(finished)
        holder = functools.reduce(lambda inner, key: inner[key], place[:-1], record)
        if edit == "removed":
            del holder[place[-1]]
        elif holder[place[-1]] is EDITS[edit]:
            continue
        else:
            holder[place[-1]] = EDITS[edit]
        if edit == "removed" and place == ("sha256",):
            continue  # as in records of before there was one
        path.write_text(json.dumps(record), encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(path.name)):
            lab.read_record(path, config())


@pytest.mark.parametrize("seed", range(5))
def test_a_record_cut_off_anywhere(tmp_path, finished, seed):
    at = random.Random(seed).randrange(len(finished) - 2)
    assert "not a readable record" in refused(tmp_path, finished[:at])


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "3", '"x"', "[" * 100_000, '{"version": 1}', "\0", "NaN"]
)
def test_a_record_that_is_something_else(tmp_path, text):
    assert "not a" in refused(tmp_path, text)


def test_a_record_that_is_none_is_one_line_of_the_command(tmp_path, capsys, finished):
    path = tmp_path / "record.json"
    path.write_text(finished.replace('"finished"', '"fine"', 1), encoding="utf-8")
    assert main(["again", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: not a record: status: got 'fine'")
    assert error.count("\n") == 1 and "delete" not in error


# Records outlive the code that made them ──────────────────────────────────────────────────────────


def test_a_record_from_before_there_was_a_sum_is_read(tmp_path, finished):
    record = json.loads(finished)
    del record["sha256"]
    path = tmp_path / "older.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    assert lab.read_record(path, config()) == record


RECORDS = sorted((lab.ROOT / "results").glob("*/runs/*.json"))
RECORDS = [p for p in RECORDS if p.parent.parent.name not in READERS]  # those are the reader's own


def test_every_committed_record_reads_and_names_its_run():
    assert len(RECORDS) > 800
    for path in RECORDS:
        record = lab.read_record(path)
        assert lab.digest_of(record["config"]) == record["digest"]
        assert lab.config_of(record).digest == record["digest"]
        assert path.stem.endswith(record["digest"])


def test_what_this_core_has_no_run_for_is_named(finished):
    record = json.loads(finished)
    own = record["config"]
    schemes = [own["scheme"] | change for change in ({"rule": "red"}, {"red": 1})]
    for foreign in [own | {"scheme": scheme} for scheme in schemes] + [own | {"red": 1}]:
        with pytest.raises(ValueError, match="red"):
            lab.config_of(record | {"config": foreign})
    unknown = own | {"scheme": own["scheme"] | {"red": 1}}
    with pytest.raises(ValueError, match=r"allowed: .*phi_global"):
        lab.config_of(record | {"config": unknown})


def test_differences(finished):
    record = json.loads(finished)
    other = copy.deepcopy(record)
    other["rows"][1] |= {"train_loss": 9.0, "accuracy": 0.5, "seconds": 1e9, "new": 1}
    del other["rows"][2]
    was = record["rows"][1]
    assert lab.compare_records(record, record) == []
    assert sorted(lab.compare_records(record, other)) == [
        "2 epochs, were 3",
        f"epoch 2: accuracy 0.5, was {was['accuracy']!r}",
        f"epoch 2: train_loss 9.0, was {was['train_loss']!r}",
    ]


@pytest.mark.parametrize("commits", [1, 3, 4])
def test_a_few_commits_behind_records_are_named_and_more_are_counted(commits):
    made = [{"commit": f"{n}" * 40, "torch": "2", "dataset": "made up"} for n in range(commits)]
    said = lab.describe_provenance({"provenance": one} for one in made * 2)
    names = [one["commit"][:7] for one in made]
    assert f"The {2 * commits} records " in said and "torch 2" in said and "made up" in said
    assert [name in said for name in names] == [commits < 4] * commits
    assert (f"{commits} commits" in said) == (commits == 4)


def test_the_hash_is_that_of_the_code_that_was_imported(tmp_path, monkeypatch):
    """Not of what somebody edits while it runs."""
    own = lab.runs.records.code_sha256(Path(tcs.__file__).read_bytes())
    copied = Path(shutil.copy(tcs.__file__, tmp_path))
    monkeypatch.setattr(tcs, "__file__", str(copied))
    copied.write_text("edited", encoding="utf-8")
    lab.core_sha256.cache_clear()
    assert lab.core_sha256() == own


def test_the_hash_under_a_notebook_survives_comments_and_docstrings():
    def of(text):
        return lab.runs.records.code_sha256(text.encode())

    plain = of("class A:\n    def f(self, x):\n        return x + 1\n")
    told = '"""Module."""\n# why\nclass A:\n    """A."""\n\n    def f(self, x):\n        """F."""\n'
    assert of(told + "        return (x + 1)  # more\n") == plain
    assert of("class A:\n    def f(self, x):\n        return x + 2\n") != plain
    assert of('def f():\n    """Only words."""\n') == of("def f():\n    pass\n")
    assert of('def f():\n    return """a"""\n') != of('def f():\n    return """b"""\n')


def test_installed_results_are_in_the_working_folder_and_nobody_elses_commit_is_named(tmp_path):
    """As pip puts it: the package alone, inside somebody's repository."""
    site, work = tmp_path / "venv/lib/python3/site-packages", tmp_path / "work"
    shutil.copytree(Path(lab.__file__).parent, site / "tcs_lab")
    shutil.copy(tcs.__file__, site)
    work.mkdir()
    commit = ["-c", "user.name=a", "-c", "user.email=b", "commit", "--quiet", "--allow-empty"]
    for words in (["init", "--quiet"], [*commit, "-m", "theirs"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    code = (
        "import tcs_lab as l; print(l.__file__, l.results_folder('ci'), l.runs.records.git_state())"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=work, env=environment, capture_output=True, check=True
    )
    where, folder, state = done.stdout.decode().split(maxsplit=2)
    assert Path(where).is_relative_to(site) and Path(folder) == work / "results" / "ci"
    assert state.strip() == "{'commit': None, 'dirty': None}"


def test_the_rate_of_centralized_training_is_its_learning_rate():
    """A record has no other field for it, so that one cannot ask for it by another name."""
    wanted = {"profile": "evidence", "scheme": "Baseline"}
    rates = {r["config"]["learning_rate"] for r in lab.find_records(**wanted).values()}
    assert len(rates) > 3
    for rate in rates:
        found = lab.find_records(**wanted, learning_rate=rate)
        assert {r["config"]["learning_rate"] for r in found.values()} == {rate}
    with pytest.raises(ValueError, match="centralized_learning_rate"):
        lab.find_records(**wanted, centralized_learning_rate=0.1)
