"""The command ``cdc-export``: arguments to a call of ``exports``; what was written is printed.

Nothing heavy is imported before the arguments are understood: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cdc_plugin import __version__
from cdc_plugin.cli.refine import _guard

# Named here, too, so that --help need not import what writes them.
TARGETS = ("solo-learn", "timm", "torchvision", "onnx", "hub")
EPILOG = """examples:
  cdc-export --model runs/photos --to timm --out photos-timm
  cdc-export --model runs/photos --to torchvision --out resnet18.pth
  cdc-export --model runs/cifar10 --to solo-learn --out trained_models/cdc
  cdc-export --model runs/photos --to onnx --out photos.onnx
  cdc-export --model runs/photos --to hub --out photos-hub

What another library would load but compute otherwise is refused.
"""


def export_command(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``cdc-export``."""
    _guard(_export, export_parser(), arguments)


def export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cdc-export",
        description="Write a refined network for another library: its backbone, for ONNX and the hub the whole model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="result folder of cdc-refine, or a checkpoint")
    parser.add_argument("--to", required=True, choices=TARGETS, help="library that shall load it")
    parser.add_argument(
        "--out",
        required=True,
        metavar="PATH",
        help="folder (solo-learn, timm, hub), .pth file (torchvision), .onnx file",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier export")
    parser.add_argument("--format", metavar="NAME", help="what wrote the checkpoint (default: found out)")
    parser.add_argument("--arch", metavar="NAME", help="network of the checkpoint (default: found out)")
    parser.add_argument("--version", action="version", version=f"cdc-plugin {__version__}")
    return parser


def _export(options: argparse.Namespace) -> None:
    from cdc_plugin.integrations.export import export_model

    written = export_model(options.model, options.to, options.out, options.overwrite, options.format, options.arch)
    print(f"{written.network} for {options.to}: {', '.join(map(str, written.files))}")
    print("load it with:")
    print("\n".join(f"  {line}" for line in written.load))
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
