"""The paper's compression, slow and independent: plain loops over lists, nothing from the core.

Written from Sec. II and Alg. 2. Numbers are rounded to float32 where a client or server stores them.
"""

import math

import numpy as np

f32 = np.float32


def s_top(vector, k, allowed=None):
    """Positions of the k largest magnitudes; of equal ones the lower index."""
    candidates = range(len(vector)) if allowed is None else allowed
    return sorted(sorted(candidates, key=lambda i: (-abs(vector[i]), i))[:k])


def s_top_fair(vector, k, layer_sizes, phi_min, allowed=None):
    """Every layer's ceil(phi_min d_l) largest first, then the largest of all the rest."""
    allowed = set(range(len(vector))) if allowed is None else set(allowed)
    fair, start = [], 0
    for size in layer_sizes:
        layer = [i for i in range(start, start + size) if i in allowed]
        fair += s_top(vector, max(1, math.ceil(phi_min * size)), layer)
        start += size
    if len(fair) >= k:
        return s_top(vector, k, fair)
    rest = s_top(vector, k - len(fair), [i for i in allowed if i not in set(fair)])
    return sorted(fair + rest)


def quantize(values, intervals):
    """Sec. II-F, value by value, with the edges as the paper writes them."""
    nonzero = [abs(float(v)) for v in values if v != 0]
    if not nonzero:
        return [f32(0.0) for _ in values]
    u_max, u_min = max(nonzero), min(nonzero)
    sigma = (u_min / u_max) ** (1 / intervals)
    members = [[] for _ in range(intervals)]
    where = []
    for v in values:
        p = intervals
        for candidate in range(1, intervals):
            if sigma**candidate * u_max < abs(float(v)):
                p = candidate
                break
        where.append(p - 1)
        if v != 0:
            members[p - 1].append(abs(float(v)))
    means = [f32(sum(m) / len(m)) if m else f32(0.0) for m in members]
    return [-means[p] if v < 0 else means[p] for v, p in zip(values, where, strict=True)]


class Reference:
    """Alg. 2 for `kind` "TCS" or "top-K"; `min_global`, `min_local`: layer-wise fairness or None."""

    def __init__(self, kind, layer_sizes, clients, phi_global, phi_local, intervals=0,
                 min_global=None, min_local=None):  # fmt: skip
        self.kind, self.layer_sizes, self.intervals = kind, layer_sizes, intervals
        self.dimension = sum(layer_sizes)
        self.k_global = math.ceil(phi_global * self.dimension) if kind == "TCS" else 0
        self.k_local = math.ceil(phi_local * self.dimension)
        self.min_global, self.min_local = min_global, min_local
        self.errors = [[f32(0)] * self.dimension for _ in range(clients)]
        self.last_update = None

    def _select(self, vector, k, phi_min, allowed=None):
        if phi_min is None:
            return s_top(vector, k, allowed)
        return s_top_fair(vector, k, self.layer_sizes, phi_min, allowed)

    def step(self, deltas):
        total = [f32(0)] * self.dimension
        self.global_mask, self.local_masks = [], []
        if self.kind == "TCS" and self.last_update is None:
            for delta in deltas:
                total = [f32(a + b) for a, b in zip(total, delta, strict=True)]
        else:
            if self.kind == "TCS":
                self.global_mask = self._select(self.last_update, self.k_global, self.min_global)
            for n, delta in enumerate(deltas):
                intended = [f32(d + e) for d, e in zip(delta, self.errors[n], strict=True)]
                free = sorted(set(range(self.dimension)) - set(self.global_mask))
                local = self._select(intended, self.k_local, self.min_local, free)
                mask = self.global_mask + local
                sent = [intended[i] for i in mask]
                if self.intervals:
                    sent = quantize(sent, self.intervals)
                self.errors[n] = intended
                for i, value in zip(mask, sent, strict=True):
                    self.errors[n][i] = f32(intended[i] - value)
                    total[i] = f32(total[i] + value)
                self.local_masks.append(local)
        self.last_update = [f32(t / f32(len(deltas))) for t in total]
        return self.last_update
