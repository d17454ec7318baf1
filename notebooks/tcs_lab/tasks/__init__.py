"""What is trained: images (data sets, their partition, and batches) and text (a corpus and a GPT).

A new data set belongs here. This room knows nothing of runs and of how they are configured.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(("images", "text"), ""))
