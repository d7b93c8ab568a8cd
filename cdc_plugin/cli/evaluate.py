"""The command ``cdc-evaluate``: arguments to a call of ``evaluate``; figures and paths are printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_plugin.cli import common
from cdc_plugin.errors import ConfigError, join_words

if TYPE_CHECKING:
    from cdc_plugin.evaluation.records import Report

EPILOG = """examples:
  cdc-evaluate --model runs/photos  # on the images it was refined on
  cdc-evaluate --model runs/photos --data new_photos/ --ood textures.npz holiday/
  cdc-evaluate --model scan_model.pth.tar --data cifar10  # an older clustering model, as it is
  cdc-evaluate --compare scan_model.pth.tar runs/retrofit --data cifar10 --out runs/comparison

Labels, where the images have them, are for the report only.
"""
OVERCONFIDENT = 0.05  # confidence this far above the accuracy is worth a warning

BY = {"distance": "distance", "model": "confidence"}


def evaluate_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-evaluate``."""
    parser = common.make_parser(
        "cdc-evaluate",
        "Report on a clustering model as it is: how good its clusters are, and whether its confidence is true. "
        "Writes report.html, report.json and predictions.csv.",
        EPILOG,
    )
    parser.set_defaults(device="auto", labels=True)
    parser.add_argument("--model", metavar="PATH", help="result folder of cdc-refine, or a clustering checkpoint")
    parser.add_argument("--compare", nargs="+", metavar="PATH", default=[], help="models to put side by side")
    parser.add_argument("--names", nargs="+", metavar="NAME", default=[], help="what to call the compared models")
    common.add_settings(parser, "data", help="images (default: those that the model was refined on)")
    common.add_features(parser)
    outside = "images that belong to none of the clusters"
    parser.add_argument("--ood", nargs="+", metavar="PATH_OR_NAME", default=[], help=outside)
    common.add_settings(parser, "labels", help="ignore class sub-folders and label arrays")
    common.add_settings(parser, "format", "arch", "head", "device", "out")
    parser.add_argument("--overwrite", action="store_true", help="replace the report files in --out, no others")
    parser.add_argument("--quiet", action="store_true", help="print the outcome only")
    return parser


def evaluate_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-evaluate``."""
    with common.run_command(evaluate_parser(), arguments) as options:
        models = [options.model, *options.compare] if options.model else options.compare
        if not models:
            raise ConfigError("missing --model, a result folder of cdc-refine or a clustering checkpoint")
        if options.names and not options.compare:
            raise ConfigError("--names are for models that are compared; give these with --compare")
        common.start_log(options.quiet)
        from cdc_plugin.evaluation.evaluate import compare, evaluate

        names = ("data", "features", "ood", "out", "overwrite", "head", "format", "arch", "labels", "device")
        how: dict[str, Any] = {name: getattr(options, name) for name in names}
        reports = compare(models, names=options.names, **how) if options.compare else [evaluate(models[0], **how)]
        print(outcome(reports))
        folder = reports[0].folder
        assert folder is not None
        print(f"report: {(folder.parent if options.compare else folder) / 'report.html'}")


def outcome(reports: list[Report]) -> str:
    """Return the figures of one model or several, what to beware of, and images from elsewhere."""
    from cdc_plugin.report.words import TITLES

    found = [report.metrics for report in reports]
    named = [(f"{metrics['model']['name']}: " if len(found) > 1 else "", metrics) for metrics in found]
    labelled = found[0]["labels"]
    rows = [
        (name + TITLES[key], figures)
        for name, metrics in named
        for key, figures in metrics["after"].items()
        if labelled or key != "kmeans"
    ]
    lines = ["", *_table("in %", ["ACC", "NMI", "ARI", "ECE", "CONF"] if labelled else ["CONF"], rows), ""]
    for number, outside in enumerate(found[0]["outside"]):
        rows = [
            (f"{name}by {BY.get(by, f'confidence, {TITLES[by]}')}", figures)
            for name, metrics in named
            for by, figures in metrics["outside"][number]["scores"].items()
        ]
        title = f"told from {outside['images']} {_noun(found[0])}s of {Path(outside['data']).name}, in %"
        lines += [*_table(title, ["AUROC", "FPR95", "AUPR"], rows), ""]
    for name, metrics in named:
        sorted_into = f"{metrics['images']} {_noun(metrics)}s in {metrics['clusters']} clusters"
        expected = f"expected accuracy {metrics['label_free']['expected_accuracy']:.1%} (mean confidence)"
        lines += [f"{name}{line}" for line in (f"{sorted_into}; {expected}", *cautions(metrics))]
    return "\n".join(lines)


def cautions(metrics: dict[str, Any]) -> list[str]:
    """Return what the user should beware of; over-confidence can be measured only where there are labels."""
    lines = [f"warning: {warning['text']}" for warning in metrics["label_free"].get("warnings", [])]
    classes, clusters = metrics["classes"], metrics["clusters"]
    if classes is not None and classes != clusters:
        counts = f"the {_noun(metrics)}s have {classes} classes, the model {clusters} clusters"
        lines.append(f"note: {counts}; ACC pairs them one to one")
    figures = list(metrics["after"].values())[-1]
    if classes is not None and figures["CONF"] - figures["ACC"] > OVERCONFIDENT:
        stated = f"it states {figures['CONF']:.1%} on average, {figures['ACC']:.1%} of the {_noun(metrics)}s are right"
        model, advice = metrics["model"], ""
        if model["heads"] == 1:  # a refined model, which has two, cannot be helped by refining it
            words = join_words(["--backbone", model["path"], *model["options"], "--data", str(metrics["data"])])
            advice = f"; to calibrate it: cdc-refine {words} --init keep"
        lines.append(f"warning: the model is over-confident: {stated}{advice}")
    if metrics["skipped"]:
        lines.append(common.describe_unreadable(len(metrics["skipped"])))
    return lines


def _noun(metrics: dict[str, Any]) -> str:
    return str(metrics.get("noun", "image"))


def _table(title: str, columns: Sequence[str], rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    width = 2 + max(len(label) for label in (title, *(label for label, _ in rows)))
    cells = [(label, [common.format_percent(figures.get(name)) for name in columns]) for label, figures in rows]
    return common.format_table(title, columns, cells, width, 7)
