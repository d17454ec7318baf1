"""Pictures that explain how TCS works, drawn from what the core computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcs_core import Client, Known, Scheme, Server, top_k_mask
from tcs_lab.tables.figures import BLUE, GREY, ORANGE

_ENTRIES, _CLIENTS, _SEED = 32, 2, 5
_KEPT = "#cccccc"
_MASK = "in the shared mask: a client sends the value"
_OWN = "a client's largest others: it sends value and position"
_REST = "not sent: the client keeps it for the next round"
_SMALL = "other entries of the last update"
_NEXT = "the next shared mask"


def draw_round() -> Any:
    """Draw one round of TCS with two clients and few entries. Return the figure.

    The updates are random numbers with a part that all clients have in common. What is sent, kept and
    averaged is computed by the core. Bars are absolute values.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    before_D, shared_K, clients, after_D = _play_round()
    rows = 2 + len(clients)
    figure, axes = plt.subplots(rows, 1, figsize=(8.4, 0.95 * rows + 0.8), layout="constrained")
    on_mask = set(shared_K.tolist())
    colours = [BLUE if i in on_mask else GREY for i in range(_ENTRIES)]
    _draw_row(
        axes[0],
        before_D,
        colours,
        "The last global update:\nits largest entries\nare the shared mask",
    )
    for number, (meant_D, own_K) in enumerate(clients):
        own = set(own_K.tolist())
        colours = [BLUE if i in on_mask else ORANGE if i in own else _KEPT for i in range(_ENTRIES)]
        words = f"Client {'AB'[number]}: its update\nplus what it has kept\nfrom earlier rounds"
        _draw_row(axes[1 + number], meant_D, colours, words)
    colours = [BLUE if i in on_mask else ORANGE for i in range(_ENTRIES)]
    _draw_row(
        axes[-1], after_D, colours, "The new global update:\nthe average of all\nthat was sent"
    )
    for i in top_k_mask(after_D, len(shared_K)).nonzero().squeeze(1).tolist():
        below = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 9}
        axes[-1].annotate("▲", (i, 0), (0, -3), **below)
    axes[-1].set_xlabel(" ", fontsize=9)  # leaves room for the triangles
    handles: list[Any] = [
        Patch(color=colour, label=words)
        for colour, words in ((BLUE, _MASK), (ORANGE, _OWN), (_KEPT, _REST), (GREY, _SMALL))
    ]
    handles.append(
        Line2D([], [], color="black", marker="^", linestyle="none", markersize=7, label=_NEXT)
    )
    figure.legend(handles=handles, loc="outside upper center", frameon=False, fontsize=9, ncols=2)
    return figure


def _play_round() -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Play three rounds: a dense one, one that sets the mask, and the one that is drawn. Return the second
    one's update (D,), and of the third one the shared mask, what each client meant to send and its own
    positions, and the update."""
    generator = torch.Generator().manual_seed(_SEED)
    common_D = torch.randn(_ENTRIES, generator=generator) ** 3
    scheme = Scheme.named("TCS", phi_global=5 / _ENTRIES, phi_local=2 / _ENTRIES)
    known = Known(scheme, [_ENTRIES])
    clients, server = [Client(known, n) for n in range(_CLIENTS)], Server(known)
    update_D = common_D
    for _ in range(3):
        seen, before_D = list[tuple[Tensor, Tensor]](), update_D
        known.begin()
        shared_K = known.shared_K.clone()
        for client in clients:
            own_D = 0.8 * torch.randn(_ENTRIES, generator=generator) ** 3
            message = client.send(0.5 * common_D + own_D)
            server.add(client.number, message)
            assert client.errors_D is not None
            seen.append((client.errors_D.clone(), message.positions))
        update_D, _ = server.finish()
        known.observe(update_D)
        for client in clients:
            client.arrived()
    return before_D, shared_K, seen, update_D


def _draw_row(axes: Any, values_D: Tensor, colours: list[str], words: str) -> None:
    axes.bar(range(len(values_D)), values_D.abs().tolist(), color=colours, width=0.8)
    axes.set_ylabel(words, rotation=0, ha="right", va="center", fontsize=9)
    axes.set(xticks=[], yticks=[])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
