"""What a run of the pretext stage is made of: recipe < flags < key=value; ``None`` means "choose for me".

Where no shipped recipe is named, the one for the method and the size of the data lies beneath. `resolve` puts a
value in place of every None once the data are known, and that is what ``config.yaml`` of the result holds.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdc_plugin.config.load import _refuse_unknown_keys
from cdc_plugin.config.recipes import recipe_folder
from cdc_plugin.config.schema import PRECISIONS, batch_sizes
from cdc_plugin.errors import UserError


@dataclass
class PretrainConfig:
    """One run of the pretext stage; the defaults are the paper's (appendix, "Representation Learning").

    What a method has no use for stays None.
    """

    method: str = "mocov2"  # or simsiam, byol
    data: str | None = None  # folder, .npz, .npy or the name of a data set
    data_root: str | None = None  # where named data sets lie
    out: str | None = None  # result folder; None: a new one below cdc-runs

    arch: str = "resnet34"  # or resnet18, resnet50, small, or the name of a timm model
    hidden: int = 4096  # width inside the projector
    projection: int = 256  # width of the embedding
    predictor: int | None = None  # width inside it; None: as the projector's, for simsiam a quarter of the embedding
    output_norm: bool = False  # BatchNorm at the end of byol's heads, which short runs need
    queue: int | None = None  # earlier keys that MoCo-v2 tells the right one from; fewer than there are images
    temperature: float = 0.2  # of MoCo-v2
    ema: float | None = None  # share of its past that the momentum network keeps in a step, at first
    ema_end: float | None = None  # and at last, in between by a cosine

    epochs: int | None = None  # None: about 300,000 images seen, 20 to 200 epochs
    batch_size: int = 256
    lr: float = 0.5  # for a batch of 256, in proportion for others
    warmup_epochs: int | None = None  # None: a twentieth of the epochs; never more than a quarter
    optimizer: str | None = None  # sgd or lars; None: lars for byol
    weight_decay: float = 1e-4

    input_size: int | None = None  # None: small images as they are, others at 224 or largest_size
    largest_size: int = 224
    mean: list[float] | None = None  # None: of the images
    std: list[float] | None = None
    flip: bool | None = None  # mirror left and right; None: except for the digits
    crop_scale: float = 0.2  # least share of the area that random crops keep
    # Largest change of brightness, contrast, saturation and hue.
    jitter: list[float] = field(default_factory=lambda: [0.4, 0.4, 0.4, 0.1])
    jitter_share: float = 0.8  # of the views
    grayscale: float = 0.2  # share of the views
    blur: float | None = None  # share of the views; None: half of them from 64 px on, else none

    seed: int = 0
    device: str = "auto"
    precision: str = "float32"  # or bfloat16 / float16: autocast
    save_every: int = 1  # epochs between two states to resume from


TITLES = {"mocov2": "MoCo-v2", "simsiam": "SimSiam", "byol": "BYOL"}
OPTIMIZERS = ("sgd", "lars")
EMA = {"mocov2": (0.99, 0.999), "byol": (0.996, 1.0)}  # the ends are those of the released settings
PAPER_QUEUE = 32_768
LAPTOP_IMAGES = 50_000  # below, the laptop recipes are the default
IMAGES_SEEN = 300_000  # images times epochs of a run that is not told how long to be
BLUR_FROM = 64  # pixels; the paper blurs images of 64 px and more, not those of 32
FEWEST = 32  # images
LEAST = {"epochs": 1, "warmup_epochs": 0, "save_every": 1, "batch_size": 8, "hidden": 1, "projection": 2, "queue": 1}
LEAST |= {"predictor": 1, "input_size": 8, "largest_size": 8}
BETWEEN = {"lr": (1e-6, 100), "temperature": (1e-3, 10), "weight_decay": (0, 1), "ema": (0, 1), "ema_end": (0, 1)}


def pretrain_recipes() -> Path:
    """The folder of the shipped recipes, beside those of the refinement."""
    return recipe_folder().parent / "pretrain"


def pretrain_recipe_names() -> list[str]:
    return sorted(path.stem for path in pretrain_recipes().glob("*.yaml"))


def pretrain_recipe_summary(name: str) -> str:
    """The comment that opens a recipe."""
    first, *_ = (pretrain_recipes() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return first.lstrip("# ")


def shipped_recipe(recipe: str | Path | None) -> str | None:
    """The name of a shipped recipe, which may be written with its folder; None for anything else."""
    name = str(recipe).removeprefix("pretrain/")
    return name if name in pretrain_recipe_names() else None


def default_recipe(method: str, images: int) -> str:
    return f"{'laptop' if images < LAPTOP_IMAGES else 'paper'}-{method}"


def load_pretrain_config(
    recipe: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    beneath: str | None = None,
) -> PretrainConfig:
    """Defaults, overlaid by a recipe (shipped name or YAML file), by flags and by ``key=value`` words.

    Args:
        beneath: the shipped recipe that lies under all of these; one that is asked for by name stands alone.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    shipped = shipped_recipe(recipe)
    recipes = [recipe] if shipped else [beneath, recipe]
    layers: list[tuple[str, Any]] = [(f"recipe {name}", _read(_path(name))) for name in recipes if name]
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    layers.append(("options", OmegaConf.create(given)))
    words = list(overrides)
    for word in words:
        if "=" not in word:
            raise UserError(f"expected key=value, found {word!r}; for example epochs=30 or flip=false")
    layers.append(("key=value", OmegaConf.from_dotlist(words)))
    config = OmegaConf.structured(PretrainConfig)
    for name, layer in layers:
        if not OmegaConf.is_dict(layer):
            raise UserError(f"{name}: expected keys and values, as in 'epochs: 30'")
        _refuse_unknown_keys(layer, PretrainConfig, name)
        stated = config.method
        try:
            config = OmegaConf.merge(config, layer)
        except OmegaConfBaseException as error:
            first_line = str(error).splitlines()[0]
            raise UserError(f"{name}: {first_line} (key {getattr(error, 'full_key', '') or '?'})") from error
        if shipped and name in ("options", "key=value") and config.method != stated:
            raise UserError(
                f"recipe {shipped} is for {stated}, found method {config.method}; leave --method out, or take "
                f"--recipe {shipped.replace(stated, config.method)}"
            )
    made = OmegaConf.to_object(config)
    assert isinstance(made, PretrainConfig)
    _check(made)
    return made


def resolve(config: PretrainConfig, images: int, input_size: int) -> PretrainConfig:
    """Put a value in place of every None that depends on the data, and cut what is too large for them."""
    if images < FEWEST:
        raise UserError(f"{config.data} has {images} readable images; a pretext task needs at least {FEWEST}")
    epochs = config.epochs
    if epochs is None:
        epochs = min(200, max(20, round(IMAGES_SEEN / images)))
    warmup = max(1, round(epochs / 20)) if config.warmup_epochs is None else config.warmup_epochs
    config = dataclasses.replace(
        config,
        epochs=epochs,
        warmup_epochs=min(warmup, epochs // 4),
        batch_size=min(config.batch_size, images),
        optimizer=config.optimizer or ("lars" if config.method == "byol" else "sgd"),
        input_size=input_size,
        flip=config.data != "digits" if config.flip is None else config.flip,
        blur=(0.5 if input_size >= BLUR_FROM else 0.0) if config.blur is None else config.blur,
    )
    if config.method != "mocov2":
        predictor = max(8, config.projection // 4) if config.method == "simsiam" else config.hidden
        config = dataclasses.replace(config, predictor=config.predictor or predictor)
    if config.method in EMA:
        first, last = EMA[config.method]
        ema = first if config.ema is None else config.ema
        config = dataclasses.replace(
            config, ema=ema, ema_end=max(ema, last) if config.ema_end is None else config.ema_end
        )
    if config.method == "mocov2":
        queue = PAPER_QUEUE if config.queue is None else config.queue
        # A queue as large as the set would hold an earlier key of the very image that is asked for.
        config = dataclasses.replace(config, queue=queue if queue < images else images // 2)
    return config


def steps_per_epoch(config: PretrainConfig, images: int) -> int:
    return len(batch_sizes(images, config.batch_size))


def to_yaml(config: PretrainConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _check(config: PretrainConfig) -> None:
    """Refuse values that no run can use."""
    for name, known in (("method", tuple(TITLES)), ("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
        value = getattr(config, name)
        if value is not None and value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            raise UserError(
                f"{name} is one of {', '.join(known)}; found {value!r}" + (f"; did you mean {near[0]}?" if near else "")
            )
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, found {value}")
    for name, (low, high) in BETWEEN.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise UserError(f"{name} must lie between {low} and {high}, found {value}")


def _path(recipe: str | Path) -> Path:
    name = shipped_recipe(recipe)
    if name is not None:
        return pretrain_recipes() / f"{name}.yaml"
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    near = difflib.get_close_matches(str(recipe), pretrain_recipe_names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no recipe {str(recipe)!r}: {hint}--list-recipes names them, or give a YAML file")


def _read(path: Path) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"cannot read recipe {path}: {error.strerror}") from error
    except Exception as error:  # YAML errors of several libraries
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
