"""The command ``cdc-export``: arguments to a call of ``export_model``; what was written is printed."""

import argparse
import sys
from collections.abc import Sequence

from cdc_plugin.cli import common

# Named here too, so that --help need not import what writes them.
TARGETS = ("solo-learn", "timm", "torchvision", "onnx", "hub")
EPILOG = """examples:
  cdc-export --model runs/photos --to timm --out photos-timm
  cdc-export --model runs/photos --to torchvision --out resnet18.pth
  cdc-export --model runs/cifar10 --to solo-learn --out trained_models/cdc
  cdc-export --model runs/photos --to onnx --out photos.onnx
  cdc-export --model runs/photos --to hub --out photos-hub

A network that another library would load but compute differently is refused.
"""


def export_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-export``."""
    about = "Write a refined network for another library: its backbone, for ONNX and the hub the whole model."
    parser = common.make_parser("cdc-export", about, EPILOG)
    parser.add_argument("--model", required=True, metavar="DIR", help="result folder of cdc-refine, or a checkpoint")
    parser.add_argument("--to", required=True, choices=TARGETS, help="library that is to load it")
    place = "folder (solo-learn, timm, hub), .pth file (torchvision), .onnx file"
    parser.add_argument("--out", required=True, metavar="PATH", help=place)
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier export")
    common.add_settings(parser, "format", "arch")
    return parser


def export_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-export``."""
    with common.run_command(export_parser(), arguments) as options:
        from cdc_plugin.integrations.export import export_model

        written = export_model(options.model, options.to, options.out, options.overwrite, options.format, options.arch)
        print(f"{written.network} for {options.to}: {', '.join(map(str, written.files))}")
        print("load it with:", *written.load, sep="\n  ")
        for note in written.notes:
            print(f"note: {note}", file=sys.stderr)
