"""What a record says of where clients send, held to what they sent."""

import pytest
import tcs_lab as lab
import torch
from common import config

import tcs_core as tcs

NET = {"model": "resnet8", "width": 4, "clients": 4, "batch_size": 4, "train_samples": 64, "epochs": 2,
       "side_by_side": False}  # fmt: skip


class Seen(tcs.Link):
    """Keeps where each client of a round has sent."""

    def __init__(self):
        super().__init__()
        self.round, self.rounds = -1, []

    def to_server(self, known, n, message):
        if self.round != known.round:
            self.round = known.round
            self.rounds.append((known.dense, len(known.shared_K), []))
        self.rounds[-1][2].append(message.positions)
        return super().to_server(known, n, message)


def sent_at(settings):
    """Of each sparse round: entries of the shared mask, and how many clients sent at each other place."""
    link = Seen()
    training = lab.Training(settings, lab.load_data(settings), link=link)
    for epoch in range(settings.epochs):
        training.epoch(epoch)
    sparse = [(shared, own) for dense, shared, own in link.rounds if not dense]
    return [(shared, torch.cat(own).unique(return_counts=True)[1]) for shared, own in sparse]


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(("name", "phi_local"), [("TCS", 0.05), ("top-K", 0.05), ("TCS-L2", 0.02)])
def test_a_record_says_where_clients_sent(tmp_path, small, name, phi_local, share):
    settings = config(tcs.Scheme.named(name, phi_local=phi_local), **NET, participation=share)
    rounds, clients = sent_at(settings), 4 * share
    record = lab.run(settings, tmp_path)
    found, places = lab.measure_coincidence(record), [len(counts) for _, counts in rounds]
    assert lab.count_explored(record) == sum(places) // len(places)
    values = [clients * shared + int(counts.sum()) for shared, counts in rounds]
    each = [value / (shared + len(c)) for value, (shared, c) in zip(values, rounds, strict=True)]
    assert found["clients"] == pytest.approx(sum(each) / len(each), rel=0.02)  # a ratio of means
    together = [int(counts[counts > 1].sum()) / int(counts.sum()) for _, counts in rounds]
    most = sum(together) / len(together)
    assert most / 2 - 0.01 <= found["own"] <= most + 0.01  # of two at a place it counts one
    assert found["own"] > 0.01 and (found["all"] > found["own"] + 0.01) == (name != "top-K")
    if name == "top-K":
        assert found["all"] == found["own"]  # it has no shared mask


def test_how_much_of_the_mask_stays(tmp_path, small):
    record = lab.run(config("TCS", **NET), tmp_path)
    shares = [row["mask_overlap"] for row in record["rows"]]
    assert lab.measure_coincidence(record)["stay"] == pytest.approx(sum(shares) / len(shares))
    assert not lab.measure_coincidence(lab.run(config("top-K", **NET), tmp_path))["stay"] > 0


def test_where_nothing_is_sent_outside_the_shared_mask_nothing_is_explored(tmp_path, small):
    record = lab.run(config(tcs.Scheme.named("TCS", phi_local=None), **NET), tmp_path)
    found = lab.measure_coincidence(record)
    assert lab.count_explored(record) == 0
    assert (found["all"], found["clients"]) == (1, 4) and not found["own"] > 0
