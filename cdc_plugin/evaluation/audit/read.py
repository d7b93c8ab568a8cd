"""From the answers in audit.csv, yes or no or names of classes, to a bound on the accuracy of all images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.errors import UserError
from cdc_plugin.evaluation.audit.bounds import bins_for, calibration_error_by_chance
from cdc_plugin.evaluation.audit.result import AuditResult, measure_answers
from cdc_plugin.evaluation.audit.sheet import AuditRow, Sheet, read_sheet
from cdc_plugin.metrics import adaptive_calibration_error, correct_samples

YES = {"y", "yes", "j", "ja", "true", "wahr", "right", "correct", "belongs"}
NO = {"n", "no", "nein", "false", "falsch", "wrong", "incorrect"}
DIGITS = {"1": True, "0": False}  # also names of classes, where other names stand beside them
NOT_ANSWERED = {"", "?", "u", "unsure", "can't tell", "cannot tell", "unknown", "-"}
MANY_UNANSWERED = 0.1


def read_answers(path: Path) -> AuditResult:
    """What the answers in a file (or in the folder of an audit) say."""
    sheet = read_sheet(path)
    answered = [row for row in sheet.rows if _word(row) not in NOT_ANSWERED]
    if not answered:
        raise UserError(
            f"{path} holds no answers; open audit.html in a browser and save them from there, or write yes or no "
            "into the column 'answer'"
        )
    words = [_word(row) for row in answered]
    notes = _unanswered_notes(sheet, answered)
    said = [row for row in answered if _word(row) in YES | NO]
    named = [row for row in answered if _word(row) not in YES | NO | set(DIGITS)]
    if said and named:
        raise UserError(
            f"{path} mixes yes or no ({said[0].answer!r} for {said[0].id}) with other words "
            f"({named[0].answer[:40]!r} for {named[0].id}); answer all with yes or no, or all with the name of what "
            "is to be seen"
        )
    if not named:
        right = np.array([word in YES or DIGITS.get(word, False) for word in words])
        judged = "whether an image belongs to its cluster"
    else:
        right, note = _right_by_class(answered, words)
        notes = [note, *notes]
        judged = "the class that an image shows"
    return _result(sheet, answered, right, judged, notes)


def _result(
    sheet: Sheet, answered: list[AuditRow], right: NDArray[np.bool_], judged: str, notes: list[str]
) -> AuditResult:
    confidence = np.array([row.confidence for row in answered])
    bins = bins_for(len(answered))
    # Selected images come first in the order of the draw, so this is an audit of their own, but for one draw at
    # most: that of the stratum which holds both selected images and others.
    selected = np.array([bool(row.selected) for row in answered])
    if len(answered) == sheet.images:
        notes = [*notes, "every image was looked at: the interval is for further images of the same kind"]
    return AuditResult(
        source=sheet.source,
        images=sheet.images,
        drawn=sheet.drawn,
        judged=judged,
        everything=measure_answers(right, confidence),
        selected=measure_answers(right[selected], confidence[selected]) if selected.any() else None,
        calibration_error=adaptive_calibration_error(confidence, right, bins),
        calibration_error_by_chance=calibration_error_by_chance(confidence, bins),
        bins=bins,
        notes=tuple(notes),
    )


def _right_by_class(answered: list[AuditRow], words: list[str]) -> tuple[NDArray[np.bool_], str]:
    """Right is an image whose cluster is matched to its class, by the matching that makes the most images right.

    Simulated with errors spread over all classes, 10 clusters: 2, 5, 10, 20 answers a cluster show an accuracy of
    30 % by 20, 6, 2, 0 points too high, one of 60 % by 3, 1, 0, 0, one of 80 % or more by 2 at most; clusters
    that have nothing to do with the classes seem 46, 32, 25, 20 % right instead of 10 %.
    """
    clusters = np.array([row.cluster for row in answered])
    _, classes = np.unique(words, return_inverse=True)
    right = correct_samples(clusters, classes, int(clusters.max()) + 1)
    per_cluster = len(answered) / len(np.unique(clusters))
    note = (
        f"clusters were matched to the {len(set(words))} names by these same answers, {per_cluster:.1f} a cluster, "
        "which flatters: in simulations with 5 a cluster by 1 point at 60 % accuracy and by 6 at 30 %, with 2 a "
        "cluster by 3 and 20"
    )
    return right, note


def _unanswered_notes(sheet: Sheet, answered: list[AuditRow]) -> list[str]:
    """Images without an answer are left out, which is only fair if they are like the others."""
    notes = []
    gone = sheet.drawn - len(sheet.rows)
    if gone > 0:
        notes.append(f"{gone} of the {sheet.drawn} drawn images are not in the file; they count as not answered")
    open_rows = [row for row in sheet.rows if _word(row) in NOT_ANSWERED]
    low = np.quantile([row.confidence for row in sheet.rows], 0.25)
    among_lowest = sum(row.confidence < low for row in open_rows)
    many = sheet.drawn - len(answered) > MANY_UNANSWERED * sheet.drawn
    if len(open_rows) >= 3 and 2 * among_lowest > len(open_rows):
        notes.append(
            f"{among_lowest} of the {len(open_rows)} images without an answer are among the least sure, so the "
            "accuracy is likely too high"
        )
    elif many:
        notes.append("images without an answer are left out; if they are the hard ones, the accuracy is too high")
    return notes


def _word(row: AuditRow) -> str:
    # Spreadsheets and telephones turn the apostrophe of "can't tell".
    return " ".join(row.answer.casefold().replace("\u2019", "'").split())
