"""A class with compress and decompress: the largest entries of each parameter, in half precision.

    tcs compare notebooks/examples/per_tensor.py

GRACE and other benchmarks have methods in this form. Each client has an instance of its own, and the
server a twin of each, which sees nothing but what was sent. The server's reply has all entries, unless
the class has `downlink = True`.
"""

import math

import torch


class HalfTopK:
    error_feedback = True  # what was not sent is added to the next difference
    densities = (0.01, 0.0025, 0.000625)  # what the class is made with; the first is the usual one

    def __init__(self, density):
        self.density = density

    def compress(self, tensor, name):
        entries = tensor.flatten()
        count = math.ceil(self.density * len(entries))
        positions = entries.abs().topk(count).indices
        return [entries[positions].half(), positions.int()], None

    def decompress(self, tensors, context):
        values, positions = tensors
        entries = torch.zeros(context.shape.numel())
        entries[positions.long()] = values.float()
        return entries.view(context.shape)
