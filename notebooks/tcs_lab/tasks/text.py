"""Text: the help topics that come with every Python, as a data set, and a small GPT."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from tcs_lab.support.errors import to_python

_HELD_OUT = 10  # the last tenth of every topic is for the test


@dataclass(frozen=True)
class Text:
    """Topics whose characters are numbers: `train` and `test` have a tensor (characters,) int64 per topic.

    `alphabet` has the characters, sorted; `fingerprint` is the sha256 of all text.
    """

    label: str
    alphabet: str
    train: list[Tensor]
    test: list[Tensor]
    fingerprint: str

    @property
    def classes(self) -> int:
        """The number of characters that can come next."""
        return len(self.alphabet)

    def read(self, numbers: Tensor) -> str:
        """Return numbers (n,) as text."""
        return "".join(self.alphabet[i] for i in numbers.tolist())


@cache
def load_text() -> Text:
    """Load the help topics of this Python, `pydoc_data.topics`. Another Python may have other ones."""
    alphabet = "".join(sorted(set("".join(topics.values()))))
    numbers = {character: i for i, character in enumerate(alphabet)}
    texts = [torch.tensor([numbers[c] for c in topics[name]]) for name in sorted(topics)]
    cuts = [len(text) - len(text) // _HELD_OUT for text in texts]
    train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    test = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    everything = "\0".join(f"{name}\0{topics[name]}" for name in sorted(topics))
    fingerprint = hashlib.sha256(everything.encode()).hexdigest()
    return Text("Python's help topics", alphabet, train, test, fingerprint)


class _Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm and with a shortcut around it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, width)
        x = x + self.join(self._attention(self.attend(self.norm(x))))
        return x + self.think(self.other_norm(x))

    def _attention(self, mixed: Tensor) -> Tensor:
        """Attend: queries, keys and values side by side (B, T, 3 width) become (B, T, width)."""
        heads = mixed.unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        query, key, value = heads  # (B, heads, T, width / heads)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (shares @ value).transpose(-3, -2).flatten(-2)


class GPT(nn.Module):
    """A small GPT: from characters (B, T) to scores (B, T, classes) for the next character of each.

    It has two blocks of `width` channels in width // 16 heads, at least one; T is at most `context`.
    Raises ValueError for a width that is no multiple of the number of heads.
    """

    def __init__(self, classes: int, width: int, context: int):
        super().__init__()
        classes, width, context = to_python((classes, width, context))
        if width % (heads := max(1, width // 16)):
            raise ValueError(
                f"width: got {width}, allowed for a gpt of about this width: a multiple of its {heads} heads"
            )
        self.characters = nn.Embedding(classes, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[-1], device=characters.device)
        x = self.characters(characters) + self.places(places)
        return self.head(self.norm(self.blocks(x)))
