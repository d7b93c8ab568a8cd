"""From the answers in audit.csv (yes and no, or names of classes) to a bound on the accuracy of all images."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdc_plugin.errors import DataError, say
from cdc_plugin.evaluation.audit.sheet import AuditRow, Sheet, read_sheet
from cdc_plugin.metrics import adaptive_calibration_error, correct_samples

YES = {"y", "yes", "j", "ja", "true", "wahr", "right", "correct", "belongs"}
NO = {"n", "no", "nein", "false", "falsch", "wrong", "incorrect"}
DIGITS = {"1": True, "0": False}  # names of classes, too, where other names are used beside them
NOT_ANSWERED = {"", "?", "u", "unsure", "can't tell", "cannot tell", "unknown", "-"}
MANY_UNANSWERED = 0.1
ANSWERS_PER_BIN, MOST_BINS = 10, 15
REPEATS = 400


@dataclass(frozen=True)
class Accuracy:
    """Right answers, the mean confidence that was stated for them, and bounds on the accuracy at 95 %."""

    right: int
    answered: int
    confidence: float
    lower: float
    upper: float
    at_least: float

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.1%} ({self.right} of {self.answered} right), with 95% certainty between "
            f"{self.lower:.1%} and {self.upper:.1%}, or at least {self.at_least:.1%}"
        )

    @property
    def accuracy(self) -> float:
        return self.right / self.answered


@dataclass(frozen=True)
class AuditResult:
    """What the answers say about all images, in fractions of 1."""

    source: str
    image_count: int
    drawn: int
    question: str
    overall: Accuracy
    selected: Accuracy | None  # None where no answered image is selected
    calibration_error: float  # overstated by few answers
    calibration_error_by_chance: float  # all of it for a perfectly calibrated model
    bins: int  # with equal numbers of answers
    notes: tuple[str, ...]
    noun: str = "image"

    def lines(self) -> list[str]:
        """Return the result as lines for the terminal."""
        overall = self.overall
        verdict = "too high" if overall.confidence > overall.upper else "too low"
        if overall.lower <= overall.confidence <= overall.upper:
            verdict = "consistent with these answers"
        lines = [
            f"{overall.answered} of {self.drawn} {self.noun}s answered, drawn from {self.image_count:,} "
            f"({self.source}); the question was {say(self.question, self.noun)}",
            f"accuracy: {overall}",
        ]
        if self.selected is not None:
            lines.append(f"accuracy of the selected {self.noun}s: {self.selected}")
        lines += [
            f"stated confidence: {overall.confidence:.1%} on average, {verdict}",
            f"calibration error: {self.calibration_error:.1%} in {self.bins} bin{'s' if self.bins > 1 else ''}; a "
            f"perfectly calibrated model would show {self.calibration_error_by_chance:.1%} with so few answers",
            *(f"note: {say(note, self.noun)}" for note in self.notes),
        ]
        if overall.answered < self.drawn:
            lines.append(
                f"note: if every {self.noun} without an answer were wrong, the accuracy would still be at least "
                f"{compute_accuracy_bound(overall.right, self.drawn):.1%}"
            )
        return lines


def read_answers(path: Path) -> AuditResult:
    """Return what the answers in a file (or in the folder of an audit) say about the accuracy."""
    sheet = read_sheet(path)
    rows = [row for row in sheet.rows if _normalise(row) not in NOT_ANSWERED]
    words = [_normalise(row) for row in rows]
    if not rows:
        raise DataError(
            f"{path} holds no answers; open audit.html in a browser and save them from there, or write yes or no "
            "into the column 'answer'"
        )
    judged = [row for row, word in zip(rows, words, strict=True) if word in YES | NO]
    named = [row for row, word in zip(rows, words, strict=True) if word not in YES | NO | set(DIGITS)]
    if judged and named:
        raise DataError(
            f"{path} mixes yes or no ({judged[0].answer!r} for {judged[0].id}) with other words "
            f"({named[0].answer[:40]!r} for {named[0].id}); answer all with yes or no, or all with the name of "
            "what they show"
        )
    notes = _note_unanswered(sheet, len(rows))
    if named:
        right, note = _match_classes(rows, words)
        return _summarise(sheet, rows, right, "which class an image shows", [note, *notes])
    right = np.array([word in YES or DIGITS.get(word, False) for word in words])
    return _summarise(sheet, rows, right, "whether an image belongs to its cluster", notes)


def _summarise(
    sheet: Sheet, rows: list[AuditRow], right: NDArray[np.bool_], question: str, notes: list[str]
) -> AuditResult:
    confidence = np.array([row.confidence for row in rows])
    bins = min(max(len(rows) // ANSWERS_PER_BIN, 1), MOST_BINS)
    # Selected images come first in the order of the draw, so they are an audit of their own, except for at most one
    # draw: that of the stratum which holds both selected images and others.
    selected = np.array([bool(row.selected) for row in rows])
    if len(rows) == sheet.image_count:
        notes = [*notes, "every image was looked at: the interval is for further images of the same kind"]
    return AuditResult(
        source=sheet.source,
        image_count=sheet.image_count,
        drawn=sheet.drawn,
        question=question,
        overall=measure_answers(right, confidence),
        selected=measure_answers(right[selected], confidence[selected]) if selected.any() else None,
        calibration_error=adaptive_calibration_error(confidence, right, bins),
        calibration_error_by_chance=simulate_calibration_error(confidence, bins),
        bins=bins,
        notes=tuple(notes),
        noun=sheet.noun,
    )


def _match_classes(rows: list[AuditRow], words: list[str]) -> tuple[NDArray[np.bool_], str]:
    """Match clusters to classes so that most images are right; return which are, and a note on the bias of that.

    Simulated with errors spread over all classes, 10 clusters: 2, 5, 10, 20 answers per cluster overstate an accuracy
    of 30 % by 20, 6, 2, 0 points, one of 60 % by 3, 1, 0, 0, one of 80 % or more by 2 at most; clusters that have
    nothing to do with the classes seem 46, 32, 25, 20 % right instead of 10 %.
    """
    clusters = np.array([row.cluster for row in rows])
    _, classes = np.unique(words, return_inverse=True)
    right = correct_samples(clusters, classes, int(clusters.max()) + 1)
    per_cluster = len(rows) / len(np.unique(clusters))
    note = (
        f"clusters were matched to the {len(set(words))} names by these same answers ({per_cluster:.1f} per cluster), "
        "which overstates the accuracy: in simulations with 5 answers per cluster by 1 point at 60% and by 6 at 30%, "
        "with 2 per cluster by 3 and 20"
    )
    return right, note


def _note_unanswered(sheet: Sheet, answered: int) -> list[str]:
    """Warn of images without an answer: leaving them out is fair only if they are like the others."""
    notes = []
    removed = sheet.drawn - len(sheet.rows)
    if removed > 0:
        notes.append(f"{removed} of the {sheet.drawn} drawn images are not in the file; they count as not answered")
    unanswered = [row for row in sheet.rows if _normalise(row) in NOT_ANSWERED]
    low = np.quantile([row.confidence for row in sheet.rows], 0.25)
    unsure = sum(row.confidence < low for row in unanswered)
    if len(unanswered) >= 3 and 2 * unsure > len(unanswered):
        notes.append(
            f"{unsure} of the {len(unanswered)} images without an answer have a low confidence, so the measured "
            "accuracy is likely too high"
        )
    elif sheet.drawn - answered > MANY_UNANSWERED * sheet.drawn:
        notes.append(
            "images without an answer are left out; if they are the hard ones, the measured accuracy is too high"
        )
    return notes


def _normalise(row: AuditRow) -> str:
    # Spreadsheets and phones replace the apostrophe of "can't tell".
    return " ".join(row.answer.casefold().replace("\u2019", "'").split())


def compute_accuracy_interval(right: int, answered: int, certainty: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval, which holds the true accuracy in at least ``certainty`` of all audits.

    >>> low, high = compute_accuracy_interval(right=95, answered=100)
    >>> round(low, 3), round(high, 3)
    (0.887, 0.984)
    """
    from scipy.stats import binomtest  # late: takes a second, and refusals need none

    interval = binomtest(right, answered).proportion_ci(certainty, method="exact")
    return float(interval.low), float(interval.high)


def compute_accuracy_bound(right: int, answered: int, certainty: float = 0.95) -> float:
    """Return the one-sided Clopper-Pearson bound: the accuracy is lower in at most 1 - certainty of all audits."""
    from scipy.stats import binomtest

    return float(binomtest(right, answered, alternative="greater").proportion_ci(certainty, method="exact").low)


def simulate_calibration_error(confidence: NDArray[np.float64], bins: int) -> float:
    """Estimate what a perfectly calibrated model shows by chance: an absolute gap of few answers is never 0."""
    # The stated confidences are the true probabilities; the seed is fixed, so that equal ones give an equal figure.
    draws = np.random.default_rng(0).random((REPEATS, len(confidence))) < confidence
    return float(np.mean([adaptive_calibration_error(confidence, right, bins) for right in draws]))


def measure_answers(right: NDArray[np.bool_], confidence: NDArray[np.float64]) -> Accuracy:
    """Return the accuracy with its bounds, which hold for images of `draw_rows`: each is drawn with equal chance."""
    count, total = int(right.sum()), len(right)
    interval, bound = compute_accuracy_interval(count, total), compute_accuracy_bound(count, total)
    return Accuracy(count, total, float(confidence.mean()), *interval, bound)
