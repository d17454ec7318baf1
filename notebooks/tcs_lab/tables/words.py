"""Words: the one vocabulary of verdicts. `evidence.claims` adds one word for what is counted."""

SUPPORTED, CONTRADICTED, OPEN, NOT_MEASURED = WORDS = (
    "supported",
    "contradicted",
    "open",
    "not measured",
)
