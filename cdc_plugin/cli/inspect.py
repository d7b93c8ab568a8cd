"""The command ``cdc-inspect``: a checkpoint's facts, and with images its fitness, on one screen or as JSON."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdc_plugin.cli import common
from cdc_plugin.errors import CheckpointError

EPILOG = """examples:
  cdc-inspect checkpoint.ckpt
  cdc-inspect trained_models/mocov2plus/1a2b3c/ --data photos/
  cdc-inspect scan_model.pth.tar --data cifar10.npz --json > facts.json
  cdc-inspect --features clip.npy dino.npy  # embeddings, and whether their rows correspond
  cdc-inspect runs/texts --features new.npy  # whether new ones suit a model

Exit code 0: checkpoint and features can be used; 2: they cannot, and the error says why.
"""
LISTED = 12  # names of each kind of weights that do not fit, so that all stays on one screen
VARIANTS = 6  # shown of those that were compared
WIDTH = 13


def inspect_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-inspect``."""
    about = "Say what a checkpoint is, whether it loads whole, and whether it suits a set of images or features."
    parser = common.make_parser("cdc-inspect", about, EPILOG)
    parser.set_defaults(device="auto", trust_checkpoint=False)
    parser.add_argument("checkpoint", metavar="FILE", nargs="?", help="checkpoint, folder, timm:NAME or hf-hub:NAME")
    common.add_settings(parser, "data", help="images to try it on (at most 1000 are looked at)")
    common.add_features(parser)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    common.add_settings(parser, "format", "arch", "branch", "head", "pool")
    common.add_settings(parser, "clusters", help="number of clusters of the head that is meant")
    common.add_settings(parser, "device", "trust_checkpoint")
    return parser


def inspect_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-inspect``."""
    with common.run_command(inspect_parser(), arguments) as options:
        from cdc_plugin.evaluation.inspect import inspect
        from cdc_plugin.training.progress import show_progress

        names = ("features", "format", "arch", "branch", "head", "clusters", "pool", "trust_checkpoint", "device")
        how = {name: getattr(options, name) for name in names}
        report = inspect(options.checkpoint, options.data, **how, progress=show_progress)
        lines = [*facts(report), *misfits(report)]
        for line in [json.dumps(report, indent=2)] if options.json else lines:
            print(line)
        if not report["loadable"]:
            raise CheckpointError(report["error"])


def facts(report: Mapping[str, Any]) -> list[str]:
    """Return what could be read, as aligned lines."""
    rows: list[tuple[str, str]] = []
    if "network" in report:
        rows += [*_origin(report), *_input(report), *_head_and_branch(report)]
    if "images" in report:
        rows += [("", ""), *_images(report["images"])]
    if "features" in report:
        rows += [*([("", "")] if rows else []), *_features(report["features"])]
    return [f"{title:{WIDTH}s} {text}".rstrip() for title, text in rows]


def misfits(report: Mapping[str, Any]) -> list[str]:
    """Return the weights that do not fit, each with the nearest name; nothing if that was not the problem."""
    weights = report.get("weights", {})
    if "counts" not in weights:
        return []
    lines = [f"{weights['matched']:.1%} of the network's {weights['tensors']} weights match"]
    for kind, title in {"missing": "missing", "unexpected": "unexpected", "misshapen": "of another shape"}.items():
        count = weights["counts"][kind]
        if count:
            lines.append(f"{count} {title}:")
        for entry in weights[kind][:LISTED]:
            note = f"(near: {entry['near']})" if entry.get("near") else ""
            if kind == "misshapen":
                note = f"found {_shape(entry['found'])}, expected {_shape(entry['expected'])}"
            lines.append(f"  {entry['name']}   {note}".rstrip())
        if count > LISTED:
            lines.append(f"  ... and {count - LISTED} more (--json lists them)")
    return lines


def _origin(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    file = report["file"]
    if file is not None:
        beside = f", beside it {', '.join(file['beside'])}" if file["beside"] else ""
        yield "file", f"{file['path']} ({file['bytes'] / 1e6:.1f} MB, {file['tensors']} tensors{beside})"
    epoch = "" if report["epoch"] is None else f", epoch {report['epoch']}"
    yield "written by", f"{report['writer']}{epoch}; read as {report['format']}"
    yield "network", report["network"]
    yield "", f"{report['parameters']:,} parameters, {report['feature_dim']} features"
    weights = report["weights"]
    yield "weights", f"{weights['matched']:.1%} of the backbone's {weights['tensors']} tensors matched"


def _input(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    given, why = report["input"] or {"inferred": []}, report["why"]
    values = {}
    if report["input"]:
        values = {"mean": _numbers(given["mean"]), "std": _numbers(given["std"]), "input_size": f"{given['size']} px"}
    for name, value in values.items():
        reason = "; ".join(filter(None, ["inferred" if name in given["inferred"] else "", why.get(name)]))
        yield name.replace("input_", "image "), value + (f"   ({reason})" if reason else "")
    stem = ", ".join(name.removeprefix("stem.") for name in given["inferred"] if name.startswith("stem."))
    if stem or "stem" in why:
        yield "stem", "; ".join(filter(None, [stem and f"inferred: {stem}", why.get("stem")]))
    for name, reason in why.items():
        if name not in (*values, "stem", "head", "branch"):
            yield name.replace("_", " ")[:WIDTH], reason


def _head_and_branch(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    heads, branches = report["heads"], report["branches"]
    reasons = {name: f"   ({report['why'][name]})" if name in report["why"] else "" for name in ("head", "branch")}
    words = "none"
    if heads:
        kinds, clusters = sorted({head["kind"] for head in heads}), "/".join(str(head["clusters"]) for head in heads)
        used = ", ".join(map(str, report["heads_used"])) or "none"
        words = f"{len(heads)} ({', '.join(kinds)}), {clusters} clusters; used: {used}"
    yield "heads", words + reasons["head"]
    words = "online and momentum in the file" if {"momentum", "online"} <= {*branches} else f"{branches[0]} only"
    yield "branch", f"{words}; used: {report['branch_used']}{reasons['branch']}"


def _images(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    skipped = f", {found['skipped']} unreadable" if found["skipped"] else ""
    yield "images", f"{found['count']} looked at from {found['source']}, {found['size']} px{skipped}"
    yield from (("", f"warning: {text}") for text in found["warnings"])
    if found["settled"]:
        mean, std = (_numbers(found["used"][name]) for name in ("mean", "std"))
        yield "settled", f"{found['settled']}; mean {mean}, std {std}"
    norm = found["batchnorm"]
    yield "BatchNorm", norm["words"] + ("; mismatch, 0 for agreement:" if norm["variants"] else "")
    # The best ones, and the network itself wherever it stands.
    for variant in [v for place, v in enumerate(norm["variants"]) if place < VARIANTS or not v["changed"]]:
        yield "", f"{variant['mismatch']:6.3f}  {variant['words']}"
    yield "features", found["features"]["words"]
    yield "", _spread(found["features"])
    near = found["neighbours"]
    yield "neighbours", near["words"]
    kept = f"of {near['neighbours']} nearest images kept by a crop (chance {near['chance']:.0%})"
    own = f"{near['trained']['found']:.0%} against {near['random']['found']:.0%}"
    yield "", f"{kept}; crops that find their own image: {own}"


def _features(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for space in found["spaces"]:
        size = f"{space['count']:,} of {space['dimension']} numbers, {space['dtype']}"
        yield "features", f"{size}, from {space['source']}"
        odd = f"{space['duplicates']:,} duplicates, {space['constant_columns']:,} constant columns"
        yield "", f"{space['not_finite']:,} not finite, {odd}"
        if space["features"] is not None:
            yield "", f"{space['features']['words']}; {_spread(space['features'])}"
    for space, pair in zip(found["spaces"][1:], found["correspondence"], strict=False):
        shares = "" if pair["kept"] is None else f": {pair['kept']:.0%} of {pair['neighbours']} nearest rows in common"
        chance = "" if pair["chance"] is None else f" (chance {pair['chance']:.0%})"
        yield "rows", f"{space['source']} and the first: {pair['words']}{shares}{chance}"
    model = found.get("model")
    if model is not None:
        words = "the vectors are of the model's dimension"
        if model["outliers"] is not None:
            beyond = f"{model['outliers']:.1%} of {model['looked_at']:,} looked at lie beyond its outlier limit"
            words += f"; {beyond}, {model['expected']:.0%} of its own do"
        yield "suits", words


def _spread(spread: Mapping[str, Any]) -> str:
    rank = f"effective rank {spread['effective_rank']:.1f}, dead {spread['dead_dimensions']:.0%}"
    return f"{rank}, mean cosine {spread['mean_cosine']:.2f}, spread {spread['spread']:.2f}"


def _numbers(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else " ".join(f"{value:g}" for value in values)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "a number"
