"""Epochs of the real run, split into their parts, against the floor: the backbone's own passes on ready tensors.

The floor is measured after every batch, in the same process, so that whatever slows the machine slows both. Ratio (a)
is to all passes of the algorithm; ratio (b) to forward and backward of one view of every image alone.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from material import digits_file, resnet18
from measure import RUN_FLAGS, Found, Limit, Setting, Stopwatch, timed
from torch import Tensor, nn

from cdc_plugin import pipeline
from cdc_plugin.data.images import ImageSet
from cdc_plugin.models import heads
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.training import batches, train
from cdc_plugin.training import refiner as engine
from cdc_plugin.training.refiner import Refiner
from cdc_plugin.training.request import configure

EPOCH, NO_GRADIENT, FORWARD, BACKWARD, HEADS = "rest", "forwards without gradient", "forward", "backward", "heads"
BACKBONE = (NO_GRADIENT, FORWARD, BACKWARD)
EVALUATION, SAVING, FLOOR = "evaluation", "saving", "floor"
STAGES = ("images and features", "initialisation", "final evaluation and report")
EPOCHS = 2  # after the first of which some images are looked at, as after two of a longer run's epochs
MOST_TIMES_THE_FLOOR, MOST_BESIDE_THE_BACKBONE = 1.25, 0.10


def epoch(setting: Setting, batch: int = 1000, count: int = 2) -> Found:
    """An epoch of a ResNet-18 at 32 px, B = 1000, B_s = 500, K = 500; or of the backbone and images given."""
    if setting.quick:
        batch, count = batch // 5, count + 1
    watch, floor = _run(setting, batch, count, resnet18(), ())
    found, rows = watch.of(EPOCH), _rows(watch)
    whole, passes = sum(found.values()), floor["passes"]
    beside = 1 - sum(found.get(name, 0.0) for name in BACKBONE) / whole
    rows[f"all of {EPOCHS} epochs"] = {"seconds": whole, "share": 1.0}
    rows["floor (a): passes of the algorithm"] = {"seconds": passes, "share": passes / whole}
    rows["floor (b): forward and backward alone"] = {"seconds": floor["once"], "share": floor["once"] / whole}
    rows["epoch / floor"] = {"(a)": whole / passes, "(b)": whole / floor["once"]}
    rows |= {f"once a run: {stage}": {"seconds": sum(watch.of(stage).values())} for stage in STAGES}
    what = setting.backbone or "ResNet-18 (random weights), 32 px"
    title = f"epoch: {what}, {setting.data or 'digits'}, B = {batch}, {count} batches {' '.join(setting.words)}"
    limits = [
        Limit("epoch: times the passes of the algorithm (a)", whole / passes, MOST_TIMES_THE_FLOOR),
        Limit("epoch: times forward and backward alone (b)", whole / floor["once"], MOST_TIMES_THE_FLOOR),
        Limit("epoch: share that is not the backbone's own", beside, MOST_BESIDE_THE_BACKBONE),
    ]
    return Found(title, rows, limits)


def frozen_epoch(setting: Setting, batch: int = 1000, count: int = 5) -> Found:
    """An epoch that trains only the heads, on cached features of a frozen backbone; there is no floor."""
    count = 1 if setting.quick else count
    watch, _ = _run(setting, batch, count, resnet18(16), ("freeze_backbone=true", "frozen_views=1"))
    return Found(f"frozen epoch: 128 features, B = {batch}, {count} batches", _rows(watch))


def _run(
    setting: Setting, batch: int, count: int, backbone: Backbone, words: tuple[str, ...]
) -> tuple[Stopwatch, dict[str, float]]:
    """A run under the stopwatch; the floor in seconds beside it."""
    watch, floor = Stopwatch(setting.device, whole=(EVALUATION, FLOOR)), _Floor(setting.device)
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, Any] = RUN_FLAGS | {
            "data": setting.data or str(digits_file(Path(folder), batch * count)),
            "backbone": setting.backbone or "<ResNet-18>",
            "out": str(Path(folder) / "run"),
            "device": setting.device,
            "epochs": EPOCHS,
            "batch_size": batch,
            "sub_batch_size": batch // 2,
            "mini_clusters": batch // 2,
        }
        config = configure(None, flags, (*words, *setting.words))
        with _instruments(watch, floor):
            pipeline.run(config, module=None if setting.backbone else backbone)
    return watch, floor.seconds


@contextlib.contextmanager
def _instruments(watch: Stopwatch, floor: _Floor) -> Iterator[None]:
    """Every part of a run under the stopwatch, from outside: nothing in the package knows of it."""
    backward_of: list[str] = []  # what the next backward pass is of

    def pass_of(backbone: Backbone, images: Tensor) -> str:
        if watch.place == (EPOCH, EPOCH):
            floor.note(backbone.module, images)
        if not torch.is_grad_enabled():
            return NO_GRADIENT
        backward_of[:] = [BACKWARD]
        return FORWARD

    def backward_section(*_: Any) -> str:
        return backward_of.pop() if backward_of else HEADS

    train_batch = Refiner.train_batch

    def with_floor(refiner: Refiner, views: Any, *others: Any) -> Any:
        with timed(watch, [(type(refiner.select), "__call__", "selection")]):
            answer = train_batch(refiner, views, *others)
        with watch.section(FLOOR):
            floor.measure(len(views.rows))
        return answer

    places = [
        (pipeline, "prepare", STAGES[0]),
        (pipeline, "initialise", STAGES[1]),
        (Refiner, "fit", EPOCH),
        (pipeline, "finish_run", STAGES[2]),
        (ImageSet, "batch", "reading"),
        *((batches, f"{view}_view", "views") for view in ("plain", "weak", "strong")),
        (batches, "channels_last", "views"),
        (engine, "find_mini_clusters", "k-means"),
        (engine, "mini_cluster_targets", "targets"),
        (Backbone, "forward", pass_of),
        (torch.Tensor, "backward", backward_section),
        (heads.LayeredHead, "forward", HEADS),
        (torch.optim.Adam, "step", "optimisers"),
        (train, "predict_snapshot", EVALUATION),
        (train, "save_run", SAVING),
    ]
    with patch.object(Refiner, "train_batch", with_floor), timed(watch, places):
        yield
    watch.seconds.pop((EPOCH, FLOOR), None)


class _Floor:
    """Repeats the backbone's passes of a batch on a copy of it: same tensors, same modes, nothing else."""

    def __init__(self, device: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._watch, self._device = Stopwatch(device), torch.device(device)
        self._copy: nn.Module | None = None
        self._passes: list[tuple[Tensor, bool, list[bool], bool]] = []

    def note(self, network: nn.Module, images: Tensor) -> None:
        if self._copy is None:
            self._copy = copy.deepcopy(network)
        modes = [module.training for module in network.modules()]
        mixed = torch.is_autocast_enabled(self._device.type)
        self._passes.append((images.detach(), torch.is_grad_enabled(), modes, mixed))

    def measure(self, batch: int) -> None:
        """The passes since the last call; ``batch`` images, for one forward and backward of each."""
        trained = 0
        for images, gradient, modes, mixed in self._passes:
            seconds = self._pass(images, gradient, modes, mixed)
            self.seconds["passes"] += seconds
            if gradient:
                trained += len(images)
                self.seconds["once"] += seconds
        # A run that trains on some images only: the others, too, have a part in floor (b).
        shown = next((known for known in self._passes if known[1]), None)
        while shown is not None and trained < batch:
            images = shown[0][: batch - trained]
            self.seconds["once"] += self._pass(images, *shown[1:])
            trained += len(images)
        self._passes.clear()

    def _pass(self, images: Tensor, gradient: bool, modes: list[bool], mixed: bool) -> float:
        assert self._copy is not None
        for module, training in zip(self._copy.modules(), modes, strict=True):
            module.training = training
        with self._watch.section("pass"), torch.set_grad_enabled(gradient):
            with torch.autocast(self._device.type, torch.get_autocast_dtype(self._device.type), enabled=mixed):
                features = self._copy(images)
            if gradient:
                features.backward(torch.ones_like(features))
        self._copy.zero_grad(set_to_none=True)
        return self._watch.seconds.pop(("pass", "pass"))


def _rows(watch: Stopwatch) -> dict[str, dict[str, float]]:
    """The parts of the epochs, longest first."""
    found = sorted(watch.of(EPOCH).items(), key=lambda item: -item[1])
    return {name: {"seconds": seconds, "share": seconds / sum(dict(found).values())} for name, seconds in found}
