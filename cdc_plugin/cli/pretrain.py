"""The command ``cdc-pretrain``: arguments to a call of ``pretrain``; what to type next is printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc_plugin.cli import common
from cdc_plugin.errors import join_words
from cdc_plugin.training.pretext.config import TITLES, PretrainConfig, load_pretrain_config

if TYPE_CHECKING:
    from cdc_plugin.training.pretext.run import Pretrained

EPILOG = """examples:
  cdc-pretrain --data photos/ --out runs/backbone
  cdc-pretrain --data digits --method byol --epochs 60
  cdc-pretrain --data cifar10 --recipe paper-mocov2 --out runs/moco-cifar10 precision=bfloat16
  cdc-pretrain --data letters.npz --arch resnet18 flip=false crop_scale=0.5
  cdc-pretrain --resume --out runs/moco-cifar10

Any setting can be given as key=value; config.yaml in the result folder names all of them.
Needs lightly: pip install "cdc-plugin[pretrain]". Labels are never used.
"""


def pretrain_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-pretrain``."""
    about = "Train an image backbone on your images alone, without labels, for cdc-refine to start from."
    parser = common.make_parser("cdc-pretrain", about, EPILOG)
    what = parser.add_argument_group("what to train")
    common.add_settings(what, "data", "method", "arch", schema=PretrainConfig)
    recipes = "settings to start from (default: laptop-METHOD, from 50,000 images on paper-METHOD)"
    what.add_argument("--recipe", metavar="NAME_OR_FILE", help=recipes)

    how = parser.add_argument_group("how")
    common.add_settings(how, "epochs", "seed", "device", schema=PretrainConfig)
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any other setting")

    common.add_result_folder(parser.add_argument_group("where the results go"))

    other = parser.add_argument_group("other")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--quiet", action="store_true", help="print the outcome only")
    return parser


def pretrain_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-pretrain``."""
    with common.run_command(pretrain_parser(), arguments, "nothing is kept yet, start again with") as options:
        if options.list_recipes:
            common.list_recipes("pretrain")
            return
        flags = common.collect_flags(options, PretrainConfig)
        # Once before torch is imported, so that a mistyped setting is refused at once.
        load_pretrain_config(options.recipe, flags, options.overrides)
        common.start_log(options.quiet)
        from cdc_plugin.training.pretext.run import pretrain

        result = pretrain(options.recipe, flags, options.overrides, resume=options.resume, overwrite=options.overwrite)
        print(outcome(result))


def outcome(result: Pretrained) -> str:
    """Return what was trained, what to beware of, and what to type next."""
    last = result.history[-1]
    lines = [
        f"{result.network}: {TITLES[result.config.method]}, {result.config.epochs} epochs, loss {last['loss']:.3f}, "
        f"spread of the embedding {last['spread']:.2f} (0: collapsed, 1: at its widest)"
    ]
    if result.collapsed:
        lines.append(
            "warning: the network has collapsed, all images look alike to it; take another --method or seed, "
            f"or a lower rate: lr={result.config.lr / 4:g}"
        )
    folder, data = (join_words([word]) for word in (result.folder, result.config.data))
    lines += [f"results: {result.folder}", f"next: cdc-refine --backbone {folder} --data {data} --clusters C"]
    return "\n".join(lines)
