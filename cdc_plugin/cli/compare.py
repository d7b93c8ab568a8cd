"""The command ``cdc-compare``: arguments to a grid of methods and seeds; the table is printed."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_plugin.cli import common
from cdc_plugin.errors import ConfigError, join_words

if TYPE_CHECKING:
    from cdc_plugin.comparison.datasets import DatasetRequest
    from cdc_plugin.comparison.request import TableRecipe

DEFAULT_RECIPE = "tables/main"
SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)?=")

EPILOG = """examples:
  cdc-compare --demo --methods kmeans,scan2,cdc --seeds 2
  cdc-compare --backbone checkpoint.pth --data photos/ --clusters 10 --methods cdc,fixed-0.95,flexmatch --seeds 5
  cdc-compare --recipe tables/ablation --backbone checkpoint.pth --data photos/ --clusters 10 --out runs/ablation
  cdc-compare --recipe tables/ood --backbone b.pt --data photos/ --clusters 10 --ood textures.npz holiday/
  cdc-compare --methods cdc,cdc:hidden=256,cdc:mini_clusters=40:batch_size=500 --backbone b.pt --data x.npz --clusters 9
  cdc-compare --recipe tables/main --full --backbone 'checkpoints/{set}.ckpt'  # the paper's six sets, on a GPU

The same command with the same --out continues where it was interrupted and repeats no finished cell.
key=value settings are those of cdc-refine and hold for all methods. Labels are for the table only.
"""


def compare_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-compare``."""
    parser = common.make_parser(
        "cdc-compare",
        "Run clustering methods side by side on your own images and checkpoint: CDC, its parts exchanged one by one, "
        "and its opponents, over several seeds. Writes tables and report.html.",
        EPILOG,
    )
    what = parser.add_argument_group("what to compare")
    what.add_argument("--methods", nargs="+", metavar="A,B,C", help="names, as --list-methods gives them")
    what.add_argument("--seeds", metavar="N", help="how many (5), or which (0,3,7)")
    table = f"methods and seeds of one of the paper's tables, as {DEFAULT_RECIPE}"
    what.add_argument("--recipe", metavar="NAME", help=table)
    what.add_argument("--full", action="store_true", help="the recipe's own data sets and seeds, as in the paper")
    on = parser.add_argument_group("what to run on")
    on.add_argument("--backbone", nargs="+", metavar="FILE", help="checkpoint; several for several sets of images")
    common.add_features(on)
    sources = "image folder, .npz, tar shards, name; may be several"
    on.add_argument("--data", nargs="+", metavar="PATH_OR_NAME", help=sources)
    on.add_argument("--clusters", nargs="+", metavar="C", help="how many, for each set")
    on.add_argument("--ood", nargs="+", default=[], metavar="PATH_OR_NAME", help="images of none of the clusters")
    common.add_settings(on, "format", "arch")
    common.add_settings(on, "labels", help="ignore class sub-folders and label arrays")
    on.add_argument("--demo", action="store_true", help="the embedded handwritten digits and their backbone")
    how = parser.add_argument_group("how")
    common.add_settings(how, "epochs", help="of every training (default: 60 %% of what cdc-refine takes, at least 10)")
    common.add_settings(how, "freeze_backbone")
    how.add_argument("--jobs", type=int, metavar="N", help="cells side by side (default: one per core, on a GPU one)")
    common.add_settings(how, "device")
    how.add_argument("overrides", nargs="*", metavar="key=value", help="any setting of cdc-refine, for all methods")
    where = parser.add_argument_group("where the results go")
    common.add_settings(where, "out")
    where.add_argument("--overwrite", action="store_true", help="start again in --out")
    where.add_argument("--keep-models", action="store_true", help="keep every cell's model, for cdc-predict and others")
    other = parser.add_argument_group("other")
    other.add_argument("--list-methods", action="store_true", help="name all methods and stop")
    other.add_argument("--list-recipes", action="store_true", help="name the shipped recipes and stop")
    other.add_argument("--quiet", action="store_true", help="print the table only")
    return parser


def compare_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-compare``."""
    with common.run_command(compare_parser(), arguments, "nothing is kept yet, start again with") as options:
        if options.list_methods:
            print(method_list())
            return
        from cdc_plugin.comparison import request
        from cdc_plugin.config.recipes import recipe_names, recipe_summary

        if options.list_recipes:
            for name in recipe_names("tables"):
                print(f"{'tables/' + name:20s} {recipe_summary(name, 'tables')}")
            return
        for name in ("methods", "backbone", "data", "clusters", "ood"):  # key=value words may stand behind these
            given = getattr(options, name) or []
            options.overrides += filter(SETTING.match, given)
            setattr(options, name, [word for word in given if not SETTING.match(word)])
        if options.full and not options.recipe:
            raise ConfigError("--full runs a recipe on the data sets of the paper; say which, as --recipe tables/main")
        if options.jobs is not None and options.jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, found {options.jobs}")
        recipe = request.read_table_recipe(options.recipe or DEFAULT_RECIPE, options.full)
        methods = request.parse_methods(options.methods or list(recipe.methods))
        seeds = request.parse_seeds(options.seeds or str(recipe.seeds))
        sets = list_sets(options, recipe)
        title, columns = (recipe.title, recipe.columns) if options.recipe else ("", ())
        command = join_words(["cdc-compare", *sys.argv[1:]]) if Path(sys.argv[0]).stem == "cdc-compare" else None
        how = {name: getattr(options, name) for name in ("jobs", "keep_models", "overwrite")}
        common.start_log(options.quiet)
        from cdc_plugin.comparison.export import to_text
        from cdc_plugin.comparison.run import run_comparison

        compared = run_comparison(
            sets, methods, seeds, options.out, **how, title=title, columns=columns, command=command
        )
        print(to_text(compared.rows, columns or None, shutil.get_terminal_size((160, 24)).columns))
        for sentence in (*compared.verdicts, *(f"failed: {name}: {why}" for name, why in compared.failures.items())):
            print(sentence)
        print(f"results: {compared.folder} (open report.html in a browser)")
        if compared.failures:
            sys.exit(1)


def method_list() -> str:
    """Return all methods by group, and how to vary them."""
    from cdc_plugin.comparison.methods import METHODS

    lines: list[str] = []
    for group in dict.fromkeys(method.group for method in METHODS.values()):
        members = [method for method in METHODS.values() if method.group == group]
        lines += [f"{group}:", *(f"  {m.name:17s} {' and '.join(m.rows)}: {m.summary}" for m in members)]
    lines += [
        "retrofit:",
        "  scan2+cdc, scan3+cdc, secu+cdc, secu-size+cdc, cc+cdc, spice+cdc, temi+cdc, turtle+cdc: CDC as a second",
        "  stage, from their head on",
        "variants:",
        "  cdc:hidden=256, cdc:mini_clusters=40:batch_size=500, cdc:batch_size=50%:mini_clusters=10%, ...:",
        "  any setting of cdc-refine after a colon; B may be a share of its default, K a share of B (10%) or, with",
        "  a recipe that states one, of the recipe's K (80%K)",
    ]
    return "\n".join(lines)


def list_sets(options: argparse.Namespace, recipe: TableRecipe) -> list[DatasetRequest]:
    """Return the sets of images, each with its backbone, as options or the recipe name them."""
    from cdc_plugin.comparison.datasets import DatasetRequest

    several = ("backbone", "data", "clusters", "out")
    flags = {name: value for name, value in common.collect_flags(options).items() if name not in several}
    words = (*recipe.settings, *options.overrides)

    def outside(name: str) -> tuple[str, ...]:
        return tuple(options.ood or recipe.outside.get(name, ()))

    if options.full and not options.data:
        pattern = (options.backbone or [""])[0]
        if "{set}" not in pattern:
            raise ConfigError("--full needs a backbone for each set: --backbone 'checkpoints/{set}.ckpt'")
        return [
            DatasetRequest(name, name, {**flags, "backbone": pattern.replace("{set}", name)}, words, outside(name))
            for name in recipe.sets
        ]
    if options.demo:
        from cdc_plugin.config.recipes import demo_settings

        return [DatasetRequest("digits", "digits", {**demo_settings(), **flags}, words, outside("digits"))]
    if options.features:
        name = Path(options.features[0]).stem
        given = {key: (getattr(options, key) or [None])[0] for key in ("data", "clusters")}
        return [DatasetRequest(name, None, {**flags, **given}, words, outside(name))]
    missing = [name for name in ("backbone", "data") if not getattr(options, name)]
    if missing:
        raise ConfigError(f"missing --{', --'.join(missing)}; cdc-compare --help shows how a comparison is started")
    count = len(options.data)
    backbones = _as_many(options.backbone, count, "--backbone")
    wrong = [word for word in options.clusters if not word.isdecimal()]
    if wrong:
        raise ConfigError(f"--clusters takes whole numbers, found {wrong[0]!r}")
    clusters = _as_many([int(word) for word in options.clusters] or [None], count, "--clusters")
    names = [Path(data).stem or data for data in options.data]
    if len(set(names)) < count:
        names = [str(Path(data)) for data in options.data]
    if len(set(names)) < count:
        raise ConfigError("--data names the same images twice")
    return [
        DatasetRequest(
            name, None, {**flags, "backbone": backbone, "data": data, "clusters": number}, words, outside(name)
        )
        for name, backbone, data, number in zip(names, backbones, options.data, clusters, strict=True)
    ]


def _as_many(values: list[Any], count: int, option: str) -> list[Any]:
    """Return one value for each set; a single one stands for all."""
    if len(values) == 1:
        return values * count
    if len(values) != count:
        expected = f"one value, or one for each of the {count} sets in --data"
        raise ConfigError(f"{option} takes {expected}; found {len(values)}")
    return values
