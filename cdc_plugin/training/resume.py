"""Resume a run from the state of its last finished epoch; the checkpoint it began with is no longer needed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from cdc_plugin.config.load import load_config
from cdc_plugin.config.resolve import Facts, ResolvedConfig, resolve
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet, digest_image_list
from cdc_plugin.errors import ConfigError, DataError, OutputError, option
from cdc_plugin.models.architectures import build
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import build_head
from cdc_plugin.training.prepare import check_processes, open_data
from cdc_plugin.training.progress import log
from cdc_plugin.training.run_folder import CONFIG, KEPT, STATE, Run
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.trackers import make_trackers

Config = TypeVar("Config")
# Settings a resumed run may change; those that config.yaml may not state are the request's own.
CHANGEABLE = ("out", "device", "augment", "from_recipe", "track", "on_collapse", "trust_checkpoint", "partial_weights")


def resume_run(
    request: RefineConfig, folder: Path, state: dict[str, Any], module: nn.Module | None, data: Any, runtime: Runtime
) -> Run:
    """Return the run as it was after its last finished epoch."""
    needed = {"refiner", "backbone", "heads", "frozen", "digest", *KEPT}
    if not isinstance(state, dict) or needed - state.keys() or not isinstance(state["backbone"], dict):
        raise OutputError(f"{folder / STATE} is not the state of a run; start again with {option('overwrite')}")
    distributed = runtime.distributed
    stored = ResolvedConfig(**vars(distributed.broadcast_from_main(lambda: load_config(folder / CONFIG))))
    track = request.track or []
    make_trackers(track)  # refuses those that are not installed here
    settings = dataclasses.replace(stored, device=request.device, track=track, on_collapse=request.on_collapse)
    runtime = dataclasses.replace(runtime, precision=settings.precision)
    record = state["backbone"]
    if record["spec"] is not None:
        network, _ = build(record["spec"])
    elif isinstance(module, Backbone):
        network = module.module
    else:
        raise ConfigError(f"{folder} was started with a module of your own; pass it again to resume")
    backbone = Backbone(network, **record)
    backbone.place(runtime.device, settings.compile, not settings.freeze_backbone)

    def open_again() -> ImageSet:
        check_processes(settings, distributed.size)
        images = open_data(settings, backbone, data, settings.clusters, runtime)

        def resolve_again(wanted: RefineConfig) -> ResolvedConfig:
            size = wanted.input_size or stored.input_size
            return resolve(wanted, Facts(len(images), size, stored.mean, stored.std, (stored.clusters,)))

        check_resume_settings(request, stored, resolve_again, folder)
        # The digest of a folder depends on times of change: a copy on another machine is compared with the main one's.
        if distributed.main and images.digest != state["digest"]:
            raise DataError(f"the images of {settings.data} are not those that {folder} was started with")
        return images

    images = distributed.raise_together(open_again)
    if distributed.size > 1:
        distributed.check_same_images(digest_image_list(images), len(images))
    heads = [build_head(state["heads"], backbone.feature_dim, str(folder)) for _ in range(2)]
    log.info("resuming after epoch %d", state["refiner"]["epoch"])
    if settings.freeze_backbone:
        backbone.module.load_state_dict(state["frozen"])
    kept = {name: state[name] for name in KEPT}
    return Run(settings, folder, runtime, images, Clusterer(backbone, heads[0], heads[1]), **kept, state=state)


def check_resume_settings(
    request: Config, stored: Config, resolve_again: Callable[[Config], Config], folder: Path
) -> None:
    """Refuse to resume with other settings: that would give a run that no command describes."""
    default = vars(type(request)())
    free = {*CHANGEABLE, *getattr(request, "from_recipe", ())}
    asked = {name: value for name, value in vars(request).items() if name not in free and value != default[name]}
    # Sizes beyond the data were cut when the run began; the same command must be accepted again.
    wanted = resolve_again(dataclasses.replace(stored, **asked))  # type: ignore[type-var]
    for name, value in asked.items():
        if getattr(wanted, name) != getattr(stored, name):
            raise ConfigError(
                f"{folder} was started with {name}={getattr(stored, name)}, but {name}={value} is asked for now; "
                "resume without it, or start another run in its own folder"
            )
