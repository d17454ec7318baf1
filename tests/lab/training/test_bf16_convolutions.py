"""Convolutions in bf16 without AVX-512: exact sums, rounded once, and quicker than PyTorch's own."""

import pytest
import tcs_lab as lab
import torch
from common import config
from tcs_lab.training.bf16_convolutions import (
    FEW_PIXELS,
    Bf16Convolutions,
    uses_bf16_convolutions,
)
from torch import nn

CONVOLUTIONS = [
    # in_channels, out_channels, size of the images, and settings
    (12, 20, (7, 5), {"kernel_size": 3, "padding": 1}),
    (12, 20, (7, 5), {"kernel_size": 3, "padding": 1, "groups": 4}),
    (12, 20, (7, 5), {"kernel_size": (3, 1), "stride": (2, 1), "dilation": 2, "bias": True}),
    (12, 20, (2, 2), {"kernel_size": 3, "padding": 1, "groups": 4}),
    (12, 20, (4, 4), {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}),
    (12, 20, (5, 3), {"kernel_size": (1, 2), "stride": (3, 1), "padding": (2, 0)}),
    (12, 20, (4, 4), {"kernel_size": 1, "stride": 2, "groups": 4}),
    (12, 20, (4, 4), {"kernel_size": 3, "padding": 2, "dilation": 2}),
    (12, 20, (3, 3), {"kernel_size": 3, "padding": 1, "bias": True}),
]


def rounded(x):
    return x.bfloat16().to(x.dtype)


@pytest.mark.parametrize(("inputs", "outputs", "size", "settings"), CONVOLUTIONS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_exact_but_for_one_rounding(
    inputs, outputs, size, settings, memory_format
):
    """The expected numbers are sums in fp64. A sum in fp32 beside the middle between two numbers of
    bf16 may be rounded to the other one."""
    torch.manual_seed(3)
    net = nn.Conv2d(inputs, outputs, **({"bias": False} | settings)).to(memory_format=memory_format)
    images = torch.randn(6, inputs, *size).to(memory_format=memory_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), Bf16Convolutions():
        y = net(images)
    assert y.dtype == torch.bfloat16
    given = torch.randn_like(y)
    y.backward(given)
    if memory_format == torch.channels_last:
        assert net.weight.grad.is_contiguous(memory_format=memory_format)

    exact = nn.Conv2d(inputs, outputs, **({"bias": False} | settings)).double()
    exact.load_state_dict({name: rounded(p) for name, p in net.state_dict().items()})
    exact_images = rounded(images.detach()).double().requires_grad_()
    exact_y = exact(exact_images)
    exact_y.backward(given.double())
    pairs = [(y, exact_y), (images.grad, exact_images.grad)]
    parameters = zip(net.parameters(), exact.parameters(), strict=True)
    pairs += [(p.grad, wanted.grad) for p, wanted in parameters]
    for found, wanted in pairs:
        found, wanted = found.detach().double(), rounded(wanted.detach())
        assert (found != wanted).double().mean() < 0.01
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)


def test_small_images_take_the_other_way(monkeypatch):
    """Up to FEW_PIXELS, the gradient of the weights is not oneDNN's."""
    asked = []
    module = lab.training.bf16_convolutions._FewPixels
    backward = module.backward
    monkeypatch.setattr(module, "backward", lambda *a: asked.append(a[1].shape) or backward(*a))
    net = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    for side in (4, 5):
        with torch.autocast("cpu", torch.bfloat16), Bf16Convolutions():
            y = net(torch.randn(2, 4, side, side))
        y.sum().backward()
    assert FEW_PIXELS == 16 and asked == [(2, 4, 4, 4)]


def test_gradients_of_gradients_are_right():
    """Nothing here needs them, but wrong ones would not be noticed."""
    weight = torch.randn(3, 2, 3, 3, requires_grad=True)
    images = torch.randn(2, 2, 4, 4)
    with Bf16Convolutions():
        y = torch.conv2d(images, weight, None, (1, 1), (1, 1), (1, 1), 1)
    (first,) = torch.autograd.grad(y.float().pow(2).sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    reference = torch.nn.functional.conv2d(images, weight, None, 1, 1)
    (first,) = torch.autograd.grad(reference.pow(2).sum(), weight, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), weight)
    assert (second - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("model", ["conv3", "resnet8"])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_training_is_the_same_to_rounding(small, model, side_by_side, monkeypatch):
    """The same as with PyTorch's own convolutions, after one epoch. With AVX-512, these may have the
    same bits, so what shows that others were used is that they were called."""
    losses, calls = {}, []
    own = Bf16Convolutions.__torch_function__
    monkeypatch.setattr(
        Bf16Convolutions, "__torch_function__", lambda *a, **k: calls.append(a[1]) or own(*a, **k)
    )
    for capability in ("AVX2", "AVX512"):
        calls.clear()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        wanted = config(
            "TCS", model=model, precision="bf16", side_by_side=side_by_side, device="cpu"
        )
        assert uses_bf16_convolutions(wanted) == (capability == "AVX2")
        assert lab.runs.records.rounding(wanted)["bf16_convolutions"] == (capability == "AVX2")
        training = lab.Training(wanted, lab.load_data(wanted))
        losses[capability] = training.epoch(0)["train_loss"], training.evaluate()["loss"]
        assert (torch.conv2d in calls) == (capability == "AVX2")
    assert losses["AVX2"] == pytest.approx(losses["AVX512"], rel=2e-2)


@pytest.mark.parametrize(
    ("capability", "changes", "uses"),
    [
        ("AVX2", {"precision": "bf16"}, True),
        ("AVX2", {"precision": "fp32"}, False),
        ("AVX512", {"precision": "bf16"}, False),
        ("DEFAULT", {"precision": "bf16"}, False),
    ],
)
def test_only_bf16_without_avx_512_needs_them(capability, changes, uses, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert uses_bf16_convolutions(config("TCS", device="cpu", **changes)) == uses


def test_a_call_with_keywords_is_as_without_the_context():
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    expected = torch.conv2d(x, weight, None, padding=1), torch.conv2d(x, weight)
    with Bf16Convolutions():
        found = torch.conv2d(x, weight, None, padding=1), torch.conv2d(x, weight)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
