"""The text task: data, clients' batches, the GPT, runs."""

import dataclasses
from pydoc_data.topics import topics

import pytest
import tcs_lab as lab
import torch
from common import numbers

TINY = {"dataset": "text", "model": "gpt", "width": 16, "context": 16, "clients": 4, "batch_size": 256,
        "epochs": 2, "threads": 1, "reference_batch": None, "profile": "tiny"}  # fmt: skip


def config(scheme="TCS-L2-Q5", **changes):
    return lab.RunConfig(scheme, **(TINY | changes))


@pytest.fixture(scope="module")
def text():
    return lab.load_text()


def test_train_and_test_are_the_topics_and_no_more(text):
    assert len(text.train) == len(topics)
    whole = [text.read(torch.cat(parts)) for parts in zip(text.train, text.test, strict=True)]
    assert whole == [topics[name] for name in sorted(topics)]
    held_out = sum(map(len, text.test))
    assert 0.09 < held_out / sum(map(len, topics.values())) < 0.1


def test_clients_have_whole_topics_and_weigh_by_their_length(text):
    feed = lab.Training(config(), text).feed
    assert sorted(map(len, feed.texts)) == sorted(feed.weights)
    assert sum(feed.weights) == sum(map(len, text.train))
    assert max(feed.weights) > 1.1 * min(feed.weights)  # of unequal size
    mine = text.read(feed.texts[0])
    others = [text.read(t) for t in feed.texts[1:]]
    for topic in map(text.read, text.train):
        assert (topic in mine) + sum(topic in other for other in others) >= 1


def test_a_batch_is_windows_of_the_clients_own_text_with_what_comes_next(text):
    feed = lab.Training(config(), text).feed
    for n in range(4):
        seen, following = feed.batch(n, 3, 1)
        assert seen.shape == following.shape == (256, 16)
        own = text.read(feed.texts[n])
        for window, last in zip(seen, following[:, -1:], strict=True):
            assert text.read(torch.cat([window, last])) in own
        assert torch.equal(seen[:, 1:], following[:, :-1])
    again = lab.Training(config(), text).feed
    assert torch.equal(again.batch(2, 3, 1)[0], feed.batch(2, 3, 1)[0])
    for other in ((3, 3, 1), (2, 4, 1), (2, 3, 0)):
        assert not torch.equal(feed.batch(*other)[0], feed.batch(2, 3, 1)[0])


def test_test_windows_are_held_out_text_each_character_asked_for_once(text):
    feed = lab.Training(config(), text).feed
    seen, following = feed.test(slice(0, None))
    held_out = torch.cat(text.test)
    assert torch.equal(following.flatten(), held_out[1 : 1 + following.numel()])
    assert torch.equal(seen[0], held_out[:16])


def test_a_width_that_the_heads_cannot_share():
    with pytest.raises(ValueError, match=r"width: got 50, .* a multiple of its 3 heads"):
        lab.GPT(10, 50, 8)


def test_the_gpt_sees_no_character_before_it_comes():
    torch.manual_seed(0)
    model = lab.GPT(classes=11, width=32, context=8)
    before = torch.randint(0, 11, (2, 8))
    after = before.clone()
    after[:, 5] = (before[:, 5] + 1) % 11
    with torch.no_grad():
        one, two = model(before), model(after)
    assert one.shape == (2, 8, 11)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert (one[:, 5:] - two[:, 5:]).abs().amax(-1).min() > 0  # and every later one hangs on it


def test_the_attention_is_torchs_own():
    torch.manual_seed(0)
    block = lab.GPT(classes=11, width=32, context=8).blocks[0]
    mixed = torch.randn(3, 8, 96)
    query, key, value = (t.view(3, 8, 2, 16).transpose(1, 2) for t in mixed.split(32, dim=-1))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(block._attention(mixed), wanted.transpose(1, 2).reshape(3, 8, 32))


def test_the_average_weighs_clients_by_their_text(text):
    training = lab.Training(config("FedAvg", epochs=1), text, keep_deltas=True)
    weights = torch.tensor(training.feed.weights, dtype=torch.float64)
    update_D = next(training.rounds(0))
    wanted = (weights / weights.sum()) @ training.deltas_ND.double()
    torch.testing.assert_close(update_D.double(), wanted, rtol=1e-5, atol=1e-8)
    assert (update_D - training.deltas_ND.mean(0)).norm() > 0.003 * update_D.norm()


@pytest.mark.parametrize("scheme", ["TCS-L2-Q5", "Baseline"])  # clients by their text; all of it
def test_a_run_on_text_learns_and_repeats(scheme, tmp_path):
    one = lab.run(config(scheme), tmp_path / "one")
    two = lab.run(config(scheme), tmp_path / "two")
    assert numbers(one) == numbers(two)
    assert one["rows"][-1]["loss"] < 4.64  # ln 103: all characters alike
    assert one["provenance"]["fingerprint"] == lab.load_text().fingerprint


def test_side_by_side_is_the_same_to_rounding(tmp_path):
    runs = [
        lab.run(config(epochs=1, warmup_epochs=1, side_by_side=way), tmp_path / str(way))
        for way in (False, True)
    ]
    losses = [run["rows"][0]["train_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert [run["provenance"]["side_by_side"] for run in runs] == [False, True]


@pytest.mark.parametrize(
    "changes",
    [{"model": "resnet8"}, {"train_samples": 100}, {"image_size": 8}, {"dirichlet_alpha": 0.5},
     {"graph": True}, {"dataset": "synthetic"}],
)  # fmt: skip
def test_what_does_not_go_with_text_is_an_error(changes):
    key = "model" if "dataset" in changes else next(iter(changes))
    with pytest.raises(ValueError, match=f"^{key}: got .*, allowed with dataset "):
        config(**changes)


def test_too_many_clients_or_too_long_a_context_is_an_error(text):
    with pytest.raises(ValueError, match="clients: got 80, allowed: at most the 79 topics"):
        lab.Training(config(clients=80), text)
    with pytest.raises(ValueError, match="context: got 4096, allowed: at most "):
        lab.Training(config(clients=40, context=4096, batch_size=1), text)
    with pytest.raises(ValueError, match="batch_size x context x clients x local steps: got "):
        lab.Training(dataclasses.replace(config(), batch_size=100_000), text)
