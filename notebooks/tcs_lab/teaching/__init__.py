"""What the cells of notebooks are made of: checks of parameters, statements with verdicts, exercises.

Importing this room registers the exercises. A new exercise belongs here, in `exercise_cases`.
"""

import tcs_lab.teaching.exercise_cases  # noqa: F401  (registers the exercises)
from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "cells": (
            "ListeningLink Statements bold check_values judge_mean paired_gain "
            "read_literals show_code show_figures"
        ),
        "exercises": "EXERCISES RIGHT UNWRITTEN check_exercise judge_solution",
    },
)
