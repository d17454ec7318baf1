"""Messages of classes with `compress` and `decompress` that are lost, or that nobody can decode."""

import pytest
import tcs_lab.schemes  # noqa: F401  (registers LowRank)
import torch
from common import same_state
from tcs_lab.schemes.tensors import register_tensors

import tcs_core as tcs

SIZES = [40, 20]


class Halves:
    """Sends a tensor in half precision."""

    error_feedback = True

    def compress(self, tensor, name):
        return [tensor.half()], None

    def decompress(self, tensors, context):
        return tensors[0].float()


class BothWays(Halves):
    downlink = True


def deltas_of(round):
    return torch.randn(2, sum(SIZES), generator=torch.Generator().manual_seed(round))


@pytest.mark.parametrize("lost", [0, 2])
def test_after_a_lost_message_the_next_ones_are_understood(registry, lost):
    register_tensors(Halves, "Halves")
    rounds = []

    def channel(sender, data):
        return data[:-1] if sender == 1 and len(rounds) == lost else data

    made = tcs.Compressor("Halves", SIZES, 2, link=tcs.Link(channel, on_bad="skip"))
    sums_ND, got_D = torch.zeros(2, sum(SIZES)), torch.zeros(sum(SIZES))
    for round in range(5):
        update_D = made.step(deltas_of(round))
        sums_ND += deltas_of(round)
        assert made.traffic.refused == ((1,) if round == lost else ())
        got_D += update_D * len(made.traffic.heard) / 2
        rounds.append(round)
    torch.testing.assert_close(got_D, sums_ND.mean(0), atol=0.02, rtol=0)


def test_a_compressed_reply_that_became_bytes_is_refused(registry):
    register_tensors(BothWays, "Both ways")
    made = tcs.Compressor("Both ways", SIZES, 2, link=tcs.Link(tcs.unchanged))
    with pytest.raises(ValueError, match=r"`downlink = True` cannot be read from its bytes"):
        for round in range(2):
            made.step(deltas_of(round))
    plain = tcs.Compressor("Both ways", SIZES, 2)
    assert plain.step(deltas_of(0)).any()


@pytest.mark.parametrize("suffix", ["+", "-K4", "-LF", "-Q5"])
def test_suffixes_about_what_is_sent_are_refused_wherever_such_a_scheme_is_used(suffix):
    with pytest.raises(ValueError, match=r"makes no sense|decides itself what is sent"):
        tcs.Known(f"LowRank{suffix}", SIZES)
    tcs.Known("LowRank-L2", SIZES)


def test_another_device_than_the_cpu_is_refused():
    with pytest.raises(ValueError, match=r"^LowRank: device: got meta, allowed with compress"):
        tcs.Known("LowRank", SIZES, device="meta")


def test_a_dense_round_does_not_make_a_lost_message_known(registry):
    register_tensors(Halves, "Halves")
    rounds = []

    def channel(sender, data):
        return data[:-1] if sender == 1 and not rounds else data

    made = tcs.Compressor("Halves", SIZES, 2, link=tcs.Link(channel, on_bad="skip"))
    for round, dense in enumerate((False, True, False, False)):
        made.step(deltas_of(round), dense=dense)
        rounds.append(round)
    assert made.traffic.heard == (0, 1)


def test_a_message_that_is_refused_does_not_reach_the_servers_instance(registry):
    class Counts(Halves):
        decoded = 0

        def decompress(self, tensors, context):
            self.decoded += 1
            return super().decompress(tensors, context)

    register_tensors(Counts, "Counts")
    made = tcs.Compressor("Counts", SIZES, 2)
    made.known.begin()
    message = made.clients[0].send(deltas_of(0)[0])
    made.server.add(0, message)
    for number in (0, 70_000):
        with pytest.raises(tcs.MessageError):
            made.server.add(number, message)
    assert made.server.twins.keys() == {0} and made.server.twins[0].instance.decoded == len(SIZES)


def test_a_class_that_cannot_be_made_registers_nothing(registry):
    class Asks(Halves):
        def __init__(self, one, other):
            pass

    class Half(Halves):
        densities = (0.1, 0.2)

        def __init__(self, density):
            if density > 0.1:
                raise TypeError("too dense")

    for kind in (Asks, Half):
        before = registry()
        with pytest.raises(ValueError, match="allowed: a class that can be made"):
            register_tensors(kind, "Mine")
        assert registry() == before


def test_loading_forgets_what_an_instance_has_noted_since(registry):
    class Notes(Halves):
        def compress(self, tensor, name):
            self.noted = getattr(self, "noted", 0) + 1
            return [tensor.half() / self.noted], None

    register_tensors(Notes, "Notes")
    made = tcs.Compressor("Notes", SIZES, 2)
    saved = made.state_dict()
    first_D = made.step(deltas_of(0))
    made.load_state_dict(saved)
    assert torch.equal(made.step(deltas_of(0)), first_D)


@pytest.mark.parametrize(
    "part", [torch.frombuffer(bytearray(b"N"), dtype=torch.uint8), None, torch.zeros(3)]
)
def test_a_state_of_a_method_that_cannot_be_loaded_is_refused_before_anything_changes(
    registry, part
):
    register_tensors(BothWays, "BothWays")
    made = tcs.Compressor("BothWays", SIZES, 2)
    made.step(deltas_of(0))
    before = made.state_dict()
    wrong = [made.state_dict() for _ in range(4)]
    wrong[0]["clients"][0]["method"] = part
    wrong[1]["server"]["downlink"]["method"] = wrong[1]["server"]["downlink"]["method"][:1]
    wrong[2]["server"]["twins"][0] = part
    del wrong[3]["server"]["twins"]
    for state in wrong:
        with pytest.raises(ValueError, match=r"^state"):
            made.load_state_dict(state)
        assert same_state(made.state_dict(), before)
    made.load_state_dict(before)
