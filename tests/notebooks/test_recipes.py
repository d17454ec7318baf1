"""The example with variants of federated averaging, each beside a plain PyTorch loop."""

import copy
import subprocess
import sys
import types

import pytest
import tcs_lab as lab
import torch
from torch import nn

EXAMPLE = lab.ROOT / "notebooks" / "examples" / "federated_variants.py"


def load(edit=lambda code: code):
    """The example as a module, with edited code."""
    module = types.ModuleType(EXAMPLE.stem)
    exec(compile(edit(EXAMPLE.read_text(encoding="utf-8")), str(EXAMPLE), "exec"), vars(module))
    return module


EXAMPLES = load()
RATE, loss = EXAMPLES.RATE, EXAMPLES.loss


def trained_of(net):
    return [p for p in net.parameters() if p.requires_grad]


def played_by_hand(net, clients, local, server=None):
    """Train for the example's rounds in plain PyTorch.

    `local(net, n, t)` trains a client's copy in place. Without `server`, the mean of the copies is the new net. With it, an
    optimizer of the server takes a step, for which the gradient is minus the mean of the clients' changes.
    """
    optimizer = server(trained_of(net)) if server else None
    for t in range(EXAMPLES.ROUNDS):
        copies = [copy.deepcopy(net) for _ in range(clients)]
        for n, copied in enumerate(copies):
            local(copied, n, t)
        for p, *others in zip(trained_of(net), *map(trained_of, copies), strict=True):
            mean = torch.stack([q.detach() for q in others]).mean(0)
            p.grad = p.detach() - mean
            p.data = p.data if optimizer else mean
        if optimizer:
            optimizer.step()
    return net


def sgd_by_hand(batches, steps=None, objective=loss):
    """Plain SGD steps of a client: four, or `steps[n]`."""

    def local(net, n, t):
        optimizer = torch.optim.SGD(trained_of(net), RATE)
        count = steps[n] if steps else 4
        for tau in range(count):
            optimizer.zero_grad()
            objective(net, batches[n][(count * t + tau) % len(batches[n])]).backward()
            optimizer.step()

    return local


def fed_prox(examples, batches):
    def local(net, n, t):
        before = copy.deepcopy(net)

        def objective(model, batch):
            pairs = zip(trained_of(model), trained_of(before), strict=True)
            away = sum((p - q.detach()).pow(2).sum() for p, q in pairs)
            return loss(model, batch) + 0.5 / 2 * away

        sgd_by_hand(batches, objective=objective)(net, n, t)

    by_hand = played_by_hand(examples.first_model(), len(batches), local)
    return examples.fed_prox(batches).model, by_hand


def lora(examples, batches):
    layers = (
        examples.Adapted(m) if isinstance(m, nn.Linear) else m for m in examples.first_model()
    )
    by_hand = played_by_hand(nn.Sequential(*layers), len(batches), sgd_by_hand(batches))
    return examples.lora(batches).model, by_hand


def unequal_steps(examples, batches):
    local = sgd_by_hand(batches, [1 + n % 4 for n in range(len(batches))])
    by_hand = played_by_hand(examples.first_model(), len(batches), local)
    return examples.unequal_steps(batches).model, by_hand


def fed_adam(examples, batches):
    model = examples.first_model()
    by_hand = played_by_hand(model, len(batches), sgd_by_hand(batches), EXAMPLES.adam)
    return examples.fed_adam(batches).model, by_hand


def personal_heads(examples, batches):
    heads_by_hand = [copy.deepcopy(examples.first_model()[2]) for _ in batches]
    local = sgd_by_hand(batches)

    def train_with_head(net, n, t):
        local(nn.Sequential(net, heads_by_hand[n]), n, t)

    body_by_hand = played_by_hand(examples.first_model()[:2], len(batches), train_with_head)
    federation, heads = examples.personal_heads(batches)
    return nn.Sequential(federation.model, *heads), nn.Sequential(body_by_hand, *heads_by_hand)


VARIANTS = [fed_prox, lora, unequal_steps, fed_adam, personal_heads]
by_name = {"ids": lambda variant: variant.__name__}


def difference(variant, examples, clients=3, seed=0):
    """The largest difference of a parameter between the example and the plain loop."""
    made, by_hand = variant(examples, examples.made_up_batches(clients, seed))
    pairs = zip(trained_of(made), trained_of(by_hand), strict=True)
    return max(float((p - q).abs().max().detach()) for p, q in pairs)


@pytest.mark.parametrize("clients", [2, 3, 5])
@pytest.mark.parametrize("variant", VARIANTS, **by_name)
def test_each_variant_is_plain_pytorchs_to_rounding(variant, clients):
    assert difference(variant, EXAMPLES, clients, seed=clients) < 1e-6


def test_lora_sends_the_adapters_only():
    federation = EXAMPLES.lora(EXAMPLES.made_up_batches())
    assert federation.theta_D.numel() == 2 * (20 + 16) + 2 * (16 + 1)


SPOILED = {
    fed_prox: ("return loss(model, batch) + mu / 2 * away", "return loss(model, batch)"),
    unequal_steps: ("if tau < self.steps[n] else None", "if tau < 4 else None"),
    fed_adam: ("loss=loss, server_optimizer=adam", "loss=loss"),
    personal_heads: ("p.register_post_accumulate_grad_hook(step_of_head)", "p.requires_grad_(False)"),
}  # fmt: skip


@pytest.mark.parametrize("variant", SPOILED, **by_name)
def test_a_variant_that_is_spoiled_differs(variant):
    before, after = SPOILED[variant]

    def edit(code):
        assert before in code
        return code.replace(before, after, 1)

    try:
        found = difference(variant, load(edit))
    except ValueError:  # other parameters are trained
        return
    assert found > 1e-4


def test_the_variants_start_as_the_first_lines_say():
    command = [sys.executable, str(EXAMPLE), "TCS-L4"]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == len(VARIANTS)
