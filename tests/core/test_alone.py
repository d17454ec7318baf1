"""The core in a folder of its own: the standard library, torch and numpy are all it imports."""

import shutil
import subprocess
import sys
import textwrap

import tcs_core as tcs

BLOCK = """
    import sys

    class OnlyTorchAndNumpy:
        # torch may import what torch needs; the core and this script may not
        def find_spec(self, name, path=None, target=None):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asks, asked = (n.split(".")[0] for n in (frame.f_globals["__name__"], name))
            known = {"torch", "numpy", "tcs_core", *sys.stdlib_module_names}
            if asks in ("tcs_core", "__main__") and asked not in known:
                raise ImportError(f"{asks} imports {asked}")

    sys.meta_path.insert(0, OnlyTorchAndNumpy())
"""
COMPRESSOR = """
    import torch
    from tcs_core import Compressor, Scheme

    compressor = Compressor(Scheme.named("TCS"), [1000], 4)
    for _ in range(3):
        update_D = compressor.step(torch.randn(4, 1000))
    assert 10 <= len(update_D.nonzero()) <= 14
    print(compressor.bits_up, compressor.bits_down)
"""
HOOK = """
    import os
    import sys

    import tcs_core
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 10))
    state = tcs_core.TCSState(**tcs_core.PAPER_SHARES, start_iter=1)
    model.register_comm_hook(state, tcs_core.tcs_hook)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
    assert sum(len(p.grad.nonzero()) for p in model.parameters()) == 11 + 2
    print(state.iter)
    sys.stdout.flush()
    os._exit(0)  # torch's threads may abort an interpreter that ends
"""


def alone(folder, *parts):
    """The standard output of a script of these parts, run beside a copy of the core."""
    shutil.copy(tcs.__file__, folder)
    script = folder / "script.py"
    script.write_text("".join(textwrap.dedent(part) for part in (BLOCK, *parts)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, encoding="utf-8"
    )
    return done.returncode, done.stdout.split(), done.stderr


def test_compressor_and_hook_run_with_nothing_but_torch_and_numpy(tmp_path):
    code, said, wrong = alone(tmp_path, COMPRESSOR, HOOK)
    assert code == 0, wrong
    assert int(said[0]) == 32 * 11 + tcs.position_bits(1, 1000, 512) and said[2] == "2"


def test_anything_else_is_blocked_there(tmp_path):
    code, _, wrong = alone(tmp_path, "import pandas")
    assert code == 1 and "__main__ imports pandas" in wrong
