"""Bad input: whatever a parameter, a params file or a command's words are, one line says why."""

import math

import pytest
import tcs_lab as lab
from common import tiny_command
from hypothesis import given
from hypothesis import strategies as st
from tcs_lab.__main__ import main

STRANGE = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "a fraction": 0.37,
    "nan": math.nan,
    "infinity": math.inf,
    "huge": 10**12,
    "beyond float": 10**400,
    "text": "a text",
    "number as text": "3",
    "no text": "",
    "long text": "x" * 5000,
    "zero byte": "a\0b",
    "list": [1, 2],
    "list of nan": [math.nan],
    "nested list": [[["TCS"]]],
    "mapping": {"a": 1},
}
PHI = {"null", "a fraction"}
NUMBER = {"a fraction"}
FITS = {  # strange as they look, these are allowed
    "table": {"null"}, "figure": {"null"}, "title": {"null", "text", "number as text"},
    "paper": {"null"}, "jobs": set(), "schemes": set(), "seeds": {"list"},
    "phi_global": PHI, "phi_local": PHI, "phi_down": PHI, "phi_min_global": PHI, "phi_min_local": PHI,
    "learning_rate": NUMBER, "centralized_learning_rate": NUMBER, "profile": {"number as text"}, "dataset": set(),
    "data_root": {"null"},  # of synthetic images
    "data_label": {"null", "text", "number as text"},
    "train_samples": {"null"}, "test_samples": {"null"}, "image_size": {"null"}, "model": set(), "width": set(),
    "clients": set(), "participation": NUMBER, "batch_size": set(), "epochs": set(),
    "warmup_epochs": {"null", "zero"}, "warmup_learning_rate": NUMBER, "drops": set(),
    "reference_batch": {"null"}, "weight_decay": {"zero", "a fraction"},
    "dirichlet_alpha": {"null", "a fraction"}, "precision": set(), "wire": {"true"}, "graph": {"true"},
    "bad_message": set(), "threads": {"null"}, "device": set(), "crop_padding": {"zero"}, "context": set(),
    "side_by_side": {"null", "true"}, "client_threads": {"true"},
    "test_unused": {"true"},
}  # fmt: skip


def test_every_parameter_has_its_cases():
    assert set(FITS) == lab.PARAMETERS


@pytest.mark.parametrize("key", sorted(FITS))
def test_a_strange_value_is_allowed_or_an_error_that_names_key_and_value(key):
    for value, strange in STRANGE.items():
        params = {"schemes": ["TCS"], "epochs": 4, key: strange}
        if value in FITS[key]:
            assert lab.plan(params), value
            continue
        with pytest.raises(ValueError, match="allowed") as raised:
            lab.plan(params)
        text = str(raised.value)
        assert text.startswith((f"{key}: got ", "warmup_epochs")) and len(text) < 1000, value


def json_value():
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=6)  # fmt: skip


@given(st.sampled_from(sorted(FITS)), json_value())
def test_whatever_a_parameter_is_the_plan_is_made_or_one_line_says_why(key, value):
    try:
        configs = lab.plan({"schemes": ["TCS", "Baseline"], key: value})
    except ValueError as error:
        assert key.removesuffix("s") in str(error) or "warmup" in str(error)
        return
    for made in configs:
        assert 0 < made.learning_rate_at(0) < math.inf and made.digest and made.record_name


FILES = {
    "empty": (b"", "NoneType"),
    "list": (b"[1]", "list"),
    "number": (b"3", "int"),
    "not YAML": (b"a: [", "not readable"),
    "zero byte": (b"a: \0", "not readable"),
    "not UTF-8": (b"a: \xff\xfe", "not readable"),
    "an object": (b"a: !!python/object/apply:os.system ['true']", "not readable"),
    "twice": (b"epochs: 3\nepochs: 4\n", "epochs stands twice"),
    "no bool": (b"wire: !!bool maybe", "not readable"),
    "no time": (b"title: !!timestamp foo", "not readable"),
    "no mapping": (b"paper: !!map [1]", "not readable"),
    "a number as key": (b"1: 2\n", "unknown parameter: 1"),
    "a list as key": (b"[1]: 2\n", "not readable"),
    "unknown": (b"epochz: 3\n", "unknown parameter: epochz"),
    "deep": (b"a: " + b"[" * 20_000, "not readable"),
    "5000 digits": (b"epochs: " + b"9" * 5000, "not readable"),
    "5000 hex digits": (b"epochs: 0x" + b"f" * 5000, "epochs: got a number of thousands of digits"),
    "laughs": (b"a0: &a0 [x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 30)) + b"title: *a29\n", "unknown"),
    "large": (b"# " + b"x" * (1 << 20), "at most"),
}  # fmt: skip


def refused(words, capsys, folder):
    """The command's one line of error; nothing was made."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error) < 3000 and error.count("\n") == 1
    assert not list(folder.glob("ci/**/*"))
    return error


@pytest.mark.parametrize("case", FILES)
def test_a_params_file_that_is_none_is_one_line_and_rc_2(tmp_path, capsys, case):
    content, message = FILES[case]
    path = tmp_path / "strange.yaml"
    path.write_bytes(content)
    (tmp_path / "base.yaml").write_text("schemes: [TCS]\n", encoding="utf-8")
    words = ["run", "--params", str(tmp_path / "base.yaml"), str(path), "--results", str(tmp_path)]
    assert message in refused(words, capsys, tmp_path)


WORDS = [
    (["--set", "epochs=["], "--set epochs: not readable"), (["--set", "a" * 500 + "=1"], "unknown parameter: aaa"),
    (["--set", "=3"], "unknown parameter: "), (["--set", "epochs"], "KEY=VALUE"), (["--set", "lr=1"], "unknown parameter: lr"),
    (["--set", "epochs=none"], "epochs: got 'none' (str)"), (["--set", "learning_rate=1e-3"], "write 1.0e-3"),
    (["--set", "clients=500"], "clients: got 500"), (["--set", "device=cuda:99"], "device: got 'cuda:99'"),
    (["--set", "data_root=/nowhere", "--set", "dataset=folder"], "data_root: /nowhere"),
    (["--set", "data_root=~nobody_of_this_name/x", "--set", "dataset=folder"], "data_root: got '~nobody_of"),
    (["--set", "width=1024", "--set", "clients=40000"], "clients: got 40000"),
    (["--scheme", "x"], "known"), (["--scheme", "TCS-L" + "9" * 5000], "scheme"), (["--scheme", "TCS-Q99"], "got 99"),
    (["--scheme", "x" * 5000], "scheme"), (["--seed", "-1"], "seeds"), (["--jobs", "0"], "jobs"),
    (["--params", "/"], "/"), (["--params", "/no/such.yaml"], "/no/such.yaml"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), WORDS)
def test_strange_words_are_one_line_and_rc_2(tmp_path, capsys, small, words, message):
    schemes = [] if "--scheme" in words else ["--scheme", "TCS"]
    assert message in refused([*tiny_command(tmp_path), *schemes, *words], capsys, tmp_path)
