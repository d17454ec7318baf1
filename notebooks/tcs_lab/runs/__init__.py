"""A run's life: from what is asked for, by the queue, checkpoints and progress, to the record.

`parameters` and `plans` read what files and notebooks ask for, and `estimates` says how long that will
take. `queue` and `deadline` make many jobs, with the processes of `workers`; `jobs` makes one, and says
what a new kind of run has to bring. `runs` is the first kind, the training of a RunConfig. `records`
writes, reads and checks a record, and `index` finds it. Whatever touches a file of a run belongs here.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parameters": (
            "PARAMETERS SCHEME_KEYS build_scheme check_notebook_params check_parameter "
            "given_notebook_params notebook_params plan read_params read_yaml"
        ),
        "records": (
            "Record compare_records config_of core_sha256 describe_core describe_provenance load_records "
            "provenance read_json_record read_record record_path results_folder write_record"
        ),
        "jobs": "Job make_job missing_jobs read_jobs",
        "runs": "Run run run_all",
        "index": "find_records",
        "plans": (
            "Plan Planning Search Stage count_made find_searches jobs_to_follow keep_planned plan_jobs plan_runs "
            "read_plan widen_search"
        ),
        "queue": "run_queue",
        "workers": "Worker start_job stop_processes",
        "estimates": "Expected expect forecast forecast_steps forecast_trainings",
        "checkpoints": "checkpoint_path epochs_kept",
        "progress": "Progress follow",
        "deadline": "Deadline",
    },
)
