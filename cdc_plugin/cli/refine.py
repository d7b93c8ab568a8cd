"""The command ``cdc-refine``: arguments to config to pipeline; and the frame of all commands, which alone exits.

Nothing heavy is imported before the arguments are understood: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cdc_plugin import __version__
from cdc_plugin.cli.process import set_up_process
from cdc_plugin.errors import UserError
from cdc_plugin.training.signals import Terminated, ending_on_termination

if TYPE_CHECKING:
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


# What is left of a run that the user or a cluster interrupts.
KEPT = {
    "cdc-refine": "; finished epochs are kept, go on with --resume",
    "cdc-pretrain": "; finished epochs are kept, go on with --resume",
    "cdc-compare": "; finished cells are kept, go on with the same command and --out",
    "cdc-predict": "; the same command goes on after the last finished part",
}


def refine_command(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``cdc-refine``."""
    _guard(_refine, refine_parser(), arguments)


def refine_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cdc-refine",
        description="Turn a pretrained image backbone into clusters whose confidence matches their accuracy, "
        "without labels.",
        epilog=REFINE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run on")
    what.add_argument("--backbone", metavar="FILE", help="checkpoint, run folder, timm:NAME or hf-hub:NAME")
    what.add_argument("--data", metavar="PATH_OR_NAME", help="folder, .npz, .npy, tar shards, hf:NAME:SPLIT or a name")
    what.add_argument("--clusters", type=int, metavar="C", help="number of clusters, at least 2")
    what.add_argument("--recipe", metavar="NAME_OR_FILE", help="settings to start from (--list-recipes)")
    what.add_argument("--format", metavar="NAME", help="what wrote the checkpoint (default: found out)")
    what.add_argument("--arch", metavar="NAME", help="network of the checkpoint (default: found out)")
    what.add_argument("--branch", metavar="B", help="online or momentum (EMA, teacher), where a checkpoint has both")
    what.add_argument("--head", type=int, metavar="N", help="which of several clustering heads, from 0")
    what.add_argument("--trust-checkpoint", action="store_true", help="open pickled modules: runs the code in them")
    what.add_argument("--partial-weights", action="store_true", help="go on although some weights are missing")
    what.add_argument("--no-labels", action="store_true", help="ignore class sub-folders and label arrays")

    how = parser.add_argument_group("how")
    how.add_argument(
        "--init",
        metavar="HOW",
        help="keep (the heads of an old clustering model, the default where there are any), prototypes or random",
    )
    how.add_argument("--mini-clusters", type=int, metavar="K", help="fewer penalise confidence more")
    how.add_argument("--epochs", type=int, metavar="N")
    how.add_argument("--freeze-backbone", action="store_true", help="train the heads only, on cached features")
    how.add_argument("--seed", type=int, metavar="S")
    how.add_argument("--device", metavar="D", help="auto (default), cpu, cuda, cuda:1, mps")
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")

    where = parser.add_argument_group("where the results go")
    where.add_argument("--out", metavar="DIR", help="result folder (default: a new one below cdc-runs)")
    where.add_argument(
        "--track", action="append", metavar="NAME", help="log also to tensorboard or wandb; may be given twice"
    )
    existing = where.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with the run in --out")
    existing.add_argument("--overwrite", action="store_true", help="replace the result files in --out")

    other = parser.add_argument_group("other")
    other.add_argument("--demo", action="store_true", help="run on the embedded handwritten digits")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--dry-run", action="store_true", help="print resolved settings and plan, and stop")
    other.add_argument("--quiet", action="store_true", help="print the outcome only")
    other.add_argument("--version", action="version", version=f"cdc-plugin {__version__}")
    return parser


def _refine(options: argparse.Namespace) -> None:
    from cdc_plugin.config.load import load_config, to_yaml
    from cdc_plugin.config.recipes import recipe_names, recipe_summary

    if options.list_recipes:
        for name in recipe_names():
            print(f"{name:14s} {recipe_summary(name)}")
        return
    flags: dict[str, Any] = {
        name: getattr(options, name)
        for name in (
            "backbone",
            "format",
            "arch",
            "branch",
            "head",
            "init",
            "data",
            "clusters",
            "mini_clusters",
            "epochs",
            "seed",
            "device",
            "track",
        )
    }
    flags |= {
        "out": options.out,
        "labels": False if options.no_labels else None,
        "trust_checkpoint": True if options.trust_checkpoint else None,
        "partial_weights": True if options.partial_weights else None,
        "freeze_backbone": True if options.freeze_backbone else None,
    }
    recipe = options.recipe
    if options.demo:
        from cdc_plugin.config.recipes import demo_settings

        recipe = recipe or "digits"
        flags = {**demo_settings(), **{key: value for key, value in flags.items() if value is not None}}
    config = load_config(recipe, flags, options.overrides)
    if config.backbone is not None:  # only now: a mistyped setting is told before torch is imported
        from cdc_plugin.training.prepare import configure

        config = configure(recipe, flags, options.overrides)
    if options.dry_run:
        from cdc_plugin.training.plan import plan_run

        resolved, lines = plan_run(config)
        print(to_yaml(resolved), end="")
        print("\n".join(f"# {line}" for line in lines))
        return
    if not options.quiet and _speaks():
        _log_to_terminal()
    from cdc_plugin.pipeline import run

    report = run(config, resume=options.resume, overwrite=options.overwrite)
    if _speaks():
        print(outcome(report))


def outcome(report: Report) -> str:
    """The table that a run ends with."""
    from cdc_plugin.report.words import TITLES

    metrics = report.metrics
    before, after = metrics["before"], metrics["after"]
    rows = [(TITLES[key], figures, after[key]) for key, figures in before.items()]
    columns = ["ACC", "NMI", "ARI", "ECE", "CONF"] if metrics["labels"] else ["CONF"]
    lines = ["", f"{'in %, before -> after':24s}" + "".join(f"{name:>15s}" for name in columns)]
    for title, old, new in rows:
        cells = [f"{_percent(old.get(name))} -> {_percent(new.get(name))}" for name in columns]
        lines.append(f"{title:24s}" + "".join(f"{cell:>15s}" for cell in cells))
    old = metrics.get("old_model")
    if old is not None:
        lines[1] = f"{'in %, start -> end':24s}" + lines[1][24:]
        cells = [_percent(old.get(name)) for name in columns]
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
        lines.append(unreadable(len(metrics["skipped"])))
    lines.append(f"results: {report.folder} (open report.html in a browser)")
    return "\n".join(lines)


def unreadable(count: int) -> str:
    return (
        f"{count} image{'s' if count > 1 else ''} could not be read; report.json names {'them' if count > 1 else 'it'}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _log_to_terminal() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("cdc_plugin").addHandler(handler)


def _guard(
    command: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> None:
    """Run a command; what the user can mend becomes one line and exit code 2."""
    # key=value words may stand before, between and after the options.
    options = parser.parse_intermixed_args(arguments)
    set_up_process()
    try:
        with ending_on_termination():
            command(options)
    except KeyboardInterrupt as error:
        _end(parser.prog, error)
    except Exception as error:
        interruption = _interruption_behind(error)
        if interruption is not None:
            _end(parser.prog, interruption)
        if isinstance(error, UserError):
            _stop("" if error.told else f"{parser.prog}: error: {error}", 2)
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        raise


def _end(program: str, error: KeyboardInterrupt) -> None:
    """End as Ctrl-C or a signal asks for."""
    told, code = (str(error), error.exit_code) if isinstance(error, Terminated) else ("interrupted", 130)
    _stop(f"{program}: {told}{KEPT.get(program, '')}" if _speaks() else "", code)


def _interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that has led to an error: a library that is interrupted while it cleans up may fail at that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def _speaks() -> bool:
    """Of the processes that torchrun starts, one speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _stop(message: str, code: int) -> None:
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)
