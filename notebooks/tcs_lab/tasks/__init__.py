"""What is trained: images (data sets, their cut, partition and batches) and text (a corpus, a GPT).

Here belongs a new data set. A task knows nothing of runs and of how they are configured.
"""

from tcs_lab.support.lazy import lazily

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(("images", "text"), ""))
