"""Scale the steps of SGD to the size of the weights: LARS with the limit and the constant of solo-learn's BYOL."""

from collections.abc import Callable
from typing import Any

import torch

TRUST = 0.02  # largest share of its own length that a weight moves by in a step without momentum
TINY = 1e-8


class LARS(torch.optim.SGD):
    """SGD that shortens the gradients of groups with a ``decay`` (their weight decay) where weights are small.

    A step is at most as long as that of SGD. The groups' own ``weight_decay`` stays 0: it is part of what is scaled.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"] if group.get("decay") is not None else ():
                if weight.grad is None:
                    continue
                length, slope = weight.norm(), weight.grad.norm()
                trusted = TRUST * length / (slope + group["decay"] * length + TINY)
                share = (trusted / max(group["lr"], TINY)).clamp(max=1)
                scaled = (weight.grad + group["decay"] * weight) * share
                weight.grad.copy_(torch.where((length > 0) & (slope > 0), scaled, weight.grad))
        return super().step(closure)
