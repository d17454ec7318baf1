"""Schemes beyond the paper's: variants of its rules, other authors' methods, shorter codes, and classes
that compress one tensor at a time.

Importing this room registers them all, so that `Scheme.named` knows their names. A new scheme belongs
here. This room imports the core alone.
"""

from tcs_lab.schemes import low_rank, rivals, shorter_codes, tensors, variants

__all__ = ["low_rank", "rivals", "shorter_codes", "tensors", "variants"]
