"""Whatever torch's default dtype and device are, the core computes the same bits."""

import dataclasses

import pytest
import tcs_lab.schemes.rivals  # noqa: F401  (and the variants)
import torch
from common import deltas_like_training, same_state

import tcs_core as tcs

SIZES = [150, 1, 49]
DEFAULTS = ["float64", "bfloat16", "float16", "meta"]
NAMES = ["TCS", "TCS-Q5", "TCS-LF", "TCS-PLF-Q5", "TCS-Q1", "top-K", "top-K-Q5", "rand-K", "FedAvg",
         "FedAvg-Q5", "TCS-NW", "TCS-W10", "TCS-D2", "TCS-Q5++", "TCS-Q5+", "TCS-M2", "TCS-Random",
         "TCS-Stale", "TCS-WLF", "STC", "EF-signSGD", "EF-signSGD-D1", "QSGD", "CocktailSGD",
         "DGC", "TCS-S4", "TCS-R4"]  # fmt: skip


@pytest.fixture(params=DEFAULTS)
def with_other_defaults(request):
    """A function that makes torch's defaults others; they are put back after the test."""

    def change():
        if request.param == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, request.param))

    yield change
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")


def drawn(rounds=4, clients=3):
    return list(deltas_like_training(rounds, clients, SIZES)), torch.linspace(-1, 1, sum(SIZES))


def run(name, given, by_bytes=False):
    """All that a compressor gives in some rounds: dense, sparse, resumed, with wide masks."""
    deltas, theta_D = given
    scheme = dataclasses.replace(tcs.Scheme.named(name), error_unit="difference")

    def made():
        return tcs.Compressor(scheme, SIZES, 3, link=tcs.Link(tcs.unchanged) if by_bytes else None)

    compressor, found = made(), []
    for t, deltas_ND in enumerate(deltas):
        masks = 4 if t < 2 else 1
        difference = deltas_ND.__getitem__
        found.append(compressor.round(difference, [0, 1, 2], t == 1, theta_D, masks))
        found.append(list(compressor.traffic[:4]))
        state, compressor = compressor.state_dict(), made()
        compressor.load_state_dict(state)
    return [*found, state]


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_compressor_gives_the_same_bits(name, by_bytes, with_other_defaults):
    given = drawn()
    expected = run(name, given, by_bytes)
    with_other_defaults()
    assert same_state(run(name, given, by_bytes), expected)


def halves(name, given):
    """All that clients and a server, with a `Known` each, give in some rounds, by bytes."""
    deltas, _ = given
    knowns = [tcs.Known(name, SIZES) for _ in range(4)]
    server = tcs.Server(knowns[3], [1.0, 2.0, 3.0])
    clients = [tcs.Client(known, n) for n, known in enumerate(knowns[:3])]
    found = []
    for deltas_ND in deltas:
        for known in knowns:
            known.begin()
        for n, client in enumerate(clients):
            data = client.known.to_bytes(client.send(deltas_ND[n]))
            server.add(n, knowns[3].from_bytes(data, n))
        update_D, reply = server.finish()
        data = knowns[3].to_bytes(reply)
        knowns[3].observe(update_D)
        for client in clients:
            found.append(client.receive(client.known.from_bytes(data, tcs.SERVER)))
    return [*found, update_D, [client.state_dict() for client in clients], knowns[3].state_dict()]


@pytest.mark.parametrize("name", ["TCS", "TCS-Q5", "TCS-D2", "top-K-Q5", "rand-K", "FedAvg"])
def test_halves_give_the_same_bits(name, with_other_defaults):
    given = drawn()
    expected = halves(name, given)
    with_other_defaults()
    assert same_state(halves(name, given), expected)


def parts(values_D, mask_D, positions_K):
    """What the functions of sections 2 to 5 give."""
    sizes = [150, 1, 49]
    found = [
        tcs.top_k_mask(values_D, 20), tcs.top_k_positions(values_D, 20),
        tcs.top_k_positions(values_D, 20, mask_D), tcs.top_k_positions(values_D, 9, positions_K),
        tcs.layerwise_top_k_positions(values_D, 20, sizes, 0.02, mask_D),
        tcs.layerwise_top_k_positions(values_D, 3, sizes, 0.1),
        tcs.random_positions(7, 200, 1, 2),
        tcs.positions_to_mask(positions_K, 200), tcs.mask_to_positions(mask_D),
        tcs.scaled_sign(values_D),
    ]  # fmt: skip
    for quantize in tcs.QUANTIZERS.values():
        for intervals in (2, 16):
            codes_K, means_P = quantize(values_D, intervals)
            found += [codes_K, means_P, tcs.fractional_dequantize(codes_K, means_P)]
    for block in (1, 8, 64):
        bits = tcs.encode_positions(positions_K, 200, block)
        found += [bits, tcs.decode_positions(bits, 200, block)]
    found.append([tcs.bit_budget("TCS-Q5", 1000), tcs.bit_budget("top-K")])
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
def test_masks_codes_and_quantizers_give_the_same_bits(scale, with_other_defaults):
    values_D = torch.linspace(-3, 2, 200).roll(77) ** 3 * scale
    mask_D = torch.arange(200) % 3 == 0
    positions_K = torch.arange(0, 200, 9)
    expected = parts(values_D, mask_D, positions_K)
    with_other_defaults()
    assert same_state(parts(values_D, mask_D, positions_K), expected)


@pytest.mark.parametrize("code", ["block", "entropy"])
@pytest.mark.parametrize("bits", [32, 5, 1])
@pytest.mark.parametrize("count", [0, 1, 12])
def test_messages_are_the_same_bytes(code, bits, count, with_other_defaults):
    wire = tcs.Wire(bits, code, (200,))
    shared_K, own_K = torch.arange(0, 40, 4), torch.arange(2, 2 + 4 * count, 4)
    values_K = torch.linspace(-1, 1, len(shared_K) + count)
    empty_K = torch.empty(0, dtype=torch.int64)

    def made():
        message = tcs.Message.of(values_K, own_K, bits, 1, 2)
        nothing = tcs.Message.of(values_K[:0], empty_K, bits, 1, 2)
        data = [tcs.encode_message(one, wire) for one in (message, nothing)]
        decoded = [
            tcs.decode_message(data[0], wire, shared_K),
            tcs.decode_message(data[1], wire, empty_K),
        ]
        return data, [vars(one) for one in decoded]

    expected = made()
    with_other_defaults()
    assert same_state(made(), expected)
