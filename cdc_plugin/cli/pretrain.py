"""The command ``cdc-pretrain``: arguments to a call of ``pretraining``; what to type next is printed.

Nothing heavy is imported before the arguments are understood: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_plugin import __version__
from cdc_plugin.cli.refine import _guard, _log_to_terminal

if TYPE_CHECKING:
    from cdc_plugin.training.pretext.run import Pretrained

# Named here, too, so that --help need not import what trains them.
METHODS = ("mocov2", "simsiam", "byol")
EPILOG = """examples:
  cdc-pretrain --data photos/ --out runs/backbone
  cdc-pretrain --data digits --method byol --epochs 60
  cdc-pretrain --data cifar10 --recipe paper-mocov2 --out runs/moco-cifar10 precision=bfloat16
  cdc-pretrain --data letters.npz --arch resnet18 flip=false crop_scale=0.5
  cdc-pretrain --resume --out runs/moco-cifar10

Any setting can be given as key=value; config.yaml in the result folder names all of them.
Needs lightly: pip install 'cdc-plugin[pretrain]'. Labels are never looked at.
"""


def pretrain_command(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``cdc-pretrain``."""
    _guard(_pretrain, pretrain_parser(), arguments)


def pretrain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cdc-pretrain",
        description="Train an image backbone on your images alone, without labels, for cdc-refine to start from.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--data", metavar="PATH_OR_NAME", help="folder, .npz, .npy, tar shards, hf:NAME:SPLIT or a name")
    what.add_argument("--method", metavar="NAME", help=f"{', '.join(METHODS)} (default: {METHODS[0]})")
    what.add_argument(
        "--arch", metavar="NAME", help="small, resnet18, resnet34, resnet50 or a timm model (default: from the recipe)"
    )
    what.add_argument(
        "--recipe",
        metavar="NAME_OR_FILE",
        help="settings to start from (default: laptop-METHOD, from 50,000 images on paper-METHOD)",
    )

    how = parser.add_argument_group("how")
    how.add_argument("--epochs", type=int, metavar="N")
    how.add_argument("--seed", type=int, metavar="S")
    how.add_argument("--device", metavar="D", help="auto (default), cpu, cuda, cuda:1, mps")
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")

    where = parser.add_argument_group("where the results go")
    where.add_argument("--out", metavar="DIR", help="result folder (default: a new one below cdc-runs)")
    existing = where.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with the run in --out")
    existing.add_argument("--overwrite", action="store_true", help="replace the result files in --out")

    other = parser.add_argument_group("other")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--quiet", action="store_true", help="print the outcome only")
    other.add_argument("--version", action="version", version=f"cdc-plugin {__version__}")
    return parser


def _pretrain(options: argparse.Namespace) -> None:
    from cdc_plugin.config.recipes import recipe_names, recipe_summary
    from cdc_plugin.training.pretext.config import load_pretrain_config

    if options.list_recipes:
        for name in recipe_names("pretrain"):
            print(f"{name:16s} {recipe_summary(name, 'pretrain')}")
        return
    flags = {name: getattr(options, name) for name in ("data", "method", "arch", "epochs", "seed", "device", "out")}
    # Once before torch is imported, so that a mistyped setting is told at once.
    load_pretrain_config(options.recipe, flags, options.overrides)
    if options.quiet:
        logging.getLogger("cdc_plugin").addHandler(logging.NullHandler())  # without any, Python prints warnings itself
    else:
        _log_to_terminal()
    from cdc_plugin.training.pretext.run import pretrain

    made = pretrain(options.recipe, flags, options.overrides, resume=options.resume, overwrite=options.overwrite)
    print(outcome(made))


def outcome(made: Pretrained) -> str:
    """What was trained, what to beware of, and what to type next."""
    from cdc_plugin.training.pretext.config import TITLES

    last = made.history[-1]
    lines = [
        f"{made.network}: {TITLES[made.config.method]}, {made.config.epochs} epochs, loss {last['loss']:.3f}, "
        f"spread of the embedding {last['spread']:.2f} (0: collapsed, 1: at its widest)"
    ]
    if made.collapsed:
        lines.append(
            "warning: the network has collapsed, all images look alike to it; take another --method or seed, "
            f"or a lower rate: lr={made.config.lr / 4:g}"
        )
    folder, data = (shlex.quote(str(word)) for word in (made.folder, made.config.data))
    lines += [f"results: {made.folder}", f"next: cdc-refine --backbone {folder} --data {data} --clusters C"]
    return "\n".join(lines)
