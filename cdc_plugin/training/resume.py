"""Resume a run from the state of its last finished epoch; the checkpoint it began with is no longer needed."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from cdc_plugin.config.load import load_config
from cdc_plugin.config.resolve import Facts, ResolvedConfig, resolve
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.images import ImageSet, digest_image_list
from cdc_plugin.data.side import read_side
from cdc_plugin.errors import COMMAND_LINE, ConfigError, DataError, OutputError, join_words, option
from cdc_plugin.models.architectures import build, skeleton
from cdc_plugin.models.backbone import Backbone
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import build_head
from cdc_plugin.training.features import shared_features
from cdc_plugin.training.prepare import check_processes, open_data, restrict_training
from cdc_plugin.training.progress import log
from cdc_plugin.training.review import freeze
from cdc_plugin.training.run_folder import CONFIG, KEPT, OF_THE_REQUEST, STATE, UNFIXED, Run, fixed_settings
from cdc_plugin.training.runtime import Runtime
from cdc_plugin.training.trackers import make_trackers

Config = TypeVar("Config")
CHANGEABLE = ("augment", *UNFIXED, *OF_THE_REQUEST)  # settings that may be other ones when a run is resumed


def resume_run(
    request: RefineConfig, folder: Path, state: dict[str, Any], module: nn.Module | None, data: Any, runtime: Runtime
) -> Run:
    """Return the run as it was after its last finished epoch."""
    needed = {"refiner", "backbone", "heads", "frozen", "digest", *KEPT}
    if not isinstance(state, dict) or needed - state.keys() or not isinstance(state["backbone"], dict):
        raise OutputError(f"{folder / STATE} is not the state of a run; start again with {option('overwrite')}")
    distributed = runtime.distributed
    stored = ResolvedConfig(**vars(distributed.broadcast_from_main(lambda: load_config(folder / CONFIG))))
    if state.get("settings", fixed_settings(stored)) != fixed_settings(stored):
        raise OutputError(
            f"{folder / CONFIG} was changed since its run was saved; put it back, or start again with "
            f"{option('overwrite')}"
        )
    track = request.track or []
    make_trackers(track)  # refuses those that are not installed here
    settings = dataclasses.replace(stored, device=request.device, track=track, on_collapse=request.on_collapse)
    if state["returned"]:
        settings, _ = freeze(settings)
    runtime = dataclasses.replace(runtime, precision=settings.precision)
    record = state["backbone"]
    _check_sizes(state, folder / STATE)
    if record["spec"] is not None:
        network, _ = build(record["spec"])
    elif isinstance(module, Backbone):
        network = module.module
    else:
        raise ConfigError(f"{folder} was started with a module of your own; pass it again to resume")
    backbone = Backbone(network, **read_side(record))
    restrict_training(backbone, settings)
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
            raise DataError(f"the {images.noun}s of {images.source} are not those that {folder} was started with")
        return images

    images = distributed.raise_together(open_again)
    if distributed.size > 1:
        distributed.check_same_images(digest_image_list(images), len(images))
    heads = [build_head(state["heads"], backbone.feature_dim, str(folder)) for _ in range(2)]
    log.info("resuming after epoch %s", state["refiner"]["epoch"])
    if settings.freeze_backbone:
        backbone.module.load_state_dict(state["frozen"])
    kept = {name: state[name] for name in KEPT}
    features = shared_features(backbone, images, runtime) if settings.freeze_backbone else None
    model = Clusterer(backbone, heads[0], heads[1])
    return Run(settings, folder, runtime, images, model, **kept, state=state, features=features)


def _check_sizes(state: dict[str, Any], file: Path) -> None:
    """Refuse networks larger than the weights that are there: memory is taken for what a file describes."""
    networks = state["refiner"]["networks"]
    with torch.device("meta"):
        head = build_head(state["heads"], state["backbone"]["feature_dim"], str(file))
    pairs: list[tuple[nn.Module, Any]] = [(head, networks["clustering_head"])]
    if state["backbone"]["spec"] is not None:
        pairs.append((skeleton(state["backbone"]["spec"]), state["frozen"] or networks["backbone"]))
    for empty, weights in pairs:
        described = sum(value.numel() for value in empty.state_dict().values())
        if described > sum(value.numel() for value in weights.values()):
            raise OutputError(
                f"{file} lacks weights of the network it describes; start again with {option('overwrite')}"
            )


def explain_resume(request: Any, kept: Path | None) -> str:
    """Return the whole command, or Python call, that continues a run; ``kept`` is its folder, None without a state."""
    program, *typed = COMMAND_LINE.get() or ("" if isinstance(request, RefineConfig) else "cdc-pretrain",)
    if kept is None:
        return f"nothing is kept yet, start again with: {f'{program} {join_words(typed)}' if program else 'this call'}"
    default = type(request)()
    given = {name: getattr(request, name) for name in OF_THE_REQUEST if hasattr(request, name)}
    repeated = {name: value for name, value in given.items() if value != getattr(default, name)}
    words = ["--resume", "--out", str(kept), *(f"{name}={value}".replace("'", "") for name, value in repeated.items())]
    if not program:
        inputs = {name: getattr(request, name) for name in ("backbone", "data")}
        objects = [name if str(value).startswith("<") else repr(str(value)) for name, value in inputs.items()]
        words = [*objects, *(f"{name}={v!r}" for name, v in {"out": str(kept), "resume": True, **repeated}.items())]
    again = f"{program} {join_words(words)}" if program else f"cdc_plugin.refine({', '.join(words)})"
    return f"finished epochs are kept, continue with: {again}"


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
