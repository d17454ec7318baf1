"""A federation whose clients are real processes, on nothing but public objects of `tcs_core`.

Every process is one client, and also a copy of the server: it receives all messages, as bytes, and
computes the same average. To be started with four clients and 50 rounds:

    uv run torchrun --nproc-per-node 4 notebooks/examples/federation.py 50
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tcs_core as tcs

LAYERS, RATE, LOCAL_STEPS, DENSE_ROUNDS = (20, 30, 10), 0.1, 4, 5


def first_model() -> nn.Module:
    """The model that all processes start from."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*LAYERS[:2]), nn.ReLU(), nn.Linear(*LAYERS[1:]))


def local_difference(theta_D: Tensor, client: int, t: int) -> Tensor:
    """What local training on the client's own data changes in round t, (D,)."""
    model, generator = first_model(), torch.Generator().manual_seed(1000 * client + t)
    tcs.vector_to_parameters(theta_D, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(LOCAL_STEPS):
        x = torch.randn(16, LAYERS[0], generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, : LAYERS[-1]].argmax(1)).backward()
        optimizer.step()
    return tcs.parameters_to_vector(model) - theta_D


def train(rounds: int, scheme: str = "TCS-Q5") -> Tensor:
    """This process's part of the federation; returns the common model, (D,)."""
    rank, model = dist.get_rank(), first_model()
    theta_D = tcs.parameters_to_vector(model)
    known = tcs.Known(scheme, tcs.layer_sizes(model))
    client, server = tcs.Client(known, rank), tcs.Server(known)
    for t in range(rounds):
        known.begin(dense=t < DENSE_ROUNDS)
        message = known.to_bytes(client.send(local_difference(theta_D, rank, t)))
        messages = [b""] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        for sender, data in enumerate(messages):
            server.add(sender, known.from_bytes(data, sender))
        update_D, _ = server.finish()
        client.arrived()
        known.observe(update_D)  # the round is over
        theta_D = theta_D + update_D
        if rank == 0:
            print(f"round {t + 1}: {sum(map(len, messages)):,} bytes from all clients")
    return theta_D


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(int(sys.argv[1]))
    dist.barrier()  # nobody leaves while another one still listens
    dist.destroy_process_group()
