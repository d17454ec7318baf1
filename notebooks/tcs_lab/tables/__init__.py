"""Numbers, tables and figures from records: what was sent, intervals, models of accuracy, Markdown.

Whatever computes a number from records belongs here, and so does a new figure: `figures` draws all
figures that several pages share, figures 3 to 5 of the paper among them. What a number means for a
claim belongs to `evidence`, where `paper_tables` puts the paper's tables together with their figures.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {"analysis": "", "figures": "DASHES MARKERS label_points", "tables": "NO_GAP", "verdicts": ""},
)
