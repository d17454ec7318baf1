"""A run's life: what is asked for, the queue, checkpoints and progress, the record in the end.

`parameters` reads what files and notebooks ask for, `plans` and `runs` make the runs, `records`
writes and reads what they give. Here belongs whatever touches a file of a run.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parameters": (
            "PARAMETERS SCHEME_KEYS check_notebook_params given_notebook_params named_with "
            "notebook_params plan read_params read_yaml"
        ),
        "records": (
            "Record config_of core_sha256 differences made_with read_record record_path recorded "
            "results_folder"
        ),
        "runs": "run run_all run_queue",
        "plans": "Plan Search made_of minutes_of planned_runs read_plan runs_to_follow searches_of",
        "estimates": "Expected expected missing_runs",
        "checkpoints": "checkpoint_path epochs_kept",
        "progress": "Progress followed",
        "deadline": "Deadline",
    },
)
