"""Read a run of solo-learn from its ``args.json``: network, data, statistics. Plain JSON; nothing in it is executed."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdc_plugin.config.load import keep_allowed
from cdc_plugin.config.recipes import recipe_names
from cdc_plugin.config.schema import INPUT_FACTS, METHOD_SETTINGS

log = logging.getLogger("cdc_plugin")

NOT_WRITTEN = "<not serializable>"  # what solo-learn writes for values that JSON cannot hold
MISSING = "???"  # OmegaConf's own mark
# Functions of OmegaConf, as ``${oc.env:HOME}``, read the environment or run code: they have a colon inside.
FUNCTION = re.compile(r"\$\{.*:", re.DOTALL)
# References to references could multiply without end: limits on all, on those that share a text, and on the result.
MOST_REFERENCES, MOST_JOINED, DEEPEST, MOST_VALUES = 60, 16, 20, 2_000

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Releases before August 2022 had 0.228 for the first channel.
IMAGENET_OLD: Statistics = ((0.485, 0.456, 0.406), (0.228, 0.224, 0.225))
CIFAR10: Statistics = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
CIFAR100: Statistics = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
# Both CIFARs in the linear evaluation, and in pretraining while the network was called "encoder".
CIFAR_SHARED: Statistics = ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))
STL10: Statistics = ((0.4914, 0.4823, 0.4466), (0.247, 0.243, 0.261))
PRETRAINING = {"cifar10": CIFAR10, "cifar100": CIFAR100, "cifar20": CIFAR100, "stl10": STL10}

CIFARS = ("cifar10", "cifar20", "cifar100")
CLASSES = {"cifar10": 10, "cifar20": 20, "cifar100": 100, "stl10": 10, "imagenet": 1000, "imagenet100": 100}
FORK_CLASSES = {"cifar20": 20, "imagenet10": 10, "imagenetdogs": 15, "tinyimagenet": 200}
# Data sets with a folder name of their own; all others are folders of images.
PLACES = {"cifar10": "cifar-10-batches-py", "cifar20": "cifar-100-python"}
PLACES |= {"cifar100": "cifar-100-python", "stl10": "stl10_binary"}
EVALUATION_SIZES = {**dict.fromkeys(CIFARS, 32), "stl10": 96, "tinyimagenet": 64}


@dataclass(frozen=True)
class RunArgs:
    """A run as its ``args.json`` describes it; None where it does not say."""

    nested: bool  # written by a release from 1.0.6 on; earlier ones wrote a flat file
    linear: bool = False  # a linear evaluation or fine-tuning, which normalises differently
    fork: bool = False  # the version that CDC was developed with, whose CIFAR stem differs
    method: str | None = None
    network: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # of the network
    dataset: str | None = None
    train_path: str | None = None
    data_format: str = "image_folder"
    classes: int | None = None  # as the run counted them; None if its images have no labels
    crop_size: int | None = None
    mean: tuple[float, ...] | None = None  # of the first view; solo-learn uses it for custom data only
    std: tuple[float, ...] | None = None
    cdc: dict[str, Any] = field(default_factory=dict)  # our own configuration, without what concerns the input


def parse_args(content: Any) -> RunArgs | None:
    """Return the run that the content of an ``args.json`` describes; None if another program wrote it.

    >>> content = {"dataset": "cifar10", "method": "byol", "encoder": "resnet18"}
    >>> parse_args(content).network, parse_args({"epochs": 3})
    ('resnet18', None)
    """
    if not isinstance(content, Mapping):
        return None
    args = resolve_references(dict(content))
    nested = all(isinstance(args.get(name), Mapping) for name in ("data", "backbone")) and "dataset" in args["data"]
    if not nested:
        name = _text(args.get("encoder")) or _text(args.get("backbone"))
        if "dataset" not in args or not ("backbone_args" in args or (name and "method" in args)):
            return None
        args |= _nest(args, name)
    data, network, views = args["data"], args["backbone"], args.get("augmentations")
    view = _mapping(views[0]) if isinstance(views, list) and views else {}
    dataset, linear = _text(data.get("dataset")), "pretrained_feature_extractor" in args
    return RunArgs(
        nested=nested,
        linear=linear,
        fork=nested and (bool({"cluster_eval", "process_bar"} & set(args)) or dataset in FORK_CLASSES),
        method=_text(args.get("pretrain_method" if linear else "method")),
        network=_text(network.get("name")),
        kwargs=_mapping(network.get("kwargs")),
        dataset=dataset,
        train_path=_text(data.get("train_path")),
        data_format=_text(data.get("format")) or "image_folder",
        classes=None if data.get("no_labels") is True else _count(data.get("num_classes")),
        crop_size=_count(view.get("crop_size")),
        mean=_channels(view.get("mean")),
        std=_channels(view.get("std")),
        # A recipe has the statistics of its paper; the network has seen those of this run, which the checkpoint states.
        cdc={k: v for k, v in _mapping(args.get("cdc")).items() if v is not None and k not in INPUT_FACTS},
    )


def find_statistics(run: RunArgs, called_encoder: bool) -> Statistics | None:
    """Return the mean and std that the run normalised with; None if ``args.json`` leaves them open."""
    imagenet = IMAGENET if run.nested or (run.std or (0,))[0] == IMAGENET[1][0] else IMAGENET_OLD
    if run.dataset is None or run.dataset not in {*CLASSES, *FORK_CLASSES, "custom"}:
        return (run.mean, run.std) if run.mean and run.std and not run.linear else None
    if run.dataset in CIFARS and (run.linear or called_encoder):
        return CIFAR_SHARED
    if run.linear:
        return STL10 if run.dataset == "stl10" else imagenet
    if run.dataset in PRETRAINING:
        return PRETRAINING[run.dataset]
    if run.dataset in ("imagenet", "imagenet100"):
        return imagenet
    return run.mean or imagenet[0], run.std or imagenet[1]


def find_input_size(run: RunArgs) -> int | None:
    """Return the side of the images that the run trained on."""
    size = run.kwargs.get("img_size")
    size = _count(size[0] if isinstance(size, list | tuple) and size else size)
    if size is not None:
        return size
    if run.linear and run.dataset in {*CLASSES, *FORK_CLASSES, "custom"}:
        return EVALUATION_SIZES.get(run.dataset or "", 224)
    return run.crop_size


def infer_settings(content: Any, folder: Path) -> dict[str, Any]:
    """Return the fields of a `RefineConfig` that the ``args.json`` of a solo-learn run in a folder implies."""
    try:
        run = parse_args(content)
    except (ValueError, RecursionError):  # reading the weights will report it
        run = None
    if run is None:
        return {}
    implied = _find_data(run, folder)
    named = [name for name in ("data",) if run.cdc.get(name) in recipe_names()]
    own = keep_allowed(run.cdc, [*METHOD_SETTINGS, *named], "args.json")
    # Where the run states its images, a recipe of another data set was chosen for its settings only; CIFAR-20 has the
    # files of CIFAR-100.
    place = PLACES.get(str(own.get("data")))
    same_files = place is not None and place == PLACES.get(run.dataset or "")
    if "data" in implied and own.get("data") in recipe_names() and not same_files:
        del own["data"]
    return implied | own


def _find_data(run: RunArgs, folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    place = PLACES.get(run.dataset or "")
    images = _find_folder(run.train_path, folder, place)
    if place is not None:
        fields["data"] = run.dataset
        if images is not None:
            fields["data_root"] = str(images)
    elif images is not None and run.data_format != "h5":
        fields["data"] = str(images)
    clusters = (CLASSES | FORK_CLASSES).get(run.dataset or "", run.classes)
    if clusters is not None and clusters > 1:
        fields["clusters"] = clusters
    return fields


def _find_folder(text: str | None, run_folder: Path, inside: str | None) -> Path | None:
    """Return the folder that the run used, which is relative to where it was started, and that is not recorded.

    A stranger's file must not choose just any folder of this machine: only those below the current folder, and below
    those above the run that are no user's home.
    """
    if text is None:
        return None
    run_folder, home = run_folder.resolve(), Path.home().resolve()
    bases = [Path.cwd(), *(base for base in (run_folder, *run_folder.parents) if base not in (home, *home.parents))]
    present = [base / text for base in bases if os.path.isdir(base / text)]
    outside = [path for path in present if not any(path.resolve().is_relative_to(base) for base in bases)]
    if outside:
        log.warning("args.json names images outside its run, %s; add --data to use them", outside[0])
        present = [path for path in present if path not in outside]
    if inside is not None:
        present.sort(key=lambda place: not (place / inside).is_dir())  # stable: nearest first among equals
    return present[0] if present else None


def _nest(args: dict[str, Any], network: str | None) -> dict[str, Any]:
    """Return the flat arguments of releases before 1.0.6 in the places where newer ones have them."""
    kwargs = _mapping(args.get("backbone_args"))
    cifar = kwargs.pop("cifar", False) is True
    if cifar and (network or "").startswith("swin"):
        kwargs["window_size"] = 4
    dataset, size = _text(args.get("dataset")), args.get("crop_size")  # one size per view
    if size is None:  # 1.0.2 had a size for ImageNet and custom data only, and only without small crops
        stated = None if args.get("multicrop") is True else args.get("size")
        size = EVALUATION_SIZES.get(dataset or "", stated or 224)
    root = _text(args.get("data_dir"))
    joined = str(Path(root) / (_text(args.get("train_dir")) or "")) if root else None
    path = _text(args.get("train_data_path")) or (root if dataset in PLACES else joined)
    kind = "dali" if args.get("dali") is True else args.get("data_format")
    counted = {name: args.get(name) for name in ("no_labels", "num_classes")}
    view = {"crop_size": size[0] if isinstance(size, list) and size else size}
    view |= {name: args.get(name) for name in ("mean", "std")}
    return {
        "data": {"dataset": dataset, "train_path": path, "format": kind, **counted},
        "backbone": {"name": network, "kwargs": kwargs},
        "augmentations": [view],
    }


def resolve_references(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with every reference replaced as OmegaConf does; None where it leads nowhere or is a function.

    >>> resolve_references({"name": "run-${data.size}", "data": {"size": 32}, "home": "${oc.env:HOME}"})
    {'name': 'run-32', 'data': {'size': 32}, 'home': None}
    """
    from omegaconf import OmegaConf

    return _mapping(_read_node(OmegaConf.create(_drop_functions(settings, [])), [MOST_VALUES]))


def _drop_functions(value: Any, references: list[int]) -> Any:
    """Return the settings with ``???`` for what OmegaConf must not or cannot evaluate; count references by text."""
    if isinstance(value, Mapping):
        return {str(key): _drop_functions(item, references) for key, item in value.items()}
    if isinstance(value, list):
        return [_drop_functions(item, references) for item in value]
    if value == NOT_WRITTEN:
        return MISSING
    if not isinstance(value, str) or "${" not in value:
        return value
    joined = sum(count for count in (*references, value.count("${")) if count > 1)
    if FUNCTION.search(value) or len(references) == MOST_REFERENCES or joined > MOST_JOINED:
        return MISSING
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create([value])
    except GrammarParseError:
        return MISSING
    references.append(value.count("${"))
    return value


def _read_node(node: Any, budget: list[int], depth: int = 0) -> Any:
    """Return an OmegaConf node as plain values, as many as the budget allows; None for a missing one."""
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    budget[0] -= 1
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    if depth > DEEPEST or budget[0] < 0:
        return None
    keys: list[Any] = list(range(len(node)) if isinstance(node, ListConfig) else node)
    values = []
    for key in keys:
        try:
            values.append(_read_node(node[key], budget, depth + 1))
        except (OmegaConfBaseException, RecursionError):
            values.append(None)
    return values if isinstance(node, ListConfig) else dict(zip(keys, values, strict=True))


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 100_000 else None


def _channels(value: Any) -> tuple[float, ...] | None:
    """Return three numbers; one number stands for all channels."""
    numbers = value if isinstance(value, list) else [value]
    if len(numbers) not in (1, 3) or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return None
    return tuple(float(n) for n in (numbers * 3 if len(numbers) == 1 else numbers))
