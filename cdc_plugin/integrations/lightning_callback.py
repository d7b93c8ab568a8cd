"""``RefineAtEnd``: a Lightning callback that starts the refinement when ``fit`` ends, for lightly and own modules."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdc_plugin.checkpoints.formats.base import Wanted
from cdc_plugin.checkpoints.infer.batchnorm import NORMALISATIONS
from cdc_plugin.checkpoints.load import load_checkpoint
from cdc_plugin.config.load import load_config
from cdc_plugin.errors import CheckpointError, ConfigError, UserError
from cdc_plugin.evaluation.records import Report
from cdc_plugin.integrations.export.base import compute_same_features
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.pipeline import refine
from cdc_plugin.training.progress import log
from cdc_plugin.training.runtime import stay_alone

LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def find_callback_base() -> type:
    """Return Lightning's ``Callback``; if both libraries are installed, of the one that the program imported."""
    for name in sorted(LIBRARIES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ConfigError("RefineAtEnd needs Lightning; type: pip install lightning")


def wrap_module(
    module: nn.Module, input_size: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Backbone:
    """Return the module as a backbone in evaluation mode; one pass of zeros shows its number of features."""
    weight = next(module.parameters(), torch.zeros(()))
    module.eval()
    with torch.no_grad():
        features = module(torch.zeros(2, 3, input_size, input_size, device=weight.device, dtype=weight.dtype))
    if not isinstance(features, torch.Tensor) or features.ndim < 2:
        raise CheckpointError(f"expected a backbone that returns (N, features), found {type(features).__name__}")
    default_mean, default_std = NORMALISATIONS["imagenet"]
    inferred = [name for name, value in (("mean", mean), ("std", std)) if value is None]
    return Backbone(module, features.shape[1], mean or default_mean, std or default_std, input_size, inferred=inferred)


def identify_network(backbone: Backbone) -> Backbone:
    """Return the same network with its spec, if the weights identify it, so that ``cdc-predict`` can rebuild it."""
    module = backbone.cpu().module
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "weights.pt"
        torch.save({"state_dict": {f"backbone.{name}": value for name, value in module.state_dict().items()}}, path)
        try:
            # An odd depth is no damage here: the features are compared.
            loaded = load_checkpoint(path, wanted=Wanted(input_size=backbone.input_size, partial=True)).backbone
        except UserError:
            return backbone
    if not compute_same_features(backbone, loaded.module):
        return backbone
    mean, std, size = backbone.mean.tolist(), backbone.std.tolist(), backbone.input_size
    return Backbone(loaded.module, loaded.feature_dim, mean, std, size, loaded.spec, backbone.inferred)


class RefineAtEnd:
    """Refine the module's backbone into calibrated clusters when ``fit`` ends; the report is then in ``report``.

    The trained module is not changed. A failure is logged and does not reach the caller of ``fit``.

    Args:
        data: what `cdc_plugin.refine` takes: a folder, an array, a data set.
        clusters, out: as there.
        input_size: side of the square images that the backbone was trained on.
        mean, std: the normalisation in training; by default ImageNet's, checked against the BatchNorm layers.
        attribute: where the backbone is in the Lightning module, such as ``student_backbone`` or ``model.encoder``.
        settings: any other setting of `cdc_plugin.refine`, such as ``recipe``, ``epochs`` or ``overwrite``.
    """

    report: Report | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> RefineAtEnd:
        # The base class is chosen only now: importing this module must not import Lightning.
        base = find_callback_base()
        kind = cls if issubclass(cls, base) else type(cls.__name__, (cls, base), {"__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(
        self,
        data: Any,
        clusters: int | None = None,
        out: str | Path | None = None,
        *,
        input_size: int,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        attribute: str = "backbone",
        **settings: Any,
    ) -> None:
        super().__init__()
        self.data, self.clusters, self.out, self.settings = data, clusters, out, settings
        self.input_size, self.mean, self.std, self.attribute = input_size, mean, std, attribute
        # A wrong setting is refused before the pretraining, not after it.
        flags = {name: value for name, value in settings.items() if name not in ("recipe", "resume", "overwrite")}
        load_config(settings.get("recipe"), {**flags, "clusters": clusters})

    def find_backbone(self, module: Any) -> nn.Module:
        """Return the backbone of the Lightning module; refuse an ``attribute`` that is not a network."""
        backbone = module
        for name in self.attribute.split("."):
            backbone = getattr(backbone, name, None)
        if not isinstance(backbone, nn.Module):
            children = ", ".join(name for name, _ in module.named_children()) or "nothing"
            raise ConfigError(
                f"expected a network as {type(module).__name__}.{self.attribute}, found {backbone!r}; "
                f"it holds {children}: name one of them, as in RefineAtEnd(attribute=...)"
            )
        return backbone

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.find_backbone(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        try:
            module = copy.deepcopy(self.find_backbone(pl_module))
            backbone = identify_network(wrap_module(module, self.input_size, self.mean, self.std))
            with stay_alone():  # the other processes of the pretraining do not come here
                self.report = refine(backbone, self.data, self.clusters, out=self.out, **self.settings)
        except UserError as error:
            log.error("the refinement failed, the pretraining is complete: %s", error)
        except Exception:  # what the caller does after fit, such as saving, must not be lost
            log.exception("the refinement failed, the pretraining is complete")
