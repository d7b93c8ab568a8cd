"""Write what the runs of the arena came to: RESULTS.md, and results.html to look at."""

import html
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Run = dict[str, Any]
# Title, value of a run; a row shows the mean over seeds, and the spread where there are several.
COLUMNS: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    ("k-means", lambda run: run["kmeans"]),
    ("ACC", lambda run: run["ACC"]),
    ("NMI", lambda run: run["NMI"]),
    ("ECE", lambda run: run["ECE"]),
    ("expected", lambda run: run["expected"][0]),
    ("from", lambda run: run["expected"][1]),
    ("to", lambda run: run["expected"][2]),
    ("at 95 %: selected", lambda run: run["selected"]),
    ("right", lambda run: run["selected_right"]),
)


def read_runs(out: Path) -> list[Run]:
    """Return the records of all finished runs, by name and seed."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("runs/*/run.json")]
    return sorted(runs, key=lambda run: (run["name"], run["seed"]))


def write_results(out: Path) -> None:
    runs = read_runs(out)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run["name"]].append(run)
    header = ["set and backbone", "seeds", *(title for title, _ in COLUMNS), "epochs", "CPU s"]
    rows = [
        [
            name,
            str(len(group)),
            *(_mean([value(run) for run in group], 100, 1) for _, value in COLUMNS),
            _mean([run["epochs"] for run in group], 1, 0),
            _mean([run["cpu"] for run in group], 1, 0),
        ]
        for name, group in groups.items()
    ]
    lines = ["# The arena", "", *summarise(runs), "", _markdown([header, *rows]), ""]
    (out / "RESULTS.md").write_text("\n".join(lines), encoding="utf-8")
    (out / "results.html").write_text(_page(header, rows, summarise(runs)), encoding="utf-8")


def summarise(runs: Sequence[Run]) -> list[str]:
    """Say how the promises were kept over all runs."""
    if not runs:
        return ["No run is finished."]
    ece, known = np.array([run["ECE"] for run in runs]), [run for run in runs if run["expected"][1] is not None]
    inside = [run["expected"][1] <= run["ACC"] <= run["expected"][2] for run in known]
    width = [run["expected"][2] - run["expected"][1] for run in known]
    chosen = [run for run in runs if run["selected"] >= 0.01]
    kept = [run["selected_right"] >= 0.93 for run in chosen]
    better = [run["ACC"] >= run["kmeans"] for run in runs]
    lines = [f"{len(runs)} runs, in %: mean ECE {100 * ece.mean():.1f}, largest {100 * ece.max():.1f}."]
    lines.append(f"At least as accurate as k-means before training: {sum(better)} of {len(better)} runs.")
    if known:
        said = f"The stated interval held the truth in {sum(inside)} of {len(known)} runs"
        lines.append(f"{said}, at a mean width of {100 * np.mean(width):.0f} points.")
    if chosen:
        lines.append(f"Selected at 95 %, 93 % or more were right in {sum(kept)} of {len(kept)} runs that selected any.")
    return lines


def _mean(values: Sequence[float | None], factor: float, digits: int) -> str:
    numbers = [factor * value for value in values if value is not None]
    if not numbers:
        return "-"
    spread = f" ± {np.std(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.{digits}f}{spread}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _page(header: Sequence[str], rows: Sequence[Sequence[str]], summary: Sequence[str]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"

    style = (
        "body{font:16px system-ui;margin:2rem auto;max-width:75rem;padding:0 1rem}div{overflow-x:auto}"
        "table{border-collapse:collapse}td,th{padding:.3rem .6rem;text-align:right;white-space:nowrap;"
        "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}"
    )
    table = "\n".join([line(header, "th"), *(line(row, "td") for row in rows)])
    words = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in summary)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{style}</style>'
    body = f"<h1>Arena</h1>{words}<div><table>{table}</table></div>"
    return f"<!doctype html><html lang=en><head><title>Arena</title>{head}</head><body>{body}</body></html>\n"
