"""The command ``cdc-inspect``: a checkpoint's facts, and with images its fitness, on one screen or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cdc_plugin.cli.common import add_settings, make_parser, run_command
from cdc_plugin.errors import CheckpointError

EPILOG = """examples:
  cdc-inspect checkpoint.ckpt
  cdc-inspect trained_models/mocov2plus/1a2b3c/ --data photos/
  cdc-inspect scan_model.pth.tar --data cifar10.npz --json > facts.json

Exit code 0: the checkpoint can be used; 2: it cannot, and the error says why.
"""
LISTED = 12  # names of each kind of weights that do not fit, so that all stays on one screen
VARIANTS = 6  # shown of those that were compared
WIDTH = 13


def inspect_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-inspect``."""
    run_command(_inspect, inspect_parser(), arguments)


def inspect_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-inspect``."""
    parser = make_parser(
        "cdc-inspect", "Say what a checkpoint is, whether it loads whole, and whether it suits a set of images.", EPILOG
    )
    parser.set_defaults(device="auto", trust_checkpoint=False)
    parser.add_argument("checkpoint", metavar="FILE", help="checkpoint, run or result folder, or timm:NAME")
    add_settings(parser, "data", help="images to try it on (at most 1000 are looked at)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    add_settings(parser, "format", "arch", "branch", "head")
    add_settings(parser, "clusters", help="number of clusters of the head that is meant")
    add_settings(parser, "device", "trust_checkpoint")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    from cdc_plugin.evaluation.inspect import inspect
    from cdc_plugin.training.progress import show_progress

    report = inspect(
        options.checkpoint,
        options.data,
        format=options.format,
        arch=options.arch,
        branch=options.branch,
        head=options.head,
        clusters=options.clusters,
        trust_checkpoint=options.trust_checkpoint,
        device=options.device,
        progress=show_progress,
    )
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        lines = facts(report) if report["loadable"] else misfits(report)
        if lines:
            print("\n".join(lines))
    if not report["loadable"]:
        raise CheckpointError(report["error"])


def facts(report: Mapping[str, Any]) -> list[str]:
    """Return the report of a checkpoint that loads, as aligned lines."""
    rows = [*_origin(report), *_input(report), *_head_and_branch(report)]
    lines = [_line(*row) for row in rows]
    if "images" in report:
        lines += ["", *(_line(*row) for row in _images(report["images"]))]
    return lines


def misfits(report: Mapping[str, Any]) -> list[str]:
    """Return the weights that do not fit, each with the nearest name; nothing if that was not the problem."""
    weights = report.get("weights")
    if not weights:
        return []
    counts = weights["counts"]
    lines = [f"{weights['matched']:.1%} of the network's {weights['tensors']} weights match"]
    for kind in ("missing", "unexpected"):
        if counts[kind]:
            lines.append(f"{counts[kind]} {kind}:")
            for entry in weights[kind][:LISTED]:
                lines.append(f"  {entry['name']}" + (f"   (near: {entry['near']})" if entry["near"] else ""))
            lines += _more(counts[kind])
    if counts["misshapen"]:
        lines.append(f"{counts['misshapen']} of another shape:")
        for entry in weights["misshapen"][:LISTED]:
            lines.append(f"  {entry['name']}   found {_shape(entry['found'])}, expected {_shape(entry['expected'])}")
        lines += _more(counts["misshapen"])
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
    given, why = report["input"], report["why"]
    values = {"mean": _numbers(given["mean"]), "std": _numbers(given["std"]), "input_size": f"{given['size']} px"}
    titles = {"mean": "mean", "std": "std", "input_size": "image size"}
    for name, value in values.items():
        doubt = ["inferred"] if name in given["inferred"] else []
        reason = "; ".join(doubt + ([why[name]] if name in why else []))
        yield titles[name], value + (f"   ({reason})" if reason else "")
    stem = [name.removeprefix("stem.") for name in given["inferred"] if name.startswith("stem.")]
    if stem or "stem" in why:
        parts = ([f"inferred: {', '.join(stem)}"] if stem else []) + ([why["stem"]] if "stem" in why else [])
        yield "stem", "; ".join(parts)
    for name, reason in why.items():
        if name not in (*values, "stem", "head", "branch"):
            yield name.replace("_", " ")[:WIDTH], reason


def _head_and_branch(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reason = f"   ({report['why']['head']})" if "head" in report["why"] else ""
    if not report["heads"]:
        yield "heads", f"none{reason}"
    else:
        kinds = sorted({head["kind"] for head in report["heads"]})
        clusters = "/".join(str(head["clusters"]) for head in report["heads"])
        used = ", ".join(map(str, report["heads_used"])) or "none"
        yield "heads", f"{len(report['heads'])} ({', '.join(kinds)}), {clusters} clusters; used: {used}{reason}"
    both = "momentum" in report["branches"] and "online" in report["branches"]
    words = "online and momentum in the file" if both else f"{report['branches'][0]} only"
    reason = f"   ({report['why']['branch']})" if "branch" in report["why"] else ""
    yield "branch", f"{words}; used: {report['branch_used']}{reason}"


def _images(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    skipped = f", {found['skipped']} unreadable" if found["skipped"] else ""
    yield "images", f"{found['count']} looked at from {found['source']}, {found['size']} px{skipped}"
    if found["settled"]:
        yield (
            "settled",
            f"{found['settled']}; mean {_numbers(found['used']['mean'])}, " + (f"std {_numbers(found['used']['std'])}"),
        )
    norm = found["batchnorm"]
    yield "BatchNorm", norm["words"] + ("; mismatch, 0 for agreement:" if norm["variants"] else "")
    # The best ones, and the network itself wherever it stands.
    for variant in [v for place, v in enumerate(norm["variants"]) if place < VARIANTS or not v["changed"]]:
        yield "", f"{variant['mismatch']:6.3f}  {variant['words']}"
    spread = found["features"]
    yield "features", spread["words"]
    yield (
        "",
        (
            f"effective rank {spread['effective_rank']:.1f}, dead {spread['dead_dimensions']:.0%}, "
            f"mean cosine {spread['mean_cosine']:.2f}, spread {spread['spread']:.2f}"
        ),
    )
    near = found["neighbours"]
    yield "neighbours", near["words"]
    yield (
        "",
        (
            f"of {near['neighbours']} nearest images kept by a crop (chance {near['chance']:.0%}); crops that "
            f"find their own image: {near['trained']['found']:.0%} against {near['random']['found']:.0%}"
        ),
    )


def _line(title: str, text: str) -> str:
    return f"{title:{WIDTH}s} {text}".rstrip()


def _numbers(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(set(values)) == 1 else " ".join(f"{value:g}" for value in values)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "a number"


def _more(count: int) -> list[str]:
    return [f"  ... and {count - LISTED} more (--json lists them)"] if count > LISTED else []
