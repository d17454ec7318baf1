"""A DDP training with the hook, to be copied: AdamW, autocast, accumulation, clipping, resumed.

uv run torchrun --nproc-per-node 2 notebooks/examples/ddp_training.py 300 checkpoints
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tcs_core as tcs


def main(steps: int, folder: Path, accumulate: int = 2) -> torch.nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    state = tcs.TCSState(start_iter=30, model=model)
    model.register_comm_hook(state, tcs.tcs_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    file, begun = folder / f"rank{rank}.pt", 0  # every rank has errors of its own
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])
        begun = saved["step"]
    steps_of = [None] * dist.get_world_size()
    dist.all_gather_object(steps_of, begun)
    if len(set(steps_of)) > 1:  # killed after one rank had saved and before another
        raise SystemExit(f"the ranks' checkpoints are of different steps: {steps_of}")

    for step in range(begun, steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
            x = torch.randn(16, 64, generator=generator)
            model.require_backward_grad_sync = part + 1 == accumulate  # as model.no_sync() does
            with torch.autocast("cpu", torch.bfloat16):
                scores = model(x)
            labels = x[:, :10].argmax(1)
            loss = torch.nn.functional.cross_entropy(scores.float(), labels) / accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the average, as all have it
        optimizer.step()
        if step % 10 == 9:
            folder.mkdir(parents=True, exist_ok=True)
            now = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                   "hook": state.state_dict(), "step": step + 1}  # fmt: skip
            torch.save(now, file.with_suffix(".part"))
            os.replace(file.with_suffix(".part"), file)  # whole, or not at all
    return model.module


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl", and everything on a GPU
    main(int(sys.argv[1]), Path(sys.argv[2]))
    dist.barrier()
    os._exit(0)  # a thread of gloo may outlive Python and abort
