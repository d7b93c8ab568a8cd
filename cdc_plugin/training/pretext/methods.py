"""Build the three pretext tasks of the paper, of lightly's parts: two views in, a loss and the embedding out."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training.pretext.config import ResolvedPretrainConfig

SMALL_INPUT = 64  # up to here a 7x7 stem with stride and pool would throw most of the image away
WIDTHS = [64, 128, 256, 512]
RESNETS: dict[str, dict[str, Any]] = {
    "small": {"block": "basic", "depths": [2, 2, 2, 2], "widths": [16, 32, 64, 128]},
    "resnet18": {"block": "basic", "depths": [2, 2, 2, 2], "widths": WIDTHS},
    "resnet34": {"block": "basic", "depths": [3, 4, 6, 3], "widths": WIDTHS},
    "resnet50": {"block": "bottleneck", "depths": [3, 4, 6, 3], "widths": WIDTHS},
}
LARGE_STEM = {"kernel": 7, "stride": 2, "padding": 3, "pool": True}
SMALL_STEM = {"kernel": 3, "stride": 1, "padding": 2, "pool": False}  # the paper's, padding included
FAST_STEM = {"kernel": 3, "stride": 1, "padding": 1, "pool": True}  # the demo's: a quarter of the work
KEY_GROUPS = 4


def spec_of(arch: str, input_size: int) -> dict[str, Any]:
    """Return the spec of a named network for images of this size, for `models.architectures.build`."""
    if arch in RESNETS:
        small_stem = FAST_STEM if arch == "small" else SMALL_STEM
        stem = small_stem if input_size <= SMALL_INPUT else LARGE_STEM
        return {"family": "resnet", **RESNETS[arch], "stem": dict(stem)}
    import timm

    name = arch.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(f"unknown --arch {arch!r}; it is one of {', '.join(RESNETS)}, or the name of a timm model")
    config = timm.get_pretrained_cfg(name)
    # Transformers are built for one image size; convolutional networks take any.
    kwargs = {"img_size": input_size} if config is not None and config.fixed_input_size else {}
    return {"family": "timm", "name": name, "kwargs": kwargs}


def fresh_backbone(arch: str, input_size: int, mean: list[float], std: list[float]) -> Backbone:
    """Return a network with random weights."""
    spec = spec_of(arch, input_size)
    module, feature_dim = build(spec)
    return Backbone(module, feature_dim, mean, std, input_size, spec)


def require_lightly() -> None:
    """Refuse to start, in one line, where the extra is not installed."""
    try:
        import lightly.loss  # noqa: F401
    except ImportError as error:
        raise UserError('cdc-pretrain needs lightly: pip install "cdc-plugin[pretrain]"') from error


class Pretext(nn.Module):
    """A pretext task: the online network that is kept, and whatever else it takes to train it."""

    def __init__(self, backbone: Backbone, projector: nn.Module) -> None:
        super().__init__()
        self.online = nn.Sequential(backbone, projector)

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
        super().__init__(backbone, projector)
        self.momentum = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow(self, ema: float) -> None:
        from lightly.models.utils import update_momentum

        update_momentum(self.online, self.momentum, ema)


class MoCoV2(_WithMomentum):
    """MoCo-v2: tell the key of the other view from a queue of earlier keys (InfoNCE).

    The first view asks and the second answers. If it is symmetric (solo-learn's MoCo-v2+, the paper's), the second
    also asks the first, with a queue of its own, and the loss is the mean of both.
    """

    def __init__(self, backbone: Backbone, config: ResolvedPretrainConfig) -> None:
        from lightly.loss import NTXentLoss

        super().__init__(backbone, _mlp(backbone.feature_dim, config.hidden, config.projection))
        size = (config.queue, config.projection)
        sides = range(2 if config.symmetric else 1)
        self.criteria = nn.ModuleList(NTXentLoss(config.temperature, memory_bank_size=size) for _ in sides)

    @torch.no_grad()
    def prepare(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fill the queues with keys of images.

        lightly fills them with random directions. To flee from these, all images move to one place, from where a run
        on few images is slow to return: after ten epochs on the digits the spread was 0.13, and 0.68 with real keys.
        """
        filled = 0
        for first, second in batches:
            for bank, view in zip(self._banks(), (second, first), strict=False):
                bank(F.normalize(self._keys(view), dim=1), update=True)
            filled += len(second)
            if filled >= len(self._banks()[0].bank):
                return

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        views = (first, second)[: len(self.criteria)]
        queries = [self.online(view).float() for view in views]
        keys = [self._keys(view) for view in (second, first)[: len(views)]]
        losses = [criterion(*pair) for criterion, *pair in zip(self.criteria, queries, keys, strict=True)]
        return torch.stack(losses).mean(), queries[0].detach()

    def _banks(self) -> list[Any]:
        return [criterion.memory_bank for criterion in self.criteria]

    @torch.no_grad()
    def _keys(self, images: Tensor) -> Tensor:
        """Return keys by groups of a shuffled batch, as MoCo's by devices, lest BatchNorm's statistics tell pairs."""
        order = torch.randperm(len(images)).to(images.device)
        keys = torch.cat([self.momentum(group) for group in images[order].tensor_split(KEY_GROUPS)])
        return keys[order.argsort()].float()

    # lightly does not count its queues among what a state dict holds; a resumed run needs them.
    def get_extra_state(self) -> list[dict[str, Tensor]]:
        return [{name: getattr(bank, name) for name in ("bank", "bank_ptr")} for bank in self._banks()]

    def set_extra_state(self, state: Any) -> None:
        for bank, tensors in zip(self._banks(), state, strict=True):
            for name, tensor in tensors.items():
                getattr(bank, name).copy_(tensor)


class SimSiam(Pretext):
    """SimSiam: predict the embedding of the other view, through which no gradient flows.

    The paper speaks of a projector of two layers; its released code has SimSiam's own of three, which ends in a
    BatchNorm. So does this: with two layers and no BatchNorm the loss stood still on the digits.
    """

    def __init__(self, backbone: Backbone, config: ResolvedPretrainConfig) -> None:
        from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

        super().__init__(backbone, SimSiamProjectionHead(backbone.feature_dim, config.hidden, config.projection))
        self.predictor = SimSiamPredictionHead(config.projection, config.predictor, config.projection)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        return _predict_across(self.predictor, one, two, one.detach(), two.detach())


class BYOL(_WithMomentum):
    """BYOL: predict the momentum network's embedding of the other view.

    Without a BatchNorm at the end the embeddings begin around a common mean, which is all that a short run learns to
    predict: after eight epochs on the digits 89 % of them had a nearest neighbour of their class, with it 94.5 %.
    """

    def __init__(self, backbone: Backbone, config: ResolvedPretrainConfig) -> None:
        width, norm = config.projection, config.output_norm
        super().__init__(backbone, _mlp(backbone.feature_dim, config.hidden, width, norm))
        self.predictor = _mlp(width, config.predictor or config.hidden, width, norm)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.online(first), self.online(second)
        with torch.no_grad():
            targets = self.momentum(first), self.momentum(second)
        return _predict_across(self.predictor, one, two, *targets)


def _predict_across(
    predictor: nn.Module, one: Tensor, two: Tensor, target_one: Tensor, target_two: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of predicting each view's target from the other view, and the embedding of the first."""
    alike = F.cosine_similarity(predictor(one).float(), target_two.float()).mean()
    alike = alike + F.cosine_similarity(predictor(two).float(), target_one.float()).mean()
    return -alike / 2, one.detach().float()


def _mlp(inputs: int, hidden: int, outputs: int, output_norm: bool = False) -> nn.Module:
    """Return the paper's head: linear, BatchNorm, ReLU, linear, and one more BatchNorm if asked for."""
    from lightly.models.modules.heads import ProjectionHead

    head = ProjectionHead([(inputs, hidden, nn.BatchNorm1d(hidden), nn.ReLU()), (hidden, outputs, None, None)])
    return nn.Sequential(head, nn.BatchNorm1d(outputs)) if output_norm else head


Method = Callable[[Backbone, ResolvedPretrainConfig], Pretext]
METHODS: dict[str, Method] = {"mocov2": MoCoV2, "simsiam": SimSiam, "byol": BYOL}
