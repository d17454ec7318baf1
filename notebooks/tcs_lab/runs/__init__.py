"""A run's life: from what is asked for, by the queue, checkpoints and progress, to the record.

`parameters` and `plans` read what files and notebooks ask for, and `estimates` says how long that will
take. `queue` and `deadline` make many jobs, with the processes of `workers`; `jobs` makes one, and says
what a new kind of run has to bring. `runs` is the first kind, the training of a RunConfig. `records`
writes, reads and checks a record, and `index` finds it. Whatever touches a file of a run belongs here.
"""

from tcs_lab.support.lazy import lazily

_MODULES = ("checkpoints", "deadline", "estimates", "index", "jobs", "parameters", "plans",
            "progress", "records", "runs", "workers")  # fmt: skip
__getattr__, __dir__ = lazily(__name__, {**dict.fromkeys(_MODULES, ""), "queue": "run_queue"})
