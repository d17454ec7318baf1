"""A mask rule: the shared mask follows a running average of the updates, not the last one alone.

    tcs compare notebooks/examples/mask_rule.py

The server and all clients see every update, so that each of them works out the same mask.
"""

import tcs_core as tcs


@tcs.register_scheme("Average-Mask", phi_global=1e-2, phi_local=1e-3)
class AverageMask(tcs.TCS):
    keeps = ("average_D",)  # what a resumed run needs, beside what TCS keeps
    average_D = 0.0

    def observe(self, update_D):
        self.average_D = 0.9 * self.average_D + update_D.abs()
        super().observe(self.average_D)
