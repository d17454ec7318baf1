"""What records say about the paper: claims and their verdicts, the fair comparison, sweeps.

Here belongs a new question with the rule that answers it. Its file stands under params/.
"""

from tcs_lab.support.lazy import lazily

_MODULES = ("claims", "fair", "judging", "measures", "paper_tables", "planned_model", "sensitivity",
            "unequal_clients")  # fmt: skip
__getattr__, __dir__ = lazily(__name__, {**dict.fromkeys(_MODULES, ""), "sentences": "link"})
