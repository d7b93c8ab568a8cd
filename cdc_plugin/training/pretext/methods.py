"""The three pretext tasks of the paper, made of lightly's parts: two views in, a loss and the embedding out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.errors import UserError
from cdc_plugin.models.backbone import Backbone

KEY_GROUPS = 4


@dataclass(frozen=True)
class Sizes:
    """Widths of the heads, what MoCo-v2 alone needs, and whether BYOL's heads end in a BatchNorm."""

    hidden: int
    projection: int
    predictor: int = 0
    queue: int = 0
    temperature: float = 0.2
    output_norm: bool = False


def require_lightly() -> None:
    """Refuse to start, in one line, where the extra is not installed."""
    try:
        import lightly.loss  # noqa: F401
    except ImportError as error:
        raise UserError("cdc-pretrain needs lightly: pip install 'cdc-plugin[pretrain]'") from error


class Pretext(nn.Module):
    """A pretext task: the online network that is kept, and whatever else it takes to train it."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        super().__init__()
        self.online = nn.Sequential(backbone, projector)

    @property
    def backbone(self) -> Backbone:
        found = self.online[0]
        assert isinstance(found, Backbone)
        return found

    def prepare(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Prepare what depends on the images before the first step."""

    def follow(self, ema: float) -> None:
        """Let the momentum network, where there is one, take over a share 1 - ema of the online one."""

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of two views of the same images, and the embedding (B, D) of the first."""
        raise NotImplementedError


class _WithMomentum(Pretext):
    """A task with a second network that follows the online one slowly and provides the targets."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(backbone, projector)
        self.momentum = copy.deepcopy(self.online)
        deactivate_requires_grad(self.momentum)

    @torch.no_grad()
    def follow(self, ema: float) -> None:
        from lightly.models.utils import update_momentum

        update_momentum(self.online, self.momentum, ema)


class MoCoV2(_WithMomentum):
    """MoCo-v2: tell the key of the other view from a queue of earlier keys (InfoNCE).

    One view asks and one answers, as in MoCo-v2; solo-learn's MoCo-v2+ swaps them and adds both losses, at twice
    the work a step.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NTXentLoss

        super().__init__(backbone, _mlp(backbone.feature_dim, sizes.hidden, sizes.projection))
        self.queue = sizes.queue
        self.criterion = NTXentLoss(sizes.temperature, memory_bank_size=(sizes.queue, sizes.projection))

    @torch.no_grad()
    def prepare(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fill the queue with keys of images.

        lightly fills it with random directions. To flee from these, all images move to one place, from where a run
        on few images is slow to return: after ten epochs on the digits the spread was 0.13, and 0.68 with real keys.
        """
        filled = 0
        for _, second in batches:
            self.criterion.memory_bank(F.normalize(self._keys(second), dim=1), update=True)
            filled += len(second)
            if filled >= self.queue:
                return

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        query = self.online(first).float()
        return self.criterion(query, self._keys(second)), query.detach()

    @torch.no_grad()
    def _keys(self, images: Tensor) -> Tensor:
        """Return keys by groups of a shuffled batch, so that the statistics of BatchNorm do not give pairs away.

        MoCo shuffles between devices; groups do the same on one.
        """
        order = torch.randperm(len(images)).to(images.device)
        keys = torch.cat([self.momentum(group) for group in images[order].tensor_split(KEY_GROUPS)])
        return keys[order.argsort()].float()

    # lightly does not count its queue among what a state dict holds; a resumed run needs it.
    def get_extra_state(self) -> dict[str, Tensor]:
        bank = self.criterion.memory_bank
        return {"bank": bank.bank, "bank_ptr": bank.bank_ptr}

    def set_extra_state(self, state: Any) -> None:
        bank = self.criterion.memory_bank
        bank.bank.copy_(state["bank"])
        bank.bank_ptr.copy_(state["bank_ptr"])


class SimSiam(Pretext):
    """SimSiam: predict the embedding of the other view, through which no gradient flows.

    The paper speaks of a projector of two layers; its released code has SimSiam's own of three, which ends in a
    BatchNorm. So does this: with two layers and no BatchNorm the loss stood still on the digits.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

        super().__init__(backbone, SimSiamProjectionHead(backbone.feature_dim, sizes.hidden, sizes.projection))
        self.predictor = SimSiamPredictionHead(sizes.projection, sizes.predictor, sizes.projection)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        foretold_two, foretold_one = self.predictor(one).float(), self.predictor(two).float()
        loss = self.criterion(foretold_two, two.detach().float()) + self.criterion(foretold_one, one.detach().float())
        return loss / 2, one.detach().float()


class BYOL(_WithMomentum):
    """BYOL: predict the momentum network's embedding of the other view.

    Without a BatchNorm at the end the embeddings begin around a common mean, which is all that a short run learns to
    predict: after eight epochs on the digits 89 % of them had a nearest neighbour of their class, with it 94.5 %.
    """

    def __init__(self, backbone: Backbone, sizes: Sizes) -> None:
        from lightly.loss import NegativeCosineSimilarity

        head = _normalised_mlp if sizes.output_norm else _mlp
        super().__init__(backbone, head(backbone.feature_dim, sizes.hidden, sizes.projection))
        self.predictor = head(sizes.projection, sizes.predictor, sizes.projection)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        with torch.no_grad():
            target_one, target_two = self.momentum(first).float(), self.momentum(second).float()
        loss = self.criterion(self.predictor(one).float(), target_two)
        loss = loss + self.criterion(self.predictor(two).float(), target_one)
        return loss / 2, one.detach().float()


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Return the paper's head: linear, BatchNorm, ReLU, linear."""
    from lightly.models.modules.heads import ProjectionHead

    return ProjectionHead([(inputs, hidden, nn.BatchNorm1d(hidden), nn.ReLU()), (hidden, outputs, None, None)])


def _normalised_mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Return the same head with a BatchNorm after the last layer."""
    return nn.Sequential(_mlp(inputs, hidden, outputs), nn.BatchNorm1d(outputs))


METHODS: dict[str, Callable[[Backbone, Sizes], Pretext]] = {"mocov2": MoCoV2, "simsiam": SimSiam, "byol": BYOL}
