"""Notebook 15's variants of federated averaging, each beside a plain PyTorch loop."""

import copy
import re

import pytest
import tcs_lab as lab
import torch
from torch import nn

import tcs_core as tcs

SOURCE = (lab.ROOT / "notebooks" / "15_your_own_model.py").read_text(encoding="utf-8")
VARIANTS = ["FedProx", "LoRA", "unequal steps", "FedAdam", "own heads"]


def recipes(edit=lambda code: code, seed=0, clients=3):
    """The cells between the section's heading and the next, run: the largest differences."""
    section = SOURCE.split("# ## Variants of federated averaging\n")[1].split("# ## The module is")[
        0
    ]
    cells = re.split(r"\n# %%.*\n", section)
    code = [cell for cell in cells if not re.match(r"#(?! %%)", cell.strip())]
    torch.manual_seed(seed)
    own = [
        [(torch.randn(4, 20) + 0.1 * n, torch.randn(4, 1)) for _ in range(7)]
        for n in range(clients)
    ]

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    names = {"copy": copy, "nn": nn, "tcs": tcs, "torch": torch, "seed": seed, "clients": clients,
             "own": own, "loss": loss, "learning_rate": 0.05}  # fmt: skip
    exec(edit("\n".join(code)), names)
    return names["differences"]


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_each_variant_is_plain_pytorchs_to_rounding(clients):
    found = recipes(clients=clients, seed=clients)
    assert list(found) == VARIANTS
    assert max(found.values()) < 1e-6, found


SPOILED = {
    "FedProx": ("return loss(model, batch) + mu / 2 * away", "return loss(model, batch)"),
    "unequal steps": ("if tau < steps[n] else None", "if tau < 4 else None"),
    "FedAdam": ("loss=loss, server_optimizer=adam", "loss=loss"),
    "own heads": ("p.register_post_accumulate_grad_hook(step_of_head)", "p.requires_grad_(False)"),
}  # fmt: skip


@pytest.mark.parametrize("variant", SPOILED)
def test_a_variant_that_is_spoiled_differs(variant):
    before, after = SPOILED[variant]

    def edit(code):
        assert before in code
        return code.replace(before, after, 1)

    found = {}
    try:
        found = recipes(edit)
    except (ValueError, StopIteration):  # other parameters are trained
        return
    assert found[variant] > 1e-4
