"""Messages of classes with `compress` and `decompress` that are lost, or that nobody can decode."""

import pytest
import tcs_lab.schemes  # noqa: F401  (registers LowRank)
import torch
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
