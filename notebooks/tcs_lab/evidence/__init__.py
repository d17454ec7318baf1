"""What records say about the paper: claims and their verdicts, the fair comparison, sweeps.

Here belongs a new question with the rule that answers it. Its file stands under params/.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "claims": (
            "Claim Claims load_claim_records load_planned_records load_unequal_records read_claims"
        ),
        "measures": "MEASURES count_explored measure_coincidence measure_recurrence",
        "planned_model": "compare_unequal_clients decompose estimate_difference estimate_gaps",
        "judging": (
            "CLAIM_UNITS Gate VERDICTS apply_gates differing_bootstrap_verdict format_difference "
            "format_estimate format_verdict judge_claims judge_interval list_unmeasured "
            "readable_claims"
        ),
        "fair": (
            "compare_prediction control_answers fair_counts fair_differences fair_progress fair_table "
            "readable_answers readable_fair readable_fair_differences readable_prediction"
        ),
        "sensitivity": (
            "SensitivitySweep best_values read_sensitivity readable_sensitivity sensitivity_plan "
            "sensitivity_table"
        ),
        "sentences": "link read_sentences sentences_table",
        "unequal_clients": "unequal_by_seed unequal_costs unequal_masks",
        "paper_tables": "draw_table",
    },
)
