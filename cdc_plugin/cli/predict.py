"""The command ``cdc-predict``: new images into clusters, those to rely on marked, some to check by hand."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdc_plugin.cli import common
from cdc_plugin.errors import ConfigError, flatten, join_words, say

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cdc_plugin.evaluation.models import EvaluatedModel
    from cdc_plugin.evaluation.new_kinds import NewKinds
    from cdc_plugin.evaluation.predict import Prediction, Predictor
    from cdc_plugin.metrics.confidence import Acceptance

AUDIT_SIDE = 224  # pixels at which a person can tell what an image shows
EPILOG = """examples:
  cdc-predict --model runs/photos --data new_photos/ --out new.csv
  cdc-predict --model runs/photos --data new_photos/ --out new.csv --min-confidence 0.9
  cdc-predict --model runs/photos --data new_photos/ --out new.parquet --target-accuracy 0.95
  cdc-predict --model runs/photos --data new_photos/ --out sorted/ --to folders
  cdc-predict --model runs/photos --data new_photos/ --out new.csv --level 3  # in three groups of clusters
  cdc-predict --model runs/photos --data new_photos/ --out new.csv --new-kinds  # what no cluster fits, in groups
  cdc-predict --model runs/photos --data new_photos/ --out check/ --audit 100  # 100 images to check by hand
  cdc-predict --answers check/  # what the answers say of the accuracy

Images of any number are read one chunk after the other. Labels are not looked at.
In a .csv, names that a spreadsheet would compute or break (=1+1.png) stand behind a ' and are escaped as in JSON.
Of many images, finished parts are kept beside --out: after a fault the same command continues with the others.
Several GPUs or machines share the work: torchrun --nproc-per-node 4 -m cdc_plugin predict --model ...
"""


def predict_parser() -> argparse.ArgumentParser:
    """Return the options of ``cdc-predict``."""
    parser = common.make_parser("cdc-predict", "Sort new images into the clusters of a finished run.", EPILOG)
    parser.set_defaults(device="auto", seed=0)
    what = parser.add_argument_group("what to sort")
    what.add_argument("--model", metavar="DIR", help="result folder of cdc-refine, or a clustering checkpoint")
    common.add_settings(what, "data", help="folder, image, .npz, .npy, tar shards or hf:NAME:SPLIT")
    common.add_features(what)
    common.add_settings(what, "head", "device")
    merged = "merge the clusters to N groups, from coarse to fine as report.html draws them (columns cluster and leaf)"
    what.add_argument("--level", type=int, metavar="N", help=merged)
    what.add_argument(
        "--batch-size", type=int, default=256, metavar="B", help="images at once (default 256, fewer large ones)"
    )

    where = parser.add_argument_group("where it goes")
    where.add_argument("--out", metavar="PATH", help="table to write, or a folder where --to or --audit make one")
    formats = "csv, parquet, folders, label-studio, fiftyone or cvat (default: by the ending of --out)"
    where.add_argument("--to", metavar="FORMAT", help=formats)
    where.add_argument("--overwrite", action="store_true", help="replace what is at --out")

    which = parser.add_argument_group("which predictions to rely on (column selected; no row is dropped)")
    sure = which.add_mutually_exclusive_group()
    sure.add_argument("--min-confidence", type=float, metavar="P", help="those at least so sure, such as 0.9")
    largest = "as many as possible, so that their mean confidence reaches P, such as 0.95"
    sure.add_argument("--target-accuracy", type=float, metavar="P", help=largest)

    kinds = parser.add_argument_group("what no cluster fits")
    grouped = "collect images that no cluster fits in groups (column new_kind), and show them on a page beside --out"
    kinds.add_argument("--new-kinds", action="store_true", help=grouped)

    check = parser.add_argument_group("check by hand")
    drawn = "write N images, drawn by confidence, to the folder --out"
    check.add_argument("--audit", type=int, metavar="N", help=drawn)
    common.add_settings(check, "seed", help="of the draw (default: 0)")
    check.add_argument("--answers", metavar="FILE", help="read the answers back; needs no model and no data")
    return parser


def predict_command(arguments: Sequence[str] | None = None) -> None:
    """Run ``cdc-predict``."""
    kept = "finished parts are kept, continue with"
    with common.run_command(predict_parser(), arguments, kept) as options:
        if options.answers is not None:
            _print_answers(options)
            return
        if common.is_main_process():  # torchrun ends the others, and one says why
            _check(options)
        from cdc_plugin.evaluation.models import open_model
        from cdc_plugin.evaluation.predict import prepare
        from cdc_plugin.evaluation.predict_resume import choose_parts_folder, predict_in_parts
        from cdc_plugin.metrics.confidence import accept_above, accept_inside, accept_to_target
        from cdc_plugin.training.progress import log, show_progress
        from cdc_plugin.training.runtime import choose_device, init_distributed

        data = options.data
        if options.features:
            from cdc_plugin.data.sources.features import describe_features

            data = describe_features(options.features, data, labels=False)

        def start() -> tuple[EvaluatedModel, Predictor]:
            device = choose_device(options.device)
            subject = open_model(options.model, head=options.head)
            if options.new_kinds and subject.model.prototypes is None:
                raise ConfigError(
                    f"--new-kinds needs a model that knows what is typical of its clusters, as cdc-refine writes it; "
                    f"type: cdc-refine --backbone {options.model} --data DATA, or leave --new-kinds out"
                )
            return subject, prepare(subject.model, data, device, options.batch_size, options.level, options.new_kinds)

        folder = choose_parts_folder(Path(options.out))
        with init_distributed() as distributed:
            if not distributed.main:
                log.setLevel("ERROR")  # what is to be said of model and images is said once
            started: list[tuple[EvaluatedModel, Predictor]] = []
            distributed.broadcast_from_main(lambda: started.append(start()))  # its failure is reported once
            subject, predictor = started[0] if started else start()
            found = predict_in_parts(predictor, folder, distributed, show_progress)
        if found is None:
            return
        kinds, outside = None, found.column("outlier")
        if options.new_kinds and subject.model.prototypes is not None:
            from cdc_plugin.evaluation.new_kinds import find_new_kinds

            kinds = find_new_kinds(found, subject.model.prototypes, options.seed)
            outside = (kinds.kind >= 0) if outside is None else outside | (kinds.kind >= 0)
        chosen = None
        if options.min_confidence is not None:
            chosen = accept_inside(outside, found.confidence, accept_above, options.min_confidence)
        elif options.target_accuracy is not None:
            chosen = accept_inside(outside, found.confidence, accept_to_target, options.target_accuracy)
        more: dict[str, NDArray[Any]] = {} if chosen is None else {"selected": chosen.mask}
        if kinds is not None:
            more["new_kind"] = kinds.kind
        if options.audit is None:
            _write(options, found, more, folder)
            if kinds is not None:
                _write_kinds(options, found, more, data, kinds, subject)
        else:
            _write_audit(options, found, more, data)
        _print_outcome(found, chosen)
        shutil.rmtree(folder, ignore_errors=True)
        _warn_of_confidence(subject, chosen is not None)


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot end well before anything is read."""
    missing = [name for name in ("model", "data", "out") if getattr(options, name) is None]
    if options.features and "data" in missing:
        missing.remove("data")
    if missing:
        raise ConfigError(f"missing --{', --'.join(missing)}; cdc-predict --help shows examples")
    for flag, share in (("--min-confidence", options.min_confidence), ("--target-accuracy", options.target_accuracy)):
        if share is not None and not 0 < share <= 1:  # NaN, too
            raise ConfigError(f"{flag} takes a number above 0 and up to 1, such as 0.95; found {share:g}")
    if options.batch_size < 1:
        raise ConfigError(f"--batch-size takes at least 1 image; found {options.batch_size}")
    out = Path(options.out)
    if options.new_kinds:
        from cdc_plugin.evaluation.new_kinds import check_page

        if options.audit is not None:
            raise ConfigError(
                "--audit and --new-kinds write pages of their own; leave one out, or predict a second time"
            )
        check_page(out, options.overwrite)
    if options.audit is not None:
        from cdc_plugin.evaluation.audit.write import check_audit

        if options.to is not None:
            raise ConfigError(f"--audit writes files of its own; leave --to {options.to} out, or predict a second time")
        check_audit(out, options.audit, options.overwrite)
        return
    from cdc_plugin.evaluation import writers as outputs

    options.to = outputs.choose_format(options.to, out, options.overwrite)
    outputs.check_source(options.to, options.data or options.features[0], out)


def _warn_of_confidence(subject: EvaluatedModel, relied_on: bool) -> None:
    """Say why confidences may mislead; what a run's own card warned of matters to those who rely on them."""
    lines = [f"warning: when this model was refined: {warning}" for warning in subject.warnings if relied_on]
    if subject.heads == 1:
        lines.append(
            f"note: {subject.path} ({subject.writer}) has no calibration head: its confidence is that of the old "
            f"model as it is; cdc-refine --backbone {subject.path} calibrates it"
        )
    for line in lines:
        print(line, file=sys.stderr)


def _write(options: argparse.Namespace, found: Prediction, more: dict[str, NDArray[Any]], folder: Path) -> None:
    from cdc_plugin.evaluation import writers as outputs

    out = Path(options.out)
    # Among the parts, where there are some: what a process that is killed meanwhile leaves goes with them.
    among_parts = options.to in ("csv", "parquet") and folder.is_dir()
    files = outputs.write(
        options.to, folder / out.name if among_parts else out, found.tables(**more), options.data or out
    )
    if among_parts:
        files = [files[0].replace(out)]
    count, mean = len(found.confidence), common.format_percent(found.confidence.mean())
    print(f"{count:,} {found.noun}{'s' if count > 1 else ''}, mean confidence {mean} %: {', '.join(map(str, files))}")
    advice = outputs.explain_import(options.to, out, options.data or options.features[0])
    if advice is not None:
        print(advice)


def _write_audit(options: argparse.Namespace, found: Prediction, more: dict[str, NDArray[Any]], data: Any) -> None:
    from cdc_plugin.evaluation.audit.write import write_audit
    from cdc_plugin.evaluation.records import concatenate_tables

    folder = Path(options.out)
    table, source = concatenate_tables(found.tables(**more)), f"{found.source} by {options.model}"

    read = partial(_read_pictures, options, found, data)
    how = options.audit, options.seed, read, source, options.overwrite
    files = write_audit(folder, table, *how, found.noun)
    count = len(found.confidence)
    print(f"{min(options.audit, count):,} of {count:,} {found.noun}s to check by hand: {', '.join(map(str, files))}")
    print(f"open {files[-1]} in a browser, answer, save to the same folder, then: cdc-predict --answers {folder}")


def _read_pictures(options: argparse.Namespace, found: Prediction, data: Any, rows: NDArray[Any]) -> Any:
    """Return the pixels of some rows of the table, None for samples without a picture."""
    if options.features:
        return [data.picture(place) for place in found.positions[rows]]
    from cdc_plugin.data.stream import read_images

    return read_images(options.data, AUDIT_SIDE, found.positions[rows])


def _write_kinds(
    options: argparse.Namespace,
    found: Prediction,
    more: dict[str, NDArray[Any]],
    data: Any,
    kinds: NewKinds,
    subject: EvaluatedModel,
) -> None:
    """Write the page of new kinds, if there are any, and say what to type next."""
    from cdc_plugin.evaluation.new_kinds import write_page
    from cdc_plugin.evaluation.records import concatenate_tables

    print(say(kinds.describe(), found.noun))
    if not kinds.sizes:
        return
    clusters = subject.model.clusters + len(kinds.sizes)
    inputs = ["--features", "OLD_AND_NEW.npy"] if options.features else ["--data", "OLD_AND_NEW"]
    words = ["cdc-refine", "--backbone", options.model, *inputs, "--clusters", clusters, "--init", "grow"]
    command = join_words(words)
    facts = [(f"{found.noun}s", f"{len(kinds.kind):,} from {found.source}"), ("model", str(options.model))]
    table, read = concatenate_tables(found.tables(**more)), partial(_read_pictures, options, found, data)
    page = write_page(Path(options.out), table, kinds, read, facts, command)
    together = f"put old and new {found.noun}s in one place, then"
    print(f"look at {page}; to give them clusters of their own, {together}: {command}")


def _print_outcome(found: Prediction, chosen: Acceptance | None) -> None:
    if chosen is not None:
        print(say(_describe_selection(chosen, found.confidence.max()), found.noun))
    outlier = found.column("outlier")
    if outlier is not None and outlier.any():
        subject = f"{outlier.sum():,} {'image is' if outlier.sum() == 1 else 'images are'}"
        among = "" if chosen is None else ", none of them selected"
        unlike = f"{subject} unlike those the model was refined on (column outlier){among}"
        print(f"{say(unlike, found.noun)}; no confidence is to be relied on there")
    for name, reason in found.skipped:
        print(flatten(f"skipped {name}: {reason}"), file=sys.stderr)
    for warning in found.warnings:
        print(f"warning: {warning['text']}", file=sys.stderr)


def _print_answers(options: argparse.Namespace) -> None:
    given = [name for name in ("model", "data", "out", "audit") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"--answers reads a finished audit; leave --{', --'.join(given)} out")
    from cdc_plugin.evaluation.audit.read import read_answers

    print("\n".join(read_answers(Path(options.answers)).lines()))


def _describe_selection(chosen: Acceptance, surest: float) -> str:
    if chosen.threshold is None or chosen.expected_accuracy is None:
        return f"no image selected: the surest has confidence {surest:.6f}"
    count, total = chosen.count, len(chosen.mask)
    percent = common.format_percent
    share = (
        f"{count:,} of {total:,} images ({percent(chosen.coverage)} %)" if count < total else f"all {total:,} images"
    )
    # As many digits as the table has: given as --min-confidence it selects the same images again.
    threshold = f"{chosen.threshold:.6f}".rstrip("0").rstrip(".")
    expected = percent(chosen.expected_accuracy)
    return f"{share} selected: confidence at least {threshold}, expected accuracy {expected} %"
