"""What the notebooks' own cells are made of: parameters checked, claims said, exercises.

To import this room is to register the exercises. Here belongs a new exercise.
"""

import tcs_lab.teaching.exercise_cases  # noqa: F401  (registers the exercises)
from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "cells": (
            "Count Listening Positive Share Statements bold check_values decided literals paired_gain "
            "show_code show_figures"
        ),
        "exercises": "EXERCISES RIGHT UNWRITTEN check_exercise judge_solution",
    },
)
