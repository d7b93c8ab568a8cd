"""Write the table of methods as CSV, Markdown, LaTeX (booktabs) and text for the terminal."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cdc_plugin.comparison.table import Record, Row, collect_figures, name_outside_data
from cdc_plugin.data.atomic import join_csv
from cdc_plugin.metrics import over_seeds
from cdc_plugin.report.words import TITLES, shorten, writable

UNDEFINED = "-"
LONGEST = 48  # characters of a name in the terminal
SCORES = ("AUROC", "FPR95", "AUPR")
FIRST = (*over_seeds.FIGURES, "AECE", "CECE", "BRIER", "NLL")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~&$])")
MAIN = ("ACC", "ARI", "ECE")  # the columns of every set in the paper's main table
LATEX_ARROWS = {over_seeds.HIGHER: r"$\uparrow$", over_seeds.LOWER: r"$\downarrow$"}
LATEX_MARKS = ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")  # others, best, second best
# A bracket or star at the start of a line would be read as an argument of the \\ before it.
LATEX_ESCAPES = {sign: f"{{{sign}}}" for sign in "[]*"} | {sign: f"\\{sign}" for sign in "&%$#_{}"}
LATEX_NAMES = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
LATEX_ESCAPES |= {sign: rf"\text{name}{{}}" for sign, name in LATEX_NAMES.items()}


def to_csv(rows: Sequence[Row]) -> str:
    """Return one line per row: means and deviations as fractions, times in seconds; empty where undefined."""
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    head = ["set", "group", "method", "label", "uses_labels", "seeds"]
    lines: list[list[Any]] = [[*head, *(part for column in columns for part in (column, f"{column} deviation"))]]
    for row in rows:
        values = [row.values.get(column) for column in columns]
        numbers = [part for value in values for part in ((value.mean, value.deviation) if value else (None, None))]
        lines.append([row.set, row.group, row.method, row.label, int(row.uses_labels), row.seeds, *numbers])
    return _join_csv(lines)


def records_csv(records: Sequence[Record]) -> str:
    """Return one line for every row of every cell, with every number it has, for further statistics."""
    names = name_outside_data(records)
    head = ["set", "group", "method", "label", "uses_labels", "seed", "images", "clusters"]
    cells = [
        ({**record, "label": row["label"]}, collect_figures(record, row, names, SCORES))
        for record in records
        for row in record["rows"]
    ]
    present = dict.fromkeys(column for _, figures in cells for column in figures)
    columns = sorted(present, key=lambda column: FIRST.index(column) if column in FIRST else len(FIRST))
    lines: list[list[Any]] = [[*head, *columns, "settings"]]
    for record, figures in cells:
        facts = {**record, "uses_labels": int(record["uses_labels"])}
        settings = json.dumps(record.get("settings") or {}, sort_keys=True, default=str)
        lines.append([*(facts[key] for key in head), *(figures.get(column) for column in columns), settings])
    return _join_csv(lines)


def to_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table per set, of all ``columns`` with a value unless given; best figures without labels are marked."""
    parts = []
    for name, members in over_seeds.by_set(rows).items():
        shown = over_seeds.columns_of(members) if columns is None else columns
        titles = [
            f"{_escape_markdown(TITLES.get(column, column))} {over_seeds.better(column)}".strip() for column in shown
        ]
        lines = [["method", *titles], ["---", *(["---:"] * len(shown))]]
        places = [over_seeds.ranks(members, column) for column in shown]
        for index, (row, label) in enumerate(zip(members, over_seeds.row_names(members), strict=True)):
            marks = [("", "**", "*")[place[index]] for place in places]
            cells = [f"{mark}{_format_cell(row, column)}{mark}" for mark, column in zip(marks, shown, strict=True)]
            lines.append([_escape_markdown(label) + (r" \*" if row.uses_labels else ""), *cells])
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        notes = "  \n".join(_explain(members, shown, r"\*"))
        parts.append(f"**{_escape_markdown(name)}**\n\n{table}\n\n{notes}\n")
    return writable("\n".join(parts))


def to_latex(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return one ``table`` for all rows, with sets side by side as in the paper's main table.

    Columns, if not given, are all in which a row has a value; of several sets ACC, ARI and ECE, or the confidence.
    """
    sets = over_seeds.by_set(rows)
    if not sets:
        return ""
    shown = {
        name: over_seeds.columns_of(members) if columns is None else list(columns) for name, members in sets.items()
    }
    if columns is None and len(sets) > 1:
        shown = {name: [c for c in MAIN if c in present] or ["CONF"] for name, present in shown.items()}
    cells: dict[tuple[str, str, str], list[str]] = {}
    names: dict[tuple[str, str], str] = {}
    for name, members in sets.items():
        places = [(column, over_seeds.ranks(members, column)) for column in shown[name]]
        for index, (row, label) in enumerate(zip(members, over_seeds.row_names(members), strict=True)):
            marks = [(column, LATEX_MARKS[place[index]]) for column, place in places]
            cells[name, row.method, row.label] = [_format_cell(row, *each, r"{{\tiny$\pm${}}}") for each in marks]
            names[row.method, row.label] = label
    lines, group = [], rows[0].group
    for key, row in {(row.method, row.label): row for row in rows}.items():
        if row.group != group:
            lines.append(r"\midrule")
            group = row.group
        figures = [cell for name in sets for cell in cells.get((name, *key), [UNDEFINED] * len(shown[name]))]
        lines.append(_join_latex([_escape_latex(names[key]) + ("$^*$" if row.uses_labels else ""), *figures]))
    notes = _explain(rows, {column for members in shown.values() for column in members}, "$^*$")
    title = f"{_escape_latex(rows[0].set)}. " if len(sets) == 1 else ""
    best = r"Best figures are \textbf{bold}, second best \underline{underlined}."
    text = [
        r"% \usepackage{booktabs}",
        r"\begin{table}[t]",
        r"\centering\small",
        rf"\caption{{{title}{' '.join(notes)} In \%. {best}}}",
        r"\label{tab:comparison}",
        rf"\begin{{tabular}}{{l{'c' * sum(map(len, shown.values()))}}}",
        r"\toprule",
        *_head_latex(shown),
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return writable("\n".join(text) + "\n")


def to_text(rows: Sequence[Row], columns: Sequence[str] | None = None, width: int | None = None) -> str:
    """Return a table per set, for a terminal of that width; columns that do not fit follow in a block below."""
    parts = []
    for name, members in over_seeds.by_set(rows).items():
        shown = over_seeds.columns_of(members) if columns is None else columns
        labels = [
            shorten(_flatten(label), LONGEST) + ("*" if row.uses_labels else "")
            for row, label in zip(members, over_seeds.row_names(members), strict=True)
        ]
        first = [f"{shorten(_flatten(name), LONGEST)}, in %", *labels]
        others = [
            [_flatten(TITLES.get(column, column)), *(_format_cell(row, column) for row in members)] for column in shown
        ]
        parts.append("\n\n".join([*_align(first, others, width), "\n".join(_explain(members, shown, "*"))]))
    return writable("\n\n".join(parts))


def _align(first: list[str], others: list[list[str]], width: int | None) -> Iterable[str]:
    """Yield blocks of aligned columns, as many beside the first one as fit."""
    left = max(len(cell) for cell in first) + 2
    blocks: list[list[list[str]]] = [[]]
    used = left
    for column in others:
        needed = max(len(cell) for cell in column) + 2
        if width is not None and blocks[-1] and used + needed > width:
            blocks.append([])
            used = left
        blocks[-1].append([f"{cell:>{needed}s}" for cell in column])
        used += needed
    for block in blocks:
        lines = zip([f"{cell:{left}s}" for cell in first], *block, strict=True)
        yield "\n".join("".join(cells).rstrip() for cells in lines)


def _format_cell(row: Row, column: str, mean: str = "{}", deviation: str = " ± {}") -> str:
    value = row.values.get(column)
    if value is None:
        return UNDEFINED
    spread = over_seeds.deviation_words(column, value)
    words = mean.format(over_seeds.mean_words(column, value)) + (deviation.format(spread) if spread else "")
    return words + over_seeds.partial_words(row, column)


def _explain(rows: Sequence[Row], columns: Iterable[str], star: str) -> list[str]:
    """Return the sentences that a reader needs to read the table."""
    several = max(row.seeds for row in rows) > 1
    average = f"Mean and standard deviation over {over_seeds.seeds_words(rows)}."
    notes = [average if several else "One seed: no deviation."]
    if any(row.uses_labels for row in rows):
        notes.append(f"{star} uses labels: for reference only, not ranked.")
    if any(over_seeds.partial_words(row, column) for row in rows for column in columns):
        notes.append("(n): undefined for some seeds, mean over the n others.")
    return notes


def _head_latex(shown: dict[str, list[str]]) -> list[str]:
    names = [
        _escape_latex(TITLES.get(column, column)) + LATEX_ARROWS.get(over_seeds.better(column), "")
        for columns in shown.values()
        for column in columns
    ]
    if len(shown) == 1:
        return [_join_latex(["method", *names])]
    spans, rules, start = ["method"], "", 2
    for name, columns in shown.items():
        spans.append(rf"\multicolumn{{{len(columns)}}}{{c}}{{{_escape_latex(name)}}}")
        rules += rf"\cmidrule(lr){{{start}-{start + len(columns) - 1}}}"
        start += len(columns)
    return [_join_latex(spans), rules, _join_latex(["", *names])]


def _join_latex(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _join_csv(lines: Iterable[Sequence[Any]]) -> str:
    return join_csv([round(cell, 6) if isinstance(cell, float) else cell for cell in line] for line in lines)


def _flatten(words: str) -> str:
    return " ".join(words.split())


def _escape_markdown(words: str) -> str:
    return MARKDOWN.sub(r"\\\1", _flatten(words))


def _escape_latex(words: str) -> str:
    return "".join(LATEX_ESCAPES.get(sign, sign) for sign in _flatten(words))
