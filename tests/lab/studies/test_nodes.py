"""A federation's two sides: a client that is a file between two messages, and the server."""

import dataclasses

import pytest
import torch
from tcs_lab.studies.nodes import FederatedJob, Node, Participant, ServerRounds
from torch import nn

import tcs_core as tcs


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))


def train(net, n, t):
    """Two local steps of SGD on batches that follow from client and round."""
    generator = torch.Generator().manual_seed(1000 * n + t)
    for _ in range(2):
        inputs = torch.randn(16, 20, generator=generator)
        loss = nn.functional.cross_entropy(net(inputs), inputs[:, :4].argmax(1))
        for p, gradient in zip(
            net.parameters(), torch.autograd.grad(loss, net.parameters()), strict=True
        ):
            p.data.sub_(0.2 * gradient)


def job(scheme="TCS-Q5", rounds=5, **changes):
    return FederatedJob(scheme, model, train, clients=2, rounds=rounds, warmup=1, **changes)


def in_one_process(job, chosen=lambda t: [0, 1]):
    """Theta and errors by tcs_core.Compressor, with the same batches."""
    half = Participant(job)
    sizes, order = half.flat.layer_sizes, half.flat.order
    compressor = tcs.Compressor(job.scheme, sizes, 2, weights=job.weights, order=order)
    for t in range(job.rounds):
        deltas_ND = torch.stack([half.difference(n, t) for n in range(2)])
        half.theta_D.add_(compressor.step(deltas_ND, t < job.warmup, chosen(t)))
    return half.theta_D, compressor.errors_ND


class Together:
    """Both sides in this process; a node is opened from its file for every message."""

    def __init__(self, job, folder):
        self.job, self.folder, self.rounds = job, folder, ServerRounds(job)
        self.orders = []

    def node(self, n, **known):
        return Node(self.job, n, self.folder / f"partition-{n}.pt", **known)

    def ask(self, n, work=Node.train):
        node, order = self.node(n), self.rounds.order(n)
        self.orders.append(set(order))
        self.rounds.take(n, node.answer(work(node, order)))

    def round(self, *chosen):
        self.rounds.begin()
        for n in chosen:
            self.ask(n)
        self.rounds.finish()

    def end(self):
        self.rounds.answers.clear()
        for n in range(2):
            self.ask(n, Node.end)
        return [self.rounds.theta_D, *(self.node(n).theta_D for n in range(2))]


def same(found, expected):
    return all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize(
    "scheme", ["TCS", "TCS-Q5", "top-K", "rand-K", "FedAvg", "TCS-D2", "STC-D2"]
)
def test_both_sides_through_files_have_the_bits_of_one_process(scheme, tmp_path):
    plan = job(scheme, weights=[1, 3])
    theta_D, errors_ND = in_one_process(plan)
    sides = Together(plan, tmp_path)
    for _ in range(plan.rounds):
        sides.round(1, 0)  # who is first does not matter
    assert same(sides.end(), theta_D)
    for n, errors_D in enumerate(errors_ND):
        assert torch.equal(sides.node(n).client.errors_D, errors_D)
    assert not any("theta" in order for order in sides.orders)  # never the model, nor a mask
    assert sorted(path.name for path in tmp_path.iterdir()) == ["partition-0.pt", "partition-1.pt"]


def test_a_client_that_missed_rounds_is_told_theta_and_mask_and_keeps_its_errors(tmp_path):
    plan = job(rounds=6)
    theta_D, errors_ND = in_one_process(plan, lambda t: [0] if t in (2, 3) else [0, 1])
    sides = Together(plan, tmp_path)
    for t in range(plan.rounds):
        sides.round(*([0] if t in (2, 3) else [0, 1]))
    assert [t for t, order in enumerate(sides.orders) if "theta" in order] == [7]  # client 1, t = 4
    assert same(sides.end(), theta_D)
    assert torch.equal(sides.node(1).client.errors_D, errors_ND[1])


@pytest.mark.parametrize("moment", ["before the file", "after the file"])
def test_a_node_killed_in_a_round_and_restarted_ends_in_the_same_theta(
    moment, tmp_path, monkeypatch
):
    plan = job()
    theta_D, errors_ND = in_one_process(plan)
    sides = Together(plan, tmp_path)
    sides.round(0, 1)
    sides.rounds.begin()
    node, order = sides.node(1), sides.rounds.order(1)
    if moment == "before the file":
        monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            node.train(order)
        monkeypatch.undo()
    else:
        node.train(order)  # its answer never arrives
    sides.rounds.stands.pop(1)  # a node of another name
    assert not sides.rounds.knows(1)
    sides.rounds.take(1, sides.node(1).answer(None))
    for n in (0, 1):
        sides.ask(n)
    sides.rounds.finish()
    for _ in range(plan.rounds - 2):
        sides.round(0, 1)
    assert same(sides.end(), theta_D)
    assert torch.equal(sides.node(1).client.errors_D, errors_ND[1])


def test_a_message_that_was_not_heard_stays_in_the_errors(tmp_path):
    sides = Together(job("TCS"), tmp_path)
    sides.round(0, 1)
    sides.rounds.begin()
    sides.node(1).train(sides.rounds.order(1))  # never arrives, and the server goes on
    kept_D = sides.node(1).client.errors_D.clone()
    sides.ask(0)
    sides.rounds.finish()
    order = sides.rounds.order(1)
    assert "theta" in order  # the server last heard of it a round ago
    node = sides.node(1)
    assert node.follow(order) and torch.equal(node.client.errors_D, kept_D)


def test_a_client_that_has_sent_nothing_can_be_saved(tmp_path):
    """It joined after the last round, and hears the end of the federation."""
    sides = Together(job(), tmp_path)
    sides.round(0)
    node = sides.node(1)
    node.save()
    assert sides.node(1).message == b"" and sides.node(1).mark == node.mark


def test_a_file_of_another_run_begins_anew(tmp_path):
    sides = Together(job(), tmp_path)
    sides.round(0, 1)
    sides.round(0, 1)
    assert sides.node(0).known.round == 1 and sides.node(0).client.errors_D.any()
    fresh = sides.node(0, run=8)
    assert fresh.known.round == 0 and not fresh.client.errors_D.any() and not fresh.marks


def test_a_file_that_is_not_the_nodes_is_refused(tmp_path):
    sides = Together(job(), tmp_path)
    sides.round(0, 1)
    mark = sides.node(0).marks[-1]
    sides.round(0, 1)
    assert sides.node(0, mark=mark).known.round == 1  # the answer to the last message was lost
    with pytest.raises(ValueError, match="checksum: got"):
        sides.node(0, mark=sides.node(1).marks[-1])
    path = tmp_path / "partition-0.pt"
    state = torch.load(path)
    state["client"]["errors_D"][3] += 1
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"partition-0\.pt: checksum: got"):
        sides.node(0)


def test_what_it_cannot_do_is_refused_at_once():
    with pytest.raises(ValueError, match="batch norm"):
        Participant(dataclasses.replace(job(), model=lambda: nn.Sequential(nn.BatchNorm1d(3))))
    with pytest.raises(ValueError, match=r"momentum 0\.9 needs more than compression"):
        Participant(job("TCS-Global Momentum"))
    with pytest.raises(ValueError, match=r"scheme: got TCS-W10, allowed: .* sparse warm"):
        Participant(job("TCS-W10"))
    with pytest.raises(ValueError, match=r"client: got 2 .*allowed: 0 to 1"):
        ServerRounds(job()).take(1, {"client": 2, "round": 0, "checksum": 0})


def test_two_nodes_that_say_they_are_one_client(tmp_path):
    sides = Together(job(), tmp_path)
    sides.rounds.begin()
    sides.ask(0)
    answer = sides.node(0).answer(b"another message") | sides.rounds.here._asdict()
    with pytest.raises(ValueError, match=r"^client 0: got messages of two nodes"):
        sides.rounds.take(7, answer)


@pytest.mark.parametrize("damage", ["no zip", "another state", "cut off"])
def test_a_file_that_is_none_of_a_client_is_named(tmp_path, damage):
    sides = Together(job(), tmp_path)
    sides.round(0, 1)
    file = tmp_path / "partition-0.pt"
    if damage == "no zip":
        file.write_bytes(b"hello")
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        torch.save({"run": 0}, file)
    with pytest.raises(
        ValueError, match=r"partition-0\.pt: .* delete it to begin this client anew"
    ):
        sides.node(0)
