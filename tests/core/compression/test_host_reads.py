"""How often a round of compression stops for the host: on a GPU each time with an empty queue.
Counted on a CPU, with the operations that a GPU would do."""

import contextlib

import pytest
import torch
from common import Alone, Bucket, alone_in_a_group, deltas_like_training, same_state
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tcs_core as tcs

SIZES, ROUNDS = [900, 100], 6
LOOKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}


class Reads(TorchDispatchMode):
    """Counts what needs a value on the host: a number, or how many places a mask has; a list or a
    copy counts as one, whatever it holds."""

    def __init__(self, copies=("tolist", "cpu", "numpy")):
        super().__init__()
        self.count, self.copies = 0, copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        places = args[1] if name.startswith(("index", "_index")) and len(args) > 1 else ()
        masks = [p for p in places if p is not None] if isinstance(places, (list, tuple)) else []
        self.count += name in LOOKS or any(p.dtype == torch.bool for p in masks)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.plain = {name: getattr(torch.Tensor, name) for name in self.copies}
        for name in self.plain:
            setattr(torch.Tensor, name, self.counted(name))
        return super().__enter__()

    def __exit__(self, *raised):
        for name, plain in self.plain.items():
            setattr(torch.Tensor, name, plain)
        return super().__exit__(*raised)

    def counted(self, name):
        def read(tensor, *settings):
            with _disable_current_modes():
                found = self.plain[name](tensor, *settings)
            self.count += 1
            return found

        return read


def test_the_measure_counts_what_a_gpu_would_wait_for():
    values = torch.arange(4.0)
    looks = [
        lambda: values[0].item(), lambda: bool(values.any()), lambda: values.tolist(), lambda: values.cpu(),
        lambda: values.numpy(), lambda: values.nonzero(), lambda: values[values > 1],
        lambda: int(values.sum()), lambda: torch.equal(values, values),
    ]  # fmt: skip
    for look in looks:
        with Reads() as reads:
            look()
        assert reads.count == 1
    with Reads() as reads:
        torch.where(values > 1, values, 0.0).index_select(0, torch.tensor([1])).sum().add_(1)
    assert reads.count == 0


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The host may look at nothing at no cost."""
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)


FREE = ["TCS", "TCS-Q5", "top-K", "top-K-Q5", "rand-K", "rand-K-Q3"]


@pytest.mark.parametrize("name", FREE)
def test_a_sparse_round_reads_values_once(name, as_on_a_gpu):
    for clients in (2, 6):
        compressor = tcs.Compressor(name, SIZES, clients)
        *before, last_ND = deltas_like_training(ROUNDS, clients, SIZES)
        for deltas_ND in before:
            compressor.step(deltas_ND)
        with Reads() as reads:
            compressor.step(last_ND)
        assert reads.count == 1 and not compressor.known.dense


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dense", [False, True])
def test_what_is_not_finite_is_named_at_the_end_of_the_round_and_counts_for_nothing(
    bad, dense, as_on_a_gpu
):
    compressor = tcs.Compressor("TCS", SIZES, 3)
    *before, last_ND = deltas_like_training(3, 3, SIZES)
    for deltas_ND in before:
        compressor.step(deltas_ND)
    expected_ND = compressor.errors_ND + last_ND
    mask, broken_ND = compressor.rule.positions.clone(), last_ND.clone()
    broken_ND[1, 7] = bad
    with pytest.raises(tcs.NotFiniteError, match=r"^client 1: the update is not finite"):
        compressor.step(broken_ND, dense)
    expected_ND[1] -= last_ND[1]
    torch.testing.assert_close(compressor.errors_ND, expected_ND, rtol=1e-6, atol=1e-7)
    assert torch.equal(compressor.rule.positions, mask)
    assert compressor.step(last_ND, dense).isfinite().all()


def test_a_cpus_federation_and_one_that_may_not_look_give_the_same_bits(monkeypatch):
    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 5)
        return tcs.Federation(model, [[(torch.randn(4, 20), torch.arange(4))]] * 2, "TCS-Q5", 0.1)

    looks = made()
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    late = made()
    for _ in range(4):
        late_D = late.round()
        with monkeypatch.context() as as_on_a_cpu:
            as_on_a_cpu.setattr(tcs, "is_on_cpu", lambda tensor: True)
            assert torch.equal(looks.round(), late_D)


@pytest.mark.parametrize(("last", "finite"), [(3e38, True), (torch.inf, False), (torch.nan, False)])
def test_numbers_whose_sum_overflows_are_finite_all_the_same(last, finite, monkeypatch):
    values, at_once = torch.tensor([3e38] * 40 + [last]), tcs.Known("TCS", [41])
    with contextlib.nullcontext() if finite else pytest.raises(tcs.NotFiniteError):
        at_once.require_finite(values, 0)
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: False)
    late = tcs.Known("TCS", [41])
    kept = late.require_finite(values, 0)
    assert [bool(flag) for _, flag in late.flags] == [finite] and torch.equal(
        kept, values if finite else torch.zeros(41)
    )
    with (
        contextlib.nullcontext() if finite else pytest.raises(tcs.NotFiniteError, match="client 0")
    ):
        late.check_flags()


def steps_of_a_hook(state, every_D, buckets):
    """Host reads of every step, of a gradient that comes in so many buckets; and what comes out."""
    parameters = [torch.zeros(part.numel()) for part in every_D[0].chunk(buckets)]
    counts, averages = [], []
    for gradient_D in every_D:
        parts = list(gradient_D.clone().chunk(buckets))
        with Reads() as reads:
            for n, part in enumerate(parts):
                last = n + 1 == buckets
                tcs.tcs_hook(state, Bucket(part, [parameters[n]], last)).wait()
        counts.append(reads.count)
        averages.append(torch.cat(parts))
    return counts, averages


SHARED_AND_OWN = {"phi_global": 0.05, "phi_local": 0.02}


@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_only_the_first_step_of_the_hook_and_the_last_dense_one_read_values(
    buckets, momentum, as_on_a_gpu, monkeypatch
):
    """The first: what the ranks begin with. The second, last of the dense ones: whether the average
    of a bucket, which gives its mask, is finite, and whether it is 0. No other reads any, however many
    buckets there are."""
    alone_in_a_group(monkeypatch)
    state = tcs.TCSState(Alone(), start_iter=2, momentum=momentum, **SHARED_AND_OWN)
    gradients = [deltas_ND[0] for deltas_ND in deltas_like_training(ROUNDS, 1, SIZES)]
    counts, _ = steps_of_a_hook(state, gradients, buckets)
    assert counts == [1, 2 * buckets, 0, 0, 0, 0] and state.bytes_sent["explored"] == 4 * 8 * 20


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("when", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_hook_that_may_not_look_gives_the_same_bits(buckets, bad, when, momentum, monkeypatch):
    """Averages and all that is kept, in void steps and after them: of gradients that are not finite
    (the mask of step 1 is then none), and of errors that outgrow float32 (3e38, twice)."""
    alone_in_a_group(monkeypatch)
    gradients = [deltas_ND[0] for deltas_ND in deltas_like_training(ROUNDS, 1, SIZES)]
    gradients[when][7::300] = bad
    if bad == 3e38:
        gradients[when][:] = bad
        gradients[when + 1] = gradients[when].clone()
    settings = SHARED_AND_OWN | {"start_iter": 2, "momentum": momentum}
    looks, late = (tcs.TCSState(Alone(), **settings) for _ in range(2))
    _, expected = steps_of_a_hook(looks, gradients, buckets)
    with monkeypatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(tcs, "is_on_cpu", lambda tensor: False)
        _, averages = steps_of_a_hook(late, gradients, buckets)
        parts = late.state_dict()["parameters"]
    for average, wanted in zip(averages, expected, strict=True):
        assert torch.equal(average.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(average.isnan(), wanted.isnan())
    for name, wanted in looks.state_dict()["parameters"].items():
        assert same_state(parts[name], wanted)
    assert expected[when].isnan().any() == (bad != 3e38) or when == 1 or momentum


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("cuts", [[500, 500], [100, 900], [300, 300, 400]])
def test_masks_survive_a_void_step_in_buckets_that_were_packed_anew(looks, cuts, monkeypatch):
    """The first step has one bucket, the second, void, has several: their masks are of any size."""
    alone_in_a_group(monkeypatch)
    monkeypatch.setattr(tcs, "is_on_cpu", lambda tensor: looks)
    parameters = [torch.zeros(size) for size in cuts]
    state = tcs.TCSState(Alone(), start_iter=1, **SHARED_AND_OWN)
    first_D, void_D, *_ = (deltas_ND[0] for deltas_ND in deltas_like_training(ROUNDS, 1, SIZES))
    tcs.tcs_hook(state, Bucket(first_D.clone(), parameters)).wait()
    before = state.state_dict()["parameters"]
    for n, part_D in enumerate(void_D.split(cuts)):
        part_D[7] = torch.nan
        out_D = tcs.tcs_hook(state, Bucket(part_D, [parameters[n]], n + 1 == len(cuts))).wait()
        assert out_D.isnan().all()
    for name, part in state.state_dict()["parameters"].items():
        assert torch.equal(part["mask"], before[name]["mask"])
        assert torch.equal(part["errors"], before[name]["errors"])


def test_a_loaded_state_of_the_hook_reads_its_masks_once(as_on_a_gpu, monkeypatch):
    """A mask a parameter, for its checksum, and where it lies; then none."""
    alone_in_a_group(monkeypatch)
    parameters = [torch.zeros(size) for size in SIZES]
    first, second = (tcs.TCSState(Alone(), start_iter=1) for _ in range(2))
    *before, one, two = (deltas_ND[0] for deltas_ND in deltas_like_training(ROUNDS, 1, SIZES))
    for delta_D in before:
        tcs.tcs_hook(first, Bucket(delta_D, parameters)).wait()
    second.load_state_dict(first.state_dict())
    with Reads(copies=("tolist", "cpu")) as reads:
        tcs.tcs_hook(second, Bucket(one, parameters)).wait()
    assert reads.count == len(SIZES) + 1 + 1  # also the collective's answer
    with Reads() as reads:
        tcs.tcs_hook(second, Bucket(two, parameters)).wait()
    assert reads.count == 0
