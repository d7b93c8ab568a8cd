"""Run the pretext stage, from images to a folder that ``cdc-refine --backbone`` takes: read `pretrain` first."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.config.load import to_yaml
from cdc_plugin.config.recipes import find_recipe, read_recipe
from cdc_plugin.config.resolve import batch_sizes
from cdc_plugin.core.random_streams import fork_rng, generator
from cdc_plugin.data.atomic import write_text
from cdc_plugin.data.images import ImageSet, describe_source, native_size
from cdc_plugin.data.views import SMALL_SIDE
from cdc_plugin.data.views.pretext import PretextSettings, pretext_view
from cdc_plugin.errors import UserError
from cdc_plugin.models.architectures import describe, skeleton
from cdc_plugin.models.clusterer import write_model
from cdc_plugin.training import run_folder
from cdc_plugin.training.batches import load_ahead
from cdc_plugin.training.prepare import read_images
from cdc_plugin.training.pretext import loop
from cdc_plugin.training.pretext.config import (
    TITLES,
    PretrainConfig,
    ResolvedPretrainConfig,
    default_recipe,
    load_pretrain_config,
    resolve,
)
from cdc_plugin.training.pretext.methods import METHODS, fresh_backbone, require_lightly, spec_of
from cdc_plugin.training.progress import COLLAPSED, PretextProgress, log, log_to, show_progress
from cdc_plugin.training.resume import check_resume_settings, explain_resume
from cdc_plugin.training.runtime import choose_device
from cdc_plugin.training.signals import add_hint

TOOL = "cdc-pretrain"
MEASURED = 10_000  # images whose pixels give mean and std


@dataclass(frozen=True)
class Pretrained:
    """The result of a run: its folder, its settings, one record per epoch, and a description of the network."""

    folder: Path
    config: ResolvedPretrainConfig
    history: list[dict[str, float]]
    network: str

    @property
    def collapsed(self) -> bool:
        return self.history[-1]["spread"] < COLLAPSED


def pretrain(
    recipe: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Pretrained:
    """Train a backbone on images without labels and write it in the package's own format.

    Settings are given as to `load_pretrain_config`; without a recipe, the number of images decides on one.
    """
    words = list(overrides)
    config = load_pretrain_config(recipe, flags, words)
    if config.data is None and not (resume and config.out):
        raise UserError("missing --data; cdc-pretrain --help shows how a run is started")
    require_lightly()
    device = choose_device(config.device)
    folder = run_folder.prepare_folder(config.out, f"pretrain-{Path(config.data or 'run').stem}", resume, overwrite)
    begun = False
    try:
        state = run_folder.read_state(folder) if resume else None
        if state is None and config.data is None:
            raise UserError(f"{folder} has no finished epoch to continue from; give --data to start it")
        with log_to(folder / run_folder.LOG):
            if state is None:
                settings, images = start(load_pretrain_config(recipe, flags, words, infer_recipe), folder)
            else:
                settings, images = restart(config, folder, state)
            begun = True
            return train(settings, images, folder, device, state)
    except KeyboardInterrupt as error:
        begun = begun and (folder / run_folder.STATE).is_file()
        add_hint(error, explain_resume(config, folder if begun else None))
        raise
    finally:
        run_folder.leave_nothing_behind(folder)


def start(request: PretrainConfig, folder: Path) -> tuple[ResolvedPretrainConfig, ImageSet]:
    """Return the settings with everything filled in, and the images."""
    size = request.input_size
    if size is None:
        native = native_size(request.data)
        size = min(native if native is not None and native <= SMALL_SIDE else 224, request.largest_size)
    images = read_images(request.data, size, request.data_root, show_progress)
    config = resolve(request, len(images), size)
    if request.queue not in (None, config.queue):
        log.info("a queue of %d keys, not %d: there are %d images", config.queue, request.queue, len(images))
    mean, std = statistics(images)
    config = dataclasses.replace(config, mean=config.mean or mean, std=config.std or std)
    # Both refuse what cannot be made, before any work is done.
    view_settings(config)
    skeleton(spec_of(config.arch, size))
    run_folder.clear_results(folder)  # only now: a mistake in the inputs must not cost an earlier run's results
    write_text(folder / run_folder.CONFIG, to_yaml(config))
    return config, images


def restart(given: PretrainConfig, folder: Path, state: dict[str, Any]) -> tuple[ResolvedPretrainConfig, ImageSet]:
    """Return settings and images of the run as they were after its last finished epoch."""
    if state.get("tool") != TOOL:
        raise UserError(f"{folder} is not a run of {TOOL}; continue it with cdc-refine --resume --out {folder}")
    stored = ResolvedPretrainConfig(**vars(load_pretrain_config(folder / run_folder.CONFIG)))
    images = read_images(stored.data, stored.input_size, stored.data_root, show_progress)
    if images.digest != state["digest"]:
        raise UserError(f"the images of {stored.data} are not those that {folder} was begun with")

    def resolve_again(wanted: PretrainConfig) -> ResolvedPretrainConfig:
        return resolve(wanted, len(images), wanted.input_size or stored.input_size)

    check_resume_settings(given, stored, resolve_again, folder)
    log.info("continuing after epoch %d", state["trainer"]["epoch"])
    return dataclasses.replace(stored, out=given.out, device=given.device), images


def train(
    config: ResolvedPretrainConfig, images: ImageSet, folder: Path, device: torch.device, state: dict[str, Any] | None
) -> Pretrained:
    """Train the remaining epochs, then write the weights."""
    with fork_rng(generator(config.seed, loop.WEIGHTS), device):
        backbone = fresh_backbone(config.arch, config.input_size, config.mean, config.std)
        task = METHODS[config.method](backbone, config)
    steps = len(batch_sizes(len(images), config.batch_size))
    trainer = loop.Pretrainer(task, config, device, steps)
    history: list[dict[str, float]] = []
    if state is not None:
        trainer.restore(state["trainer"])
        history = state["history"]
    network = describe(backbone.spec)
    log.info("%s on %d images of %d px: %s", TITLES[config.method], len(images), config.input_size, network)
    bar = PretextProgress(trainer.epoch, config.epochs, steps, config.method, config.warmup_epochs)
    origin = {
        "tool": TOOL,
        "method": f"{TITLES[config.method]} (lightly {version('lightly')})",
        "data": images.source,
        "data_digest": images.digest,
        "epochs": trainer.epoch,
        "of_epochs": config.epochs,
        "seed": config.seed,
    }

    def after_epoch(stats: dict[str, float]) -> None:
        history.append(bar.record_epoch(stats))
        saved = trainer.epoch % config.save_every == 0 or trainer.epoch == config.epochs
        if saved:
            # The model first: a run can be used before it ends. The state last: what it says is done, is there.
            write_model(folder, backbone, {**origin, "epochs": trainer.epoch})
            run_folder.write_history(folder / run_folder.HISTORY, history)
            kept = {"tool": TOOL, "trainer": trainer.state(), "history": history, "digest": images.digest}
            run_folder.write_state(folder, kept)
        bar.after_epoch(history[-1], saved)

    with contextlib.closing(bar):
        trainer.fit(batches_of(images, config, device), bar.after_batch, after_epoch)
    return Pretrained(folder, config, history, network)


def batches_of(
    images: ImageSet, config: ResolvedPretrainConfig, device: torch.device
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return a function that yields two views of every batch of an epoch; they depend on (seed, epoch, batch) only."""
    first, second = view_settings(config)
    sizes = batch_sizes(len(images), config.batch_size)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(images), generator=generator(config.seed, loop.ORDER, epoch))
        for number, pixels in enumerate(load_ahead(images, order.split(sizes), device)):
            randomness = generator(config.seed, loop.VIEWS, epoch, number)
            yield pretext_view(pixels, first, randomness), pretext_view(pixels, second, randomness)

    return batches


def view_settings(config: ResolvedPretrainConfig) -> tuple[PretextSettings, PretextSettings]:
    """Return the augmentation of the first and of the second view."""
    stated = {item.name: getattr(config, item.name) for item in dataclasses.fields(PretextSettings)}
    first, second = config.blur
    return PretextSettings(**{**stated, "blur": first, "solarize": 0.0}), PretextSettings(**{**stated, "blur": second})


def statistics(images: ImageSet) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of every channel, white being 1; of at most 10,000 images."""
    chosen = torch.linspace(0, len(images) - 1, min(len(images), MEASURED)).long()
    totals = torch.zeros(2, 3, dtype=torch.float64)
    for part in chosen.split(256):
        shares = images.batch(part).double() / 255
        totals += torch.stack([shares.mean(dim=(2, 3)).sum(dim=0), shares.square().mean(dim=(2, 3)).sum(dim=0)])
    mean, square = totals / len(chosen)
    std = (square - mean.square()).clamp(min=0).sqrt()
    if float(std.min()) < 1e-3:
        raise UserError(f"all pixels of {images.source} are alike (standard deviation {float(std.min()):.4f})")
    return [round(value, 4) for value in mean.tolist()], [round(value, 4) for value in std.tolist()]


def infer_recipe(request: PretrainConfig) -> Mapping[str, Any]:
    """Return the shipped recipe that suits the number of images, which are not read, and log its name."""
    count = len(describe_source(request.data, 32, request.data_root, labels=False))
    name = default_recipe(request.method, count)
    log.info("%d images: settings of recipe %s", count, name)
    return read_recipe(find_recipe(name, "pretrain"))
