"""What the cells of notebooks are made of: checks of parameters, statements with verdicts, exercises.

Importing this room registers the exercises. A new exercise belongs here, in `exercise_cases`.
"""

import tcs_lab.teaching.exercise_cases  # noqa: F401  (registers the exercises)
from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__, {"cells": "", "exercises": "judge_solution", "pictures": ""}
)
