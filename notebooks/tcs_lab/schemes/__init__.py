"""Schemes beyond the paper's: variants of its rules, other authors' methods, shorter codes, classes
that compress a tensor at a time.

To import this room is to register them all, so that `Scheme.named` knows their names. Here belongs a
new scheme. It imports the core alone.
"""

from tcs_lab.schemes import low_rank, rivals, shorter_codes, tensors, variants

__all__ = ["low_rank", "rivals", "shorter_codes", "tensors", "variants"]
