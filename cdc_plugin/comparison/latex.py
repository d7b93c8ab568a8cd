"""The table of methods for a paper: booktabs, best in bold, second best underlined, several sets side by side."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_plugin.metrics.over_seeds import (
    Row,
    better,
    by_set,
    columns_of,
    deviation_words,
    mean_words,
    partial_words,
    ranks,
    row_names,
    seeds_words,
)
from cdc_plugin.report.tables import HIGHER, LOWER
from cdc_plugin.report.words import writable

MAIN = ("ACC", "ARI", "ECE")  # what the paper's main table has of every set
ARROWS = {HIGHER: r"$\uparrow$", LOWER: r"$\downarrow$"}
MARKS = ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")
# A bracket or star at the start of a line would be read as an argument of the \\ before it.
ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def to_latex(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """One ``table`` for all rows: sets side by side as in the paper's main table.

    Args:
        columns: those of every set. None: of one set all in which a row has a value; of several ACC, ARI and ECE.
    """
    sets = by_set(rows)
    if not sets:
        return ""
    shown = {name: list(columns) if columns is not None else _columns(found, len(sets)) for name, found in sets.items()}
    cells = {name: _cells(found, shown[name]) for name, found in sets.items()}
    keys = {(row.method, row.label): row.group for row in rows}
    users = {(row.method, row.label) for row in rows if row.uses_labels}
    names = {
        (row.method, row.label): name
        for found in sets.values()
        for row, name in zip(found, row_names(found), strict=True)
    }
    lines = []
    before = next(iter(keys.values()))
    for key, group in keys.items():
        lines += [r"\midrule"] if group != before else []
        before = group
        found = [cell for name in sets for cell in cells[name].get(key, ["-"] * len(shown[name]))]
        lines.append(" & ".join([_escape(names[key]) + ("$^*$" if key in users else ""), *found]) + r" \\")
    text = "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering\small",
            rf"\caption{{{_caption(rows, shown)}}}",
            r"\label{tab:comparison}",
            rf"\begin{{tabular}}{{l{'c' * sum(map(len, shown.values()))}}}",
            r"\toprule",
            *_heads(shown),
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )
    return writable(text + "\n")


def _columns(rows: Sequence[Row], sets: int) -> list[str]:
    """All that there are for one set; beside others the main ones, or the confidence where nothing can be measured."""
    present = columns_of(rows)
    return present if sets == 1 else [column for column in MAIN if column in present] or ["CONF"]


def _cells(rows: Sequence[Row], columns: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    places = [ranks(rows, column) for column in columns]
    return {
        (row.method, row.label): [
            _cell(row, column, place[index]) for column, place in zip(columns, places, strict=True)
        ]
        for index, row in enumerate(rows)
    }


def _cell(row: Row, column: str, place: int) -> str:
    value = row.values.get(column)
    if value is None:
        return "-"
    deviation = deviation_words(column, value)
    spread = rf"{{\tiny$\pm${deviation}}}" if deviation else ""
    return MARKS[place].format(mean_words(column, value)) + spread + partial_words(row, column)


def _heads(shown: dict[str, list[str]]) -> list[str]:
    names = [_escape(column) + ARROWS.get(better(column), "") for columns in shown.values() for column in columns]
    below = " & ".join(["method" if len(shown) == 1 else "", *names]) + r" \\"
    if len(shown) == 1:
        return [below]
    spans, rules, start = ["method"], [], 2
    for name, columns in shown.items():
        spans.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{_escape(name)}}}")
        rules.append(rf"\cmidrule(lr){{{start}-{start + len(columns) - 1}}}")
        start += len(columns)
    return [" & ".join(spans) + r" \\", "".join(rules), below]


def _caption(rows: Sequence[Row], shown: dict[str, list[str]]) -> str:
    parts = [f"Mean and standard deviation over {seeds_words(rows)}, in \\%."]
    if max(row.seeds for row in rows) == 1:
        parts = ["One seed, in \\%."]
    if len(shown) == 1:
        parts.insert(0, f"{_escape(rows[0].set)}.")
    parts.append(r"Best figures are \textbf{bold}, second best \underline{underlined}.")
    if any(row.uses_labels for row in rows):
        parts.append("$^*$ uses labels: for reference, not ranked.")
    if any(partial_words(row, column) for row in rows for column in shown[row.set]):
        parts.append("$(n)$: undefined in some seeds, mean over the $n$ others.")
    return " ".join(parts)


def _escape(words: str) -> str:
    return "".join(ESCAPES.get(sign, sign) for sign in " ".join(words.split()))
