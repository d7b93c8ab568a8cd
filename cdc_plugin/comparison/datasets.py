"""Open a set of images once for all cells: features, initial heads and views, for every process and restart."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.safe_pickle.containers import read_archive
from cdc_plugin.config.resolve import ResolvedConfig, resolve
from cdc_plugin.config.schema import AugmentConfig, RefineConfig
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.data.cache import compute_digest
from cdc_plugin.data.images import ImageSet
from cdc_plugin.errors import OutputError
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.heads import build_head
from cdc_plugin.models.initialise import InitialHeads
from cdc_plugin.training.batches import view_features
from cdc_plugin.training.features import Features, extract_features, hash_inputs
from cdc_plugin.training.prepare import Prepared, check_request, collect_facts, initialise, prepare
from cdc_plugin.training.progress import show_progress
from cdc_plugin.training.request import configure
from cdc_plugin.training.runtime import Runtime, choose_device

# A grid is many runs: unless the user states the epochs, each has this share of those that ``cdc-refine`` would take,
# but no fewer than the least it takes. On the digits CDC was as accurate after 17 epochs as after 28 (99.4 and 99.2 %,
# seed 0); on 5,000 Fashion-MNIST images 6 epochs instead of 10 cost it 0.6 and 4.4 points (two seeds).
SHARE_OF_EPOCHS, LEAST_EPOCHS = 0.6, 10


@dataclass(frozen=True)
class DatasetRequest:
    """One set of images to compare methods on, as a user states it."""

    name: str
    recipe: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)  # of `RefineConfig`: backbone, data, clusters and the like
    overrides: tuple[str, ...] = ()  # ``key=value`` words, for all methods
    outside: tuple[str, ...] = ()  # images that belong to none of the clusters
    module: Any = None  # in place of the flag ``backbone``
    images: Any = None  # in place of the flag ``data``

    def build_config(self, settings: tuple[str, ...] = ()) -> RefineConfig:
        """Return the settings of a method on this set; those of the method come last."""
        return configure(self.recipe, self.flags, [*self.overrides, *settings])


@dataclass(frozen=True)
class OpenedDataset:
    """A set that is ready for cells; ``folder`` holds what they share."""

    request: DatasetRequest
    prepared: Prepared
    folder: Path

    def load_start(self, seed: int) -> tuple[InitialHeads, AugmentConfig]:
        """Return prototype heads and the augmentation that suits them: the same for every method with this seed."""
        path, device = self.folder / f"start-seed{seed}.pt", self.prepared.runtime.device
        prepared = replace(self.prepared, settings=replace(self.prepared.settings, seed=seed, init="prototypes"))

        def compute() -> dict[str, Any]:
            heads, settings = initialise(prepared)
            states = heads.clustering.state_dict(), heads.calibration.state_dict()
            return {
                "spec": heads.clustering.spec,
                "heads": [{name: value.cpu() for name, value in state.items()} for state in states],
                "partition": heads.partition.cpu(),
                "augment": asdict(settings.augment),
            }

        stored = _load_or_compute(path, compute, "spec", "heads", "partition", "augment")
        heads = [build_head(stored["spec"], self.prepared.backbone.feature_dim, str(path)).eval() for _ in range(2)]
        for head, state in zip(heads, stored["heads"], strict=True):
            head.to(device).load_state_dict(state)
        return InitialHeads(heads[0], heads[1], stored["partition"].to(device)), AugmentConfig(**stored["augment"])

    def load_views(self, augment: AugmentConfig) -> Tensor:
        """Return features of the views of a frozen backbone, the same for all methods and for seeds that augment alike.

        A further seed then costs no more than its heads.
        """
        prepared = self.prepared
        settings = replace(prepared.settings, augment=augment)

        def compute() -> dict[str, Tensor]:
            if not settings.frozen_views:
                return {"rows": prepared.features.map(lambda block: block).unsqueeze(1)}
            return {"rows": torch.cat([*view_features(settings, prepared.backbone, prepared.images, prepared.runtime)])}

        return _load_or_compute(self.folder / f"views-{compute_digest([repr(augment)])}.pt", compute, "rows")["rows"]

    def resolve_settings(self, settings: list[str], seed: int, head_clusters: tuple[int, ...]) -> ResolvedConfig:
        """Return the resolved config of a method."""
        prepared = self.prepared
        request = replace(self.request.build_config(tuple(settings)), clusters=prepared.settings.clusters, seed=seed)
        facts = collect_facts(request, prepared.loaded, prepared.backbone, len(prepared.images))
        facts = replace(facts, head_clusters=head_clusters)
        resolved = resolve(request, facts)
        if request.epochs is None:
            usual = resolved.epochs // resolved.rounds
            fewer = max(ceil(SHARE_OF_EPOCHS * usual), min(LEAST_EPOCHS, usual))
            resolved = resolve(replace(request, epochs=fewer), facts)
        return resolved


def open_dataset(request: DatasetRequest, folder: Path) -> OpenedDataset:
    """Open checkpoint and images; read features from ``folder`` if an earlier process left them there."""
    config = request.build_config()
    check_request(config, resume=False)
    folder.mkdir(parents=True, exist_ok=True)

    def extract(backbone: Backbone, images: ImageSet, runtime: Runtime) -> Features:
        path = folder / f"features-{hash_inputs(backbone, images, runtime)}.pt"
        stored = _load_or_compute(path, lambda: {"all": extract_features(backbone, images, runtime)}, "all")
        return Features(stored["all"], len(images))

    runtime = Runtime(choose_device(config.device), config.precision, progress=show_progress)
    return OpenedDataset(request, prepare(config, request.module, request.images, runtime, extract), folder)


def _load_or_compute(path: Path, compute: Callable[[], dict[str, Any]], *names: str) -> dict[str, Any]:
    """Return what ``path`` holds under these names; if the file does not exist, compute and write it first."""
    if not path.is_file():
        content = compute()
        write_atomically(path, lambda temporary: torch.save(content, temporary))
    try:
        content = read_archive(path)  # torch's own reader can be made to run on
        return {name: content[name] for name in names}
    except Exception as error:
        raise OutputError(f"{path} cannot be read; remove it, and it is computed again") from error
