"""Take one step on a sub-batch: that of CDC, and those of the ablations (Tab. 3) which it is compared with."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.core.losses import calibration_loss, check_calibration, pseudo_label_loss
from cdc_plugin.core.random_streams import send
from cdc_plugin.core.selection.base import Selection
from cdc_plugin.models.blocks import find_unchanged
from cdc_plugin.training.runtime import Runtime, ShardPlan, plan_shards
from cdc_plugin.training.sync_batchnorm import convert_on_cuda, share_statistics

# Numbers in one forward pass without gradient: every batch of the paper fits whole (500 images at 224 px are
# 75 million), larger ones are cut to bound memory.
LARGEST_PASS = 100_000_000
# Neighbours that `keep_for_training` looks at together. A constant number of them is left out: convolutions on CPUs
# are prepared again for every new number of images, which took 7 % of an epoch. Small sub-batches are trained whole.
BLOCK, SMALLEST_THINNED = 4, 32

# The parts of `Networks` that training changes.
MODULES = ("backbone", "clustering_head", "calibration_head")
STATEFUL = (*MODULES, "clustering_optimizer", "calibration_optimizer", "scaler")


@dataclass(frozen=True)
class Views:
    """One batch: three views of the same B images, or of their features where the backbone is frozen.

    Where several processes train, the views are those of this one's shard (see `plan_shards`). Where ``plain`` is
    ``weak``, one pass through the backbone serves both.
    """

    plain: Tensor
    weak: Tensor
    strong: Tensor | Callable[[Tensor], Tensor]  # or a function that makes those of some of this process's images (n,)
    rows: Tensor  # (B,) numbers of the images in the whole set

    def strong_of(self, own: Tensor) -> Tensor:
        """Return the strong views of some of this process's images (n,)."""
        if isinstance(self.strong, Tensor):
            return self.strong.index_select(0, send(own, self.strong.device))
        return self.strong(own)


@dataclass(frozen=True)
class SubBatch:
    """One step's share of a batch."""

    rows: slice  # of the batch
    trained: Tensor  # (n,) those of them that the clustering head is trained on
    own: Tensor  # which of this process's views are of `trained`, on the CPU
    shards: list[Tensor]  # for each process, the places of its images among `trained`


@dataclass(frozen=True)
class BatchTargets:
    """What a batch is trained towards: pseudo-labels, soft targets (B, C) and the features they belong to."""

    selection: Selection
    soft: Tensor
    features: Tensor
    confidence: float
    mini_clusters: int


class Networks:
    """Backbone, both heads and their optimisers: all that a step changes.

    Where a single head is asked for (Tab. 3, III and IV), it gives the targets, too, and the calibration head is a
    copy of it, renewed after every epoch.
    """

    def __init__(
        self,
        backbone: nn.Module,
        clustering_head: nn.Module,
        calibration_head: nn.Module,
        settings: ResolvedConfig,
        runtime: Runtime,
    ) -> None:
        self.settings, self.runtime = settings, runtime
        device, several = runtime.device, runtime.distributed.size > 1
        self.backbone = backbone.to(device)
        if several and settings.sync_batchnorm:
            self.backbone = convert_on_cuda(self.backbone, device)
        self.clustering_head = clustering_head.to(device)
        self.calibration_head = calibration_head.to(device)
        self.target_head = self.calibration_head if settings.heads == "dual" else self.clustering_head
        groups: list[dict[str, Any]] = [{"params": list(clustering_head.parameters()), "full_lr": settings.lr_heads}]
        self.unchanged = find_unchanged(self.backbone)
        if trained := [parameter for parameter in backbone.parameters() if parameter.requires_grad]:
            groups.append({"params": trained, "full_lr": settings.lr_backbone})
        # Two optimisers: the calibration head never moves the backbone (Sec. 3.1, "stop gradient").
        fused = device.type in ("cpu", "cuda")  # all weights in one kernel
        self.clustering_optimizer = torch.optim.Adam(groups, fused=fused)
        calibration_group = {"params": list(calibration_head.parameters()), "full_lr": settings.lr_heads}
        self.calibration_optimizer = torch.optim.Adam([calibration_group], fused=fused)
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "float16")
        self.calibration = check_calibration(settings.calibration)
        self.shares: Tensor | None = None  # (C,) of the clusters, where they are not to be of equal size
        self.data_parallel: nn.Module = self.backbone
        if several and any(parameter.requires_grad for parameter in self.backbone.parameters()):
            # A static graph: the same weights are used in every step, and some networks have weights without use.
            self.data_parallel = DistributedDataParallel(
                self.backbone, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
            )

    def extract(self, pixels: Tensor, count: int, backbone: nn.Module | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the features of this process's shard of a batch of so many images, and the shards of all processes."""
        distributed = self.runtime.distributed
        plan = plan_shards(count, self.settings.sub_batch_size, distributed.size)
        passes = -(-count * pixels.shape[1:].numel() // LARGEST_PASS)
        sizes = torch.tensor([len(shards[distributed.rank]) for shards in plan.shards])
        groups = [int(group.sum()) for group in sizes.tensor_split(min(passes, len(sizes)))]
        with self.runtime.autocast(), self.share_statistics():
            rows = [(backbone or self.backbone)(part) for part in pixels.split(groups)]
        return upcast(torch.cat(rows)), plan.owned

    def share_statistics(self) -> AbstractContextManager:
        """Return the context in which BatchNorm sees the images of all processes, where that is asked for."""
        distributed = self.runtime.distributed
        return share_statistics(distributed, self.runtime.device) if self.settings.sync_batchnorm else nullcontext()

    def set_learning_rates(self, factor: float) -> None:
        """Set every learning rate to its full value times a factor."""
        for optimizer in (self.clustering_optimizer, self.calibration_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * factor

    def modules(self) -> list[nn.Module]:
        """Return backbone, clustering head and calibration head."""
        return [getattr(self, name) for name in MODULES]

    def use_batch_statistics(self) -> None:
        """Turn dropout off, but leave BatchNorm in train mode, as in the released code.

        With running statistics in its place, which lag behind and mix the views, one seed ended at 98.9 % accuracy
        and another at 89.8 % (digits, 20 and 16 epochs), and Fashion-MNIST lost 5 points in 4 epochs.
        """
        modules = nn.ModuleList(self.modules()).eval()
        for layer in _find_batchnorms(modules):
            layer.train()
        self.rest()

    def rest(self) -> None:
        """Leave what training may not change as it is used later: its BatchNorm layers keep their statistics."""
        for part in self.unchanged:
            part.eval()

    def align(self) -> None:
        """Begin the next epoch alike in all processes, with the copy of a single head renewed."""
        if self.target_head is self.clustering_head:
            self.calibration_head.load_state_dict(self.clustering_head.state_dict())
        for module in self.modules() if self.runtime.distributed.size > 1 else ():
            for tensor in module.state_dict().values():
                self.runtime.distributed.broadcast_(tensor)

    def restart_heads(self, clustering: nn.Module, calibration: nn.Module) -> None:
        """Take the weights of other heads of the same layers; what the optimisers remember of the old ones is gone."""
        fresh = ((self.clustering_head, clustering), (self.calibration_head, calibration))
        for head, start in fresh:
            head.load_state_dict(start.state_dict())
            for parameter in head.parameters():
                for optimizer in (self.clustering_optimizer, self.calibration_optimizer):
                    optimizer.state.pop(parameter, None)
        self.align()

    def state(self) -> dict[str, Any]:
        """Return weights and optimisers, for `restore`."""
        return {name: getattr(self, name).state_dict() for name in STATEFUL}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the weights and optimisers that `state` returned."""
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])

    def are_finite(self) -> bool:
        """Return whether all weights and BatchNorm statistics are finite; other buffers may be infinite: masks."""
        modules = nn.ModuleList(self.modules())
        statistics = [buffer for layer in _find_batchnorms(modules) for buffer in layer.buffers()]
        return bool(torch.stack([tensor.isfinite().all() for tensor in (*modules.parameters(), *statistics)]).all())


def split_batch(trusted: Tensor, plan: ShardPlan, rank: int, fast: bool, device: torch.device) -> Iterator[SubBatch]:
    """Yield the sub-batches of a batch of which ``trusted`` (B,) are selected; `keep_for_training` where ``fast``."""
    first_view = 0
    for rows, shards in zip(plan.sub_batches, plan.shards, strict=True):
        span, own = slice(int(rows[0]), int(rows[-1]) + 1), shards[rank]
        kept = torch.ones_like(rows, dtype=torch.bool)
        # Of a shard of fewer than three images, both could be left out.
        if fast and len(rows) >= SMALLEST_THINNED and min(map(len, shards)) >= 3:
            kept = keep_for_training(trusted[span])
        place = kept.cumsum(dim=0) - 1
        own_views = first_view + torch.arange(len(own))[kept[own]]
        kept_shards = [place[shard[kept[shard]]] for shard in shards]
        yield SubBatch(span, send(rows[kept], device), own_views, kept_shards)
        first_view += len(own)


def keep_for_training(trusted: Tensor) -> Tensor:
    """Return which images (b,) of a sub-batch are trained on: three of four neighbours.

    An image that is not trusted has no part in the pseudo-label loss, it only adds to the statistics of BatchNorm: it
    is left out first. Of four trusted ones the last has to wait for another epoch.
    """
    kept = torch.ones_like(trusted)
    blocks = len(trusted) // BLOCK * BLOCK
    doubtful = ~trusted[:blocks].view(-1, BLOCK)
    doubtful[:, -1] = True
    left_out = doubtful.int().argmax(dim=1) + torch.arange(0, blocks, BLOCK, device=trusted.device)
    kept[left_out] = False
    return kept


Losses = tuple[Tensor, Tensor]
Step = Callable[[Networks, Views, BatchTargets, SubBatch], Losses]


def choose_step(settings: ResolvedConfig) -> Step:
    """Return the step that the settings ask for."""
    if settings.heads == "clu":
        return step_clustering_only
    return step_dual_heads if settings.heads == "dual" and settings.stop_gradient else step_joint_loss


def step_dual_heads(networks: Networks, views: Views, targets: BatchTargets, sub_batch: SubBatch) -> Losses:
    """Move backbone and clustering head by one loss, then the calibration head by the other; return both losses."""
    clustering, _ = step_clustering_only(networks, views, targets, sub_batch)
    calibration = compute_calibration_loss(networks, targets.features[sub_batch.rows], targets.soft[sub_batch.rows])
    networks.calibration_optimizer.zero_grad(set_to_none=True)
    calibration.backward()
    drop_cancelled_gradients(networks.calibration_head)
    networks.calibration_optimizer.step()
    return clustering, calibration.detach()


def step_clustering_only(networks: Networks, views: Views, targets: BatchTargets, sub_batch: SubBatch) -> Losses:
    """Train on pseudo-labels alone (Tab. 3, III)."""
    loss = compute_clustering_loss(networks, views, targets.selection, sub_batch)
    _descend(networks, loss, networks.clustering_optimizer)
    return loss.detach(), torch.zeros_like(loss)


def step_joint_loss(networks: Networks, views: Views, targets: BatchTargets, sub_batch: SubBatch) -> Losses:
    """Train on the sum of both losses: a single head (Tab. 3, IV), or two without stop-gradient (Tab. 3, V)."""
    settings = networks.settings
    clustering = compute_clustering_loss(networks, views, targets.selection, sub_batch)
    features = targets.features
    if not settings.stop_gradient:
        own, shards = networks.extract(views.plain, len(views.rows), networks.data_parallel)  # with gradients
        features = networks.runtime.distributed.gather_with_gradient(own, shards)
    calibration = compute_calibration_loss(networks, features[sub_batch.rows], targets.soft[sub_batch.rows])
    optimizers = [networks.clustering_optimizer]
    if settings.heads == "dual":
        optimizers.append(networks.calibration_optimizer)
    _descend(networks, clustering + calibration, *optimizers)
    return clustering.detach(), calibration.detach()


def compute_clustering_loss(networks: Networks, views: Views, selection: Selection, sub_batch: SubBatch) -> Tensor:
    """Return the pseudo-label loss (Eq. 5) of the strong views of a sub-batch."""
    networks.backbone.train()
    networks.rest()
    networks.clustering_head.train()
    pixels = views.strong_of(sub_batch.own)
    with networks.runtime.autocast():
        with networks.share_statistics():
            own = networks.data_parallel(pixels)
        features = networks.runtime.distributed.gather_with_gradient(own, sub_batch.shards)
        logits = networks.clustering_head(features)
    labels, mask = selection.labels[sub_batch.trained], selection.mask[sub_batch.trained]
    return pseudo_label_loss(upcast(logits), labels, mask)


def compute_calibration_loss(networks: Networks, features: Tensor, targets: Tensor) -> Tensor:
    """Return the loss (Eq. 3) of the head that is calibrated."""
    networks.target_head.train()
    logits, settings = networks.target_head(features), networks.settings
    fit, strength = networks.calibration.loss, settings.calibration_strength
    return calibration_loss(
        logits, targets, settings.entropy_weight, lambda x, goal: fit(x, goal, strength), networks.shares
    )


def _descend(networks: Networks, loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    networks.scaler.scale(loss).backward()
    drop_cancelled_gradients(networks.clustering_head)
    for optimizer in optimizers:
        networks.scaler.step(optimizer)
    networks.scaler.update()


def _find_batchnorms(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def drop_cancelled_gradients(head: nn.Module) -> None:
    """Forget the gradient of a bias in front of BatchNorm: it is rounding, which Adam would blow up to steps."""
    for layer, following in pairwise(head.children()):
        if isinstance(layer, nn.Linear) and isinstance(following, _BatchNorm) and layer.bias is not None:
            layer.bias.grad = None


def upcast(tensor: Tensor) -> Tensor:
    """Return half-precision numbers as float32, others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
