"""Schemes beyond the paper's: variants of its rules, other authors' methods, shorter codes.

To import this room is to register them all, so that `Scheme.named` knows their names. Here belongs a
new scheme. It imports the core alone.
"""

from tcs_lab.schemes import rivals, shorter_codes, variants

__all__ = ["rivals", "shorter_codes", "variants"]
