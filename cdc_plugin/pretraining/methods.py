"""The three pretext tasks of the paper, made of lightly's parts: two views in, a loss and the embedding out.

Projector and predictor are the paper's for all three (appendix): linear, BatchNorm, ReLU, linear.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdc_plugin.errors import UserError
from cdc_plugin.model import Backbone


@dataclass(frozen=True)
class Sizes:
    """Widths of the heads, and what MoCo-v2 alone needs: (queue, temperature)."""

    hidden: int
    projection: int
    queue: int = 0
    temperature: float = 0.2


def require_lightly() -> None:
    """Refuse in one line where the extra is not installed."""
    try:
        import lightly.loss  # noqa: F401
    except ImportError as error:
        raise UserError("cdc-pretrain needs lightly: pip install 'cdc-plugin[pretrain]'") from error


class Pretext(nn.Module):
    """A pretext task: the online network that is kept, and whatever else it takes to train it."""

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        super().__init__()
        self.online = nn.Sequential(backbone, _mlp(backbone.feature_dim, sizes.hidden, sizes.projection))

    @property
    def backbone(self) -> Backbone:
        found = self.online[0]
        assert isinstance(found, Backbone)
        return found

    def follow(self, ema: float) -> None:
        """Let the momentum network, where there is one, take over a share 1 - ema of the online one."""

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of two views of the same images, and the embedding (B, D) of the first."""
        raise NotImplementedError


class _WithMomentum(Pretext):
    """Has a second network that follows the online one slowly and gives what is predicted or told apart."""

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(backbone, sizes)
        self.momentum = copy.deepcopy(self.online)
        deactivate_requires_grad(self.momentum)

    @torch.no_grad()
    def follow(self, ema: float) -> None:
        from lightly.models.utils import update_momentum

        update_momentum(self.online, self.momentum, ema)


class MoCoV2(_WithMomentum):
    """MoCo-v2: tell the key of the other view from a queue of earlier keys (InfoNCE).

    One view asks and one answers, as in MoCo-v2; solo-learn's MoCo-v2+ swaps them and adds both losses, at twice
    the work a step. Keys are not shuffled between devices, since there is one device.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NTXentLoss

        super().__init__(backbone, sizes)
        self.criterion = NTXentLoss(sizes.temperature, memory_bank_size=(sizes.queue, sizes.projection))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        query = self.online(first).float()
        with torch.no_grad():
            key = self.momentum(second).float()
        return self.criterion(query, key), query.detach()

    # lightly does not count its queue among what a state dict holds; a resumed run needs it.
    def get_extra_state(self) -> dict[str, Tensor]:
        bank = self.criterion.memory_bank
        return {"bank": bank.bank, "bank_ptr": bank.bank_ptr}

    def set_extra_state(self, state: Any) -> None:
        bank = self.criterion.memory_bank
        bank.bank.copy_(state["bank"])
        bank.bank_ptr.copy_(state["bank_ptr"])


class SimSiam(Pretext):
    """SimSiam: predict the embedding of the other view, through which no gradient flows."""

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NegativeCosineSimilarity

        super().__init__(backbone, sizes)
        self.predictor = _mlp(sizes.projection, sizes.hidden, sizes.projection)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        foretold_two, foretold_one = self.predictor(one).float(), self.predictor(two).float()
        loss = self.criterion(foretold_two, two.detach().float()) + self.criterion(foretold_one, one.detach().float())
        return loss / 2, one.detach().float()


class BYOL(_WithMomentum):
    """BYOL: predict the momentum network's embedding of the other view."""

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NegativeCosineSimilarity

        super().__init__(backbone, sizes)
        self.predictor = _mlp(sizes.projection, sizes.hidden, sizes.projection)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        with torch.no_grad():
            target_one, target_two = self.momentum(first).float(), self.momentum(second).float()
        loss = self.criterion(self.predictor(one).float(), target_two)
        loss = loss + self.criterion(self.predictor(two).float(), target_one)
        return loss / 2, one.detach().float()


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    from lightly.models.modules.heads import ProjectionHead

    return ProjectionHead([(inputs, hidden, nn.BatchNorm1d(hidden), nn.ReLU()), (hidden, outputs, None, None)])


METHODS: dict[str, type[Pretext]] = {"mocov2": MoCoV2, "simsiam": SimSiam, "byol": BYOL}
