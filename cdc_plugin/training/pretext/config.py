"""Say what the pretext stage is to do: its settings, the recipes beneath them, and what follows from the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cdc_plugin.config.load import load_config
from cdc_plugin.config.recipes import find_recipe, recipe_folder
from cdc_plugin.config.schema import PRECISIONS, setting
from cdc_plugin.errors import ConfigError, DataError, option

TITLES = {"mocov2": "MoCo-v2", "simsiam": "SimSiam", "byol": "BYOL"}
EMA = {"mocov2": (0.99, 0.999), "byol": (0.996, 1.0)}  # the ends are those of the released settings
PAPER_QUEUE = 32_768
LAPTOP_IMAGES = 50_000  # below, the laptop recipes are the default
IMAGES_SEEN = 300_000  # images times epochs of a run without a given length
BLUR_FROM = 64  # pixels; the paper blurs images of 64 px and more, not those of 32
BLUR = {"byol": [1.0, 0.1]}  # shares of the first and of the second views; of other methods a half of both
FEWEST = 32  # images
SHARE: dict[str, Any] = {"at_least": 0, "at_most": 1}  # limits of a setting


@dataclass
class PretrainConfig:
    """The request for a run of the pretext stage; None means "choose for me". The defaults are the paper's."""

    RECIPES: ClassVar[str] = "pretrain"

    method: str = setting("mocov2", "mocov2, simsiam or byol", choices=tuple(TITLES), metavar="NAME")
    data: str | None = setting(None, "folder, .npz, .npy, tar shards, hf:NAME:SPLIT or a name", metavar="PATH_OR_NAME")
    data_root: str | None = setting(None, "where named data sets are", auto="$CDC_DATA, else data")
    out: str | None = setting(None, "result folder", auto="a new one below cdc-runs", metavar="DIR")

    arch: str = setting(
        "resnet34", "small, resnet18, resnet34, resnet50 or a timm model", auto="from the recipe", metavar="NAME"
    )
    hidden: int = setting(4096, "width inside the projector", at_least=1)
    projection: int = setting(256, "width of the embedding", at_least=2)
    predictor: int | None = setting(
        None, "width inside the predictor", auto="the projector's; simsiam: a quarter of the embedding", at_least=1
    )
    output_norm: bool = setting(False, "BatchNorm at the end of byol's heads, which short runs need")
    symmetric: bool = setting(True, "MoCo-v2: both views ask and answer, at twice the work per step")
    queue: int | None = setting(
        None, "earlier keys that MoCo-v2 contrasts with; fewer than there are images", auto="the paper's", at_least=1
    )
    temperature: float = setting(0.2, "of MoCo-v2", at_least=1e-3, at_most=10)
    ema: float | None = setting(
        None, "share that the momentum network keeps of itself per step, at first", auto="the paper's", **SHARE
    )
    ema_end: float | None = setting(
        None, "the same at the end, in between by a cosine", auto="the released code's", **SHARE
    )

    epochs: int | None = setting(
        None, "epochs of training", auto="about 300,000 images seen, 20 to 200 epochs", at_least=1, metavar="N"
    )
    batch_size: int = setting(256, "images per step", at_least=8)
    lr: float = setting(0.5, "learning rate for a batch of 256, in proportion for others", at_least=1e-6, at_most=100)
    warmup_epochs: int | None = setting(
        None, "epochs in which the rate rises; at most a quarter of them", auto="a twentieth of the epochs", at_least=0
    )
    optimizer: str | None = setting(None, "sgd or lars", auto="lars for byol, else sgd", choices=("sgd", "lars"))
    weight_decay: float = setting(1e-4, "decay of the weights", **SHARE)

    input_size: int | None = setting(
        None, "side of the images, in pixels", auto="small images as they are, others 224 or largest_size", at_least=8
    )
    largest_size: int = setting(224, "largest side that is chosen for input_size", at_least=8)
    mean: list[float] | None = setting(None, "mean of every channel", auto="that of the images", length=3)
    std: list[float] | None = setting(
        None, "standard deviation of every channel", auto="that of the images", above=0, length=3
    )
    flip: bool | None = setting(None, "mirror left and right", auto="except for the digits")
    crop_scale: float = setting(0.2, "smallest share of the area that random crops keep", above=0, at_most=1)
    jitter: list[float] = setting(
        [0.4, 0.4, 0.4, 0.1], "largest change of brightness, contrast, saturation and hue", **SHARE, length=4
    )
    jitter_share: float = setting(0.8, "share of the views with other colours", **SHARE)
    grayscale: float = setting(0.2, "share of the views without colours", **SHARE)
    blur: list[float] | None = setting(
        None,
        "shares of the first and of the second views that are blurred",
        auto="from 64 px on [0.5, 0.5], of byol [1.0, 0.1], else none",
        **SHARE,
        length=2,
    )
    solarize: float = setting(0.0, "share of the second views whose bright pixels are inverted, as byol's", **SHARE)

    seed: int = setting(0, "seed of all random numbers", metavar="S")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps", metavar="D")
    precision: str = setting(
        "auto", "of the networks: auto is bfloat16 on GPUs that have it, else float32", choices=PRECISIONS
    )
    save_every: int = setting(1, "epochs between two states to resume from", at_least=1)


@dataclass
class ResolvedPretrainConfig(PretrainConfig):
    """The settings a run uses, as in its config.yaml; None stays only for what its method has no use for."""

    epochs: int = 0
    warmup_epochs: int = 0
    optimizer: str = "sgd"
    input_size: int = 1
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    flip: bool = True
    blur: list[float] = field(default_factory=list)


def load_pretrain_config(
    recipe: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    infer: Callable[[PretrainConfig], Mapping[str, Any]] | None = None,
) -> PretrainConfig:
    """Return settings as `load_config` does, above what ``infer`` says of the data unless a shipped recipe is asked."""
    shipped = recipe is not None and find_recipe(recipe, "pretrain").parent == recipe_folder("pretrain")
    config = load_config(recipe, flags, overrides, schema=PretrainConfig)
    if infer is not None and not shipped:
        config = load_config(recipe, flags, overrides, infer(config), schema=PretrainConfig)
    if shipped and (stated := load_config(recipe, schema=PretrainConfig).method) != config.method:
        other = str(recipe).replace(stated, config.method)
        hint = f", or take {option('recipe', other)}" if other != str(recipe) else ""
        raise ConfigError(f"recipe {recipe} is for {stated}, found method {config.method}; leave the method out{hint}")
    return config


def default_recipe(method: str, image_count: int) -> str:
    """Return the name of the shipped recipe for a method and the size of the data.

    >>> default_recipe("byol", 1797)
    'laptop-byol'
    """
    return f"{'laptop' if image_count < LAPTOP_IMAGES else 'paper'}-{method}"


def resolve(request: PretrainConfig, image_count: int, input_size: int) -> ResolvedPretrainConfig:
    """Put a value in place of every None that depends on the data, and cut what is too large for them."""
    if image_count < FEWEST:
        raise DataError(f"{request.data} has {image_count} readable images; a pretext task needs at least {FEWEST}")
    epochs, warmup, method = request.epochs, request.warmup_epochs, request.method
    if epochs is None:
        epochs = min(200, max(20, round(IMAGES_SEEN / image_count)))
    if warmup is None:
        warmup = max(1, round(epochs / 20))
    decided: dict[str, Any] = {
        "epochs": epochs,
        "warmup_epochs": min(warmup, epochs // 4),
        "batch_size": min(request.batch_size, image_count),
        "optimizer": request.optimizer or ("lars" if method == "byol" else "sgd"),
        "input_size": input_size,
        "mean": request.mean or [],
        "std": request.std or [],
        "flip": request.data != "digits" if request.flip is None else request.flip,
        "blur": request.blur or (BLUR.get(method, [0.5, 0.5]) if input_size >= BLUR_FROM else [0.0, 0.0]),
    }
    if method == "mocov2":
        queue = PAPER_QUEUE if request.queue is None else request.queue
        # A queue as large as the set would hold an earlier key of the very image that is asked for.
        decided["queue"] = queue if queue < image_count else image_count // 2
    else:
        narrow = max(8, request.projection // 4)
        decided["predictor"] = request.predictor or (narrow if method == "simsiam" else request.hidden)
    if method in EMA:
        first, last = EMA[method]
        decided["ema"] = ema = first if request.ema is None else request.ema
        decided["ema_end"] = max(ema, last) if request.ema_end is None else request.ema_end
    return ResolvedPretrainConfig(**{**vars(request), **decided})
