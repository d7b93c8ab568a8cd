"""The command ``cdc-predict``: new images into clusters, those to rely on marked, some to check by hand.

Nothing heavy is imported before the arguments are understood: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cdc_plugin import __version__
from cdc_plugin.cli import _guard
from cdc_plugin.errors import UserError

if TYPE_CHECKING:
    from cdc_plugin.prediction import Prediction
    from cdc_plugin.selective import Acceptance
    from cdc_plugin.subjects import Subject

AUDIT_SIDE = 224  # pixels at which a person can tell what an image shows
EPILOG = """examples:
  cdc-predict --model runs/photos --data new_photos/ --out new.csv
  cdc-predict --model runs/photos --data new_photos/ --out new.csv --min-confidence 0.9
  cdc-predict --model runs/photos --data new_photos/ --out new.parquet --target-accuracy 0.95
  cdc-predict --model runs/photos --data new_photos/ --out sorted/ --to folders
  cdc-predict --model runs/photos --data new_photos/ --out check/ --audit 100  # 100 images to check by hand
  cdc-predict --answers check/  # what the answers say of the accuracy

Images of any number are read one chunk after the other. Labels are not looked at.
"""


def predict_command(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``cdc-predict``."""
    _guard(_predict, predict_parser(), arguments)


def predict_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cdc-predict",
        description="Sort new images into the clusters of a finished run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to sort")
    what.add_argument("--model", metavar="DIR", help="result folder of cdc-refine, or a clustering checkpoint")
    what.add_argument("--data", metavar="PATH_OR_NAME", help="image folder, file, .npz or .npy")
    what.add_argument("--head", type=int, metavar="N", help="which of several heads of a clustering checkpoint")
    what.add_argument("--device", default="auto", metavar="D", help="auto (default), cpu, cuda, mps")
    what.add_argument("--batch-size", type=int, default=256, metavar="B", help="images at once (default 256)")

    where = parser.add_argument_group("where it goes")
    where.add_argument("--out", metavar="PATH", help="table to write, or a folder where --to or --audit make one")
    where.add_argument(
        "--to",
        metavar="FORMAT",
        help="csv, parquet, folders, label-studio, fiftyone or cvat (default: by the ending of --out)",
    )
    where.add_argument("--overwrite", action="store_true", help="replace what is at --out")

    which = parser.add_argument_group("which predictions to rely on (column selected; no row is dropped)")
    sure = which.add_mutually_exclusive_group()
    sure.add_argument("--min-confidence", type=float, metavar="P", help="those at least so sure, such as 0.9")
    sure.add_argument(
        "--target-accuracy",
        type=float,
        metavar="P",
        help="as many as possible, so that their mean confidence reaches P, such as 0.95",
    )

    check = parser.add_argument_group("check by hand")
    check.add_argument(
        "--audit", type=int, metavar="N", help="write N images, drawn by confidence, to the folder --out"
    )
    check.add_argument("--seed", type=int, default=0, metavar="S", help="of the drawing (default 0)")
    check.add_argument("--answers", metavar="FILE", help="read the answers back; needs no model and no data")
    parser.add_argument("--version", action="version", version=f"cdc-plugin {__version__}")
    return parser


def _predict(options: argparse.Namespace) -> None:
    if options.answers is not None:
        _tell_answers(options)
        return
    _check(options)
    from cdc_plugin.prediction import predict_images
    from cdc_plugin.runtime import choose_device
    from cdc_plugin.subjects import open_subject
    from cdc_plugin.tables import with_column
    from cdc_plugin.tracking import progress

    subject = open_subject(options.model, head=options.head)
    found = predict_images(subject.model, options.data, choose_device(options.device), options.batch_size, progress)
    chosen = _select(options, found)
    if chosen is not None:
        found = replace(found, table=with_column(found.table, "selected", chosen.mask))
    if options.audit is None:
        _write(options, found)
    else:
        _write_audit(options, found)
    _tell(found, chosen)
    _warn_of_confidence(subject, chosen is not None)


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot end well before anything is read."""
    missing = [name for name in ("model", "data", "out") if getattr(options, name) is None]
    if missing:
        raise UserError(f"missing --{', --'.join(missing)}; cdc-predict --help shows examples")
    for flag, share in (("--min-confidence", options.min_confidence), ("--target-accuracy", options.target_accuracy)):
        if share is not None and not 0 < share <= 1:  # NaN, too
            raise UserError(f"{flag} takes a number above 0 and up to 1, such as 0.95; found {share:g}")
    if options.batch_size < 1:
        raise UserError(f"--batch-size takes at least 1 image; found {options.batch_size}")
    out = Path(options.out)
    if options.audit is not None:
        from cdc_plugin.audit.write import check_audit

        if options.to is not None:
            raise UserError(f"--audit writes files of its own; leave --to {options.to} out, or predict a second time")
        check_audit(out, options.audit, options.overwrite)
        return
    from cdc_plugin import outputs

    options.to = outputs.check(options.to, out, options.overwrite)
    outputs.check_source(options.to, options.data, out)


def _warn_of_confidence(subject: Subject, relied_on: bool) -> None:
    """Say why confidences may mislead; what a run's own card warned of matters to those who rely on them."""
    for warning in subject.warnings if relied_on else ():
        print(f"warning: when this model was refined: {warning}", file=sys.stderr)
    if subject.heads == 1:
        print(
            f"note: {subject.path} ({subject.writer}) has no calibration head: its confidence is that of the old "
            f"model as it is; cdc-refine --backbone {subject.path} calibrates it",
            file=sys.stderr,
        )


def _write(options: argparse.Namespace, found: Prediction) -> None:
    from cdc_plugin import outputs

    table = found.table
    files = outputs.write(options.to, Path(options.out), table, options.data)
    sorted_images = f"{len(table):,} image{'s' if len(table) > 1 else ''}"
    mean = _percent(table["confidence"].mean())
    print(f"{sorted_images}, mean confidence {mean}: {', '.join(map(str, files))}")
    advice = outputs.advice(options.to, Path(options.out), options.data)
    if advice is not None:
        print(advice)


def _write_audit(options: argparse.Namespace, found: Prediction) -> None:
    from cdc_plugin.audit.write import write_audit
    from cdc_plugin.data.stream import read_images

    folder = Path(options.out)
    files = write_audit(
        folder,
        found.table,
        options.audit,
        options.seed,
        lambda rows: read_images(options.data, AUDIT_SIDE, found.places[rows]),
        f"{found.source} by {options.model}",
        options.overwrite,
    )
    drawn = min(options.audit, len(found.table))
    print(f"{drawn:,} of {len(found.table):,} images to check by hand: {', '.join(map(str, files))}")
    print(f"open {files[-1]} in a browser, answer, save to the same folder, then: cdc-predict --answers {folder}")


def _tell(found: Prediction, chosen: Acceptance | None) -> None:
    table = found.table
    if chosen is not None:
        print(_selected(chosen, table["confidence"].max()))
    if "outlier" in (table.dtype.names or ()) and table["outlier"].any():
        outliers = int(table["outlier"].sum())
        are = "image is" if outliers == 1 else "images are"
        among = "" if chosen is None else f", {int((table['outlier'] & chosen.mask).sum()):,} of them selected"
        print(
            f"{outliers:,} {are} unlike those the model was refined on (column outlier){among}; "
            "no confidence is to be relied on there"
        )
    for name, reason in found.skipped:
        print(f"skipped {name}: {reason}", file=sys.stderr)


def _tell_answers(options: argparse.Namespace) -> None:
    given = [name for name in ("model", "data", "out", "audit") if getattr(options, name) is not None]
    if given:
        raise UserError(f"--answers reads a finished audit; leave --{', --'.join(given)} out")
    from cdc_plugin.audit.answers import read_answers

    print("\n".join(read_answers(Path(options.answers)).lines()))


def _select(options: argparse.Namespace, found: Prediction) -> Acceptance | None:
    from cdc_plugin.selective import accept_above, accept_to_target

    if options.min_confidence is not None:
        return accept_above(found.table["confidence"], options.min_confidence)
    if options.target_accuracy is not None:
        return accept_to_target(found.table["confidence"], options.target_accuracy)
    return None


def _selected(chosen: Acceptance, surest: float) -> str:
    """One line on what may be relied on."""
    if chosen.threshold is None or chosen.expected_accuracy is None:
        return f"no image selected: the surest has confidence {surest:.6f}"
    count, total = chosen.count, len(chosen.mask)
    share = f"{count:,} of {total:,} images ({_percent(chosen.coverage)})" if count < total else f"all {total:,} images"
    # As many digits as the table has: given as --min-confidence it selects the same images again.
    threshold = f"{chosen.threshold:.6f}".rstrip("0").rstrip(".")
    return f"{share} selected: confidence at least {threshold}, expected accuracy {_percent(chosen.expected_accuracy)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
