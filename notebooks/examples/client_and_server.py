"""A client and a server: top-K whose errors fade, averaged mostly over those who sent an entry.

tcs compare notebooks/examples/client_and_server.py
"""

import torch

import tcs_core as tcs


class FadingClient(tcs.Client):
    """What the server did not get counts a little less in every round."""

    def intended(self, delta_D):
        self.errors_D.mul_(0.95)
        return super().intended(delta_D)


class SendersServer(tcs.Server):
    """An entry's average lies halfway, on a logarithmic scale, between that over all clients and that
    over the clients that sent it. With top-K, most entries come from one or two clients."""

    def __init__(self, known, weights=None):
        super().__init__(known, weights)
        self.senders_D = torch.zeros(known.dimension, device=known.device)

    def add(self, number, message):
        super().add(number, message)
        self.senders_D[message.positions] += 1

    def average(self):
        if self.average_D is None and not self.known.dense:  # everybody sends a dense round
            share_D = self.senders_D.clamp(min=1) / len(self.heard)
            self.sum_D /= share_D.sqrt()  # without the root, a single client would decide alone
        return super().average()

    def drop(self):
        super().drop()
        self.senders_D.zero_()


@tcs.register_scheme("Fading-TopK", phi_global=None, phi_local=1e-2)
class FadingTopK(tcs.TopK):
    client_type, server_type = FadingClient, SendersServer
