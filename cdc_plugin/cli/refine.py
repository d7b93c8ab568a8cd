"""The command ``cdc-refine``: arguments to settings to a run; the outcome is printed."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_plugin.cli import common

if TYPE_CHECKING:
    from cdc_plugin.config.schema import RefineConfig
    from cdc_plugin.evaluation.records import Report

EPILOG = """examples:
  cdc-refine --demo
  cdc-refine --backbone checkpoint.pth --data photos/ --clusters 10
  cdc-refine --backbone checkpoint.pth --data photos/ --clusters auto  # or auto:5-50
  cdc-refine --backbone moco_r34.pth --data cifar10 --recipe cifar10 --out runs/cifar10
  cdc-refine --backbone big_vit.pth --arch vit_base_patch16_224 --data photos/ --clusters 20 --freeze-backbone
  cdc-refine --features clip.npy dino.npy --clusters 10  # embeddings of the same samples, of any kind
  cdc-refine --backbone solo_learn_run/  # data set, paths and statistics come from its args.json
  cdc-refine --backbone scan_model.pth.tar --data cifar10 --init keep  # retrofit an older clustering model
  cdc-refine --resume --out runs/cifar10
  cdc-refine --recipe digits --backbone b.pt --clusters 10 augment.crop_scale=0.8 lr_backbone=1e-4

Any setting can be given as key=value; --dry-run prints all of them as they would be used.
"""


def refine_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-refine``."""
    about = "Turn a pretrained image backbone into clusters whose confidence matches their accuracy, without labels."
    parser = common.make_parser("cdc-refine", about, EPILOG)
    what = parser.add_argument_group("what to run on")
    common.add_settings(what, "backbone")
    common.add_features(what)
    common.add_settings(what, "data")
    common.add_settings(what, "clusters", type=read_number)
    what.add_argument("--recipe", metavar="NAME_OR_FILE", help="settings to start from (--list-recipes)")
    common.add_settings(what, "format", "arch", "branch", "head", "pool", "trust_checkpoint", "partial_weights")
    common.add_settings(what, "labels", help="ignore class sub-folders and label arrays")

    how = parser.add_argument_group("how")
    common.add_settings(how, "init", "mini_clusters", "epochs", "freeze_backbone", "seed", "device")
    how.add_argument(
        "--quick", dest="rounds", action="store_const", const=1, help="one round of training, settled or not (rounds=1)"
    )
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")

    where = parser.add_argument_group("where the results go")
    common.add_result_folder(where)
    common.add_settings(where, "track")

    other = parser.add_argument_group("other")
    other.add_argument("--demo", action="store_true", help="run on the embedded handwritten digits")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--dry-run", action="store_true", help="print resolved settings and plan, and stop")
    other.add_argument("--quiet", action="store_true", help="print the outcome only")
    return parser


def read_number(word: str) -> int | str:
    """Return a whole number as one; other words, such as auto, are for `load_config` to judge."""
    return int(word) if word.isdecimal() and word.isascii() and len(word) < 10 else word


def refine_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-refine``."""
    with common.run_command(refine_parser(), arguments, "nothing is kept yet, start again with") as options:
        if options.list_recipes:
            common.list_recipes("cdc")
            return
        from cdc_plugin.training.request import configure

        recipe, flags = options.recipe, common.collect_flags(options)
        if options.demo:
            from cdc_plugin.config.recipes import demo_settings

            recipe, flags = recipe or "digits", {**demo_settings(), **flags}
        request, note = configure(recipe, flags, options.overrides), ""
        if not (request.backbone or request.features or options.resume) and request.data is not None:
            request, note = take_at_hand(request)
        if options.dry_run:
            from cdc_plugin.config.load import to_yaml
            from cdc_plugin.training.plan import plan_run

            resolved, lines = plan_run(request)
            print(to_yaml(resolved), end="")
            print("\n".join(f"# {line}" for line in lines))
            return
        common.start_log(options.quiet)
        if note:
            logging.getLogger("cdc_plugin").warning("%s", note)
        from cdc_plugin.pipeline import run

        report = run(request, resume=options.resume, overwrite=options.overwrite)
        if common.is_main_process():
            print(outcome(report))


def take_at_hand(request: RefineConfig) -> tuple[RefineConfig, str]:
    """Return the request with the best backbone of this machine's caches, where none was named, and which it is."""
    from cdc_plugin.checkpoints.at_hand import choose_at_hand

    chosen, others = choose_at_hand()
    more = f"; also at hand: {', '.join(others[:5])}" if others else ""
    return dataclasses.replace(request, backbone=chosen), f"no --backbone is named: taking {chosen}{more}"


def outcome(report: Report) -> str:
    """Return the table that a run ends with."""
    from cdc_plugin.report.words import TITLES, describe_count, describe_interval, describe_spaces

    metrics, percent = report.metrics, common.format_percent
    before, after, facts, old = metrics["before"], metrics["after"], metrics["label_free"], metrics.get("old_model")
    columns = ["ACC", "NMI", "ARI", "ECE", "CONF"] if metrics["labels"] else ["CONF"]
    title = "in %, before -> after"
    rows = [
        (TITLES[key], [f"{percent(figures.get(name))} -> {percent(after[key].get(name))}" for name in columns])
        for key, figures in before.items()
    ]
    if old is not None:
        title = "in %, start -> end"
        rows.insert(0, ("old model", [percent(old.get(name)) for name in columns]))
    noun = metrics.get("noun", "image")
    lines = [
        "",
        *common.format_table(title, columns, rows, 24, 15),
        "",
        f"{metrics['images']} {noun}s in {metrics['clusters']} clusters; expected accuracy "
        f"{facts['expected_accuracy']:.1%}{describe_interval(facts)}, heads agree on {facts['heads_agree']:.1%}",
    ]
    if old is not None:
        lines.append(
            f"{old['agreement_before']:.1%} of the {noun}s start in the old model's cluster, "
            f"{old['agreement_after']:.1%} end there ({old['writer']})"
        )
    lines += filter(None, [describe_count(metrics.get("count"))])
    lines += describe_spaces(metrics)
    lines += [f"warning: {warning['text']}" for warning in facts["warnings"]]
    if metrics["skipped"]:
        lines.append(common.describe_unreadable(len(metrics["skipped"])))
    lines.append(f"results: {report.folder} (open report.html in a browser)")
    return "\n".join(lines)
