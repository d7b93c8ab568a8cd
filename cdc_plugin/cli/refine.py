"""The command ``cdc-refine``: arguments to settings to a run; the outcome is printed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc_plugin.cli.common import (
    add_no_labels,
    add_quiet,
    add_result_folder,
    add_settings,
    collect_flags,
    describe_unreadable,
    format_percent,
    is_main_process,
    list_recipes,
    make_parser,
    run_command,
    start_log,
)

if TYPE_CHECKING:
    from cdc_plugin.config.schema import RefineConfig
    from cdc_plugin.evaluation.report_record import Report

REFINE_EPILOG = """examples:
  cdc-refine --demo
  cdc-refine --backbone checkpoint.pth --data photos/ --clusters 10
  cdc-refine --backbone moco_r34.pth --data cifar10 --recipe cifar10 --out runs/cifar10
  cdc-refine --backbone big_vit.pth --arch vit_base_patch16_224 --data photos/ --clusters 20 --freeze-backbone
  cdc-refine --backbone solo_learn_run/  # data set, paths and statistics come from its args.json
  cdc-refine --backbone scan_model.pth.tar --data cifar10 --init keep  # retrofit an older clustering model
  cdc-refine --resume --out runs/cifar10
  cdc-refine --recipe digits --backbone b.pt --clusters 10 augment.crop_scale=0.8 lr_backbone=1e-4

Any setting can be given as key=value; --dry-run prints all of them as they would be used.
"""


def refine_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-refine``."""
    run_command(_refine, refine_parser(), arguments, "finished epochs are kept, continue with --resume")


def refine_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-refine``."""
    parser = make_parser(
        "cdc-refine",
        "Turn a pretrained image backbone into clusters whose confidence matches their accuracy, without labels.",
        REFINE_EPILOG,
    )
    what = parser.add_argument_group("what to run on")
    add_settings(what, "backbone", "data", "clusters")
    what.add_argument("--recipe", metavar="NAME_OR_FILE", help="settings to start from (--list-recipes)")
    add_settings(what, "format", "arch", "branch", "head", "trust_checkpoint", "partial_weights")
    add_no_labels(what)

    how = parser.add_argument_group("how")
    add_settings(how, "init", "mini_clusters", "epochs", "freeze_backbone", "seed", "device")
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")

    where = parser.add_argument_group("where the results go")
    add_result_folder(where)
    add_settings(where, "track")

    other = parser.add_argument_group("other")
    other.add_argument("--demo", action="store_true", help="run on the embedded handwritten digits")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--dry-run", action="store_true", help="print resolved settings and plan, and stop")
    add_quiet(other)
    return parser


def _refine(options: argparse.Namespace) -> None:
    from cdc_plugin.config.load import load_config, to_yaml

    if options.list_recipes:
        list_recipes("cdc")
        return
    recipe, flags = options.recipe, collect_flags(options)
    if options.demo:
        from cdc_plugin.config.recipes import demo_settings

        recipe, flags = recipe or "digits", {**demo_settings(), **flags}
    config: RefineConfig = load_config(recipe, flags, options.overrides, _infer)
    if options.dry_run:
        from cdc_plugin.training.plan import plan_run

        resolved, lines = plan_run(config)
        print(to_yaml(resolved), end="")
        print("\n".join(f"# {line}" for line in lines))
        return
    start_log(options.quiet)
    from cdc_plugin.pipeline import run

    report = run(config, resume=options.resume, overwrite=options.overwrite)
    if is_main_process():
        print(outcome(report))


def _infer(config: RefineConfig) -> Mapping[str, Any]:
    """Return what the pretraining run of a backbone says of its data; torch is imported for it only now."""
    if config.backbone is None:
        return {}
    from cdc_plugin.checkpoints.formats.solo_learn.args import read_run_defaults

    return read_run_defaults(config.backbone)


def outcome(report: Report) -> str:
    """Return the table that a run ends with."""
    from cdc_plugin.report.words import TITLES

    metrics = report.metrics
    before, after = metrics["before"], metrics["after"]
    rows = [(TITLES[key], figures, after[key]) for key, figures in before.items()]
    columns = ["ACC", "NMI", "ARI", "ECE", "CONF"] if metrics["labels"] else ["CONF"]
    lines = ["", f"{'in %, before -> after':24s}" + "".join(f"{name:>15s}" for name in columns)]
    for title, old, new in rows:
        cells = [f"{format_percent(old.get(name))} -> {format_percent(new.get(name))}" for name in columns]
        lines.append(f"{title:24s}" + "".join(f"{cell:>15s}" for cell in cells))
    old = metrics.get("old_model")
    if old is not None:
        lines[1] = f"{'in %, start -> end':24s}" + lines[1][24:]
        cells = [format_percent(old.get(name)) for name in columns]
        lines.insert(2, f"{'old model':24s}" + "".join(f"{cell:>15s}" for cell in cells))
    facts = metrics["label_free"]
    lines += [
        "",
        f"{metrics['images']} images in {metrics['clusters']} clusters; expected accuracy "
        f"{facts['expected_accuracy']:.1%} (mean calibrated confidence), heads agree on {facts['heads_agree']:.1%}",
    ]
    if old is not None:
        lines.append(
            f"{old['agreement_before']:.1%} of the images start in the old model's cluster, "
            f"{old['agreement_after']:.1%} end there ({old['writer']})"
        )
    lines += [f"warning: {warning['text']}" for warning in facts["warnings"]]
    if metrics["skipped"]:
        lines.append(describe_unreadable(len(metrics["skipped"])))
    lines.append(f"results: {report.folder} (open report.html in a browser)")
    return "\n".join(lines)
