"""Numbers, tables and figures from records: what was sent, intervals, models of accuracy, Markdown.

Whatever computes a number from records belongs here, and so does a new figure: `figures` draws all
figures that several pages share, figures 3 to 5 of the paper among them. What a number means for a
claim belongs to `evidence`, where `paper_tables` puts the paper's tables together with their figures.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "tables": (
            "CONFIDENCE NO_GAP Record bits_per_parameter count_sends format_interval format_number "
            "format_times half_interval keep_measured markdown mean_interval paper_factor "
            "participants plain_markdown prevent_line_breaks readable save_table summary traffic "
            "welch_interval with_every_seed"
        ),
        "figures": (
            "COLOURS DASHES LOOK MARKERS curve_style draw_accuracy_figure draw_megabytes_figure "
            "label_ends label_points name_pair plain_log save_figure series_style text_colour"
        ),
        "analysis": "Comparison Estimate holm minus",
        "verdicts": (
            "CONTRADICTED NOT_MEASURED OPEN SUPPORTED WORDS read_verdicts verdict_on write_verdicts"
        ),
    },
)
