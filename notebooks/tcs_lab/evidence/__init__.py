"""What records say about the paper: claims and their verdicts, the fair comparison, sweeps.

Here belongs a new question with the rule that answers it. Its file stands under params/.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "claims": (
            "CLAIM_UNITS Gate VERDICTS behind_gates claim_records decomposed difference "
            "difference_said judged not_measured numbers other_by_bootstrap planned_gaps "
            "planned_records read_claims readable_claims recurring said unequal unequal_records "
            "verdict"
        ),
        "fair": (
            "control_answers fair_counts fair_differences fair_progress fair_table predicted "
            "readable_answers readable_fair readable_fair_differences readable_predicted"
        ),
        "sensitivity": (
            "Sweep best_values read_sensitivity readable_sensitivity sensitivity_plan "
            "sensitivity_table"
        ),
        "sentences": "link read_sentences sentences_table",
        "coincidence": "coinciding explored_places",
        "unequal_clients": "unequal_by_seed unequal_costs unequal_masks",
        "paper_tables": "draw_table",
    },
)
