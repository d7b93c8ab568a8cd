"""CSV, Markdown, LaTeX and terminal text of the same rows: figures, marks, escapes and structure."""

import csv
import io
import json
import re

import pytest

from cdc_plugin.comparison.export import records_csv, to_csv, to_latex, to_markdown, to_text
from cdc_plugin.comparison.table import Row, Value, collect
from cdc_plugin.data.atomic import unescape_cell

HOSTILE = r"[50% & $x_1$ #{a}\end{tabular} ~^<b>|*`"


def row(label: str, accuracy: float, ece: float | None, deviation: float | None = 0.006, **more: object) -> Row:
    seeds = 1 if deviation is None else 5
    values = {
        "ACC": Value(accuracy, deviation, seeds),
        "ARI": Value(accuracy - 0.1, deviation, seeds),
        "ECE": None if ece is None else Value(ece, deviation, seeds),
        "CONF": Value(0.9, deviation, seeds),
        "seconds": Value(41.4, None if deviation is None else 2.0, seeds),
    }
    facts = {"set": "digits", "group": "opponents", "method": label.lower(), "uses_labels": False, **more}
    return Row(label=label, seeds=seeds, values=values, **facts)  # type: ignore[arg-type]


ROWS = [
    row("k-means", 0.902, None),
    row("SCAN", 0.943, 0.05),
    row("CDC-Cal", 0.961, 0.011, group="CDC"),
    row("linear", 0.99, 0.001, group="reference", uses_labels=True),
]


def read(text: str) -> list[dict[str, str]]:
    return [{name: unescape_cell(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


def body(latex: str) -> list[str]:
    """The lines of the table proper."""
    return latex.split("\\toprule\n")[1].split("\\bottomrule")[0].splitlines()


def test_csv_holds_fractions_with_the_deviation_beside_each_mean():
    lines = read(to_csv(ROWS))
    assert [line["label"] for line in lines] == ["k-means", "SCAN", "CDC-Cal", "linear"]
    assert (lines[1]["ACC"], lines[1]["ACC deviation"]) == ("0.943", "0.006")
    assert (lines[0]["ECE"], lines[0]["ECE deviation"]) == ("", "")
    assert [line["uses_labels"] for line in lines] == ["0", "0", "0", "1"]
    assert (lines[0]["seeds"], lines[0]["seconds"]) == ("5", "41.4")


def test_the_csv_of_records_has_a_line_for_every_head_of_every_seed_with_all_numbers():
    figures = {"ACC": 0.9, "NLL": 1.5, "AUROC": None, "cluster_sizes": [3, 1, 0], "bins": {"count": [1]}}
    facts = {"set": "s", "method": "cdc", "group": "CDC", "uses_labels": False, "labels": True}
    facts |= {"settings": {"epochs": 3}, "images": 4, "clusters": 3}
    outside = [{"data": "x.npz", "images": 9, "scores": {"AUROC": 0.7, "FPR95": 0.2, "AUPR": 0.6}}]
    rows = [{"label": "A", "figures": figures, "outside": outside}, {"label": "B", "figures": figures}]
    cells = [{**facts, "seed": seed, "rows": rows} for seed in (0, 1)]
    lines = read(records_csv(cells))
    assert [(line["label"], line["seed"]) for line in lines] == [("A", "0"), ("B", "0"), ("A", "1"), ("B", "1")]
    first = lines[0]
    assert (first["ACC"], first["NLL"], first["AUROC"], first["empty_clusters"]) == ("0.9", "1.5", "", "1")
    assert (first["AUPR x"], lines[1]["AUPR x"]) == ("0.6", "")
    assert json.loads(first["settings"]) == {"epochs": 3}


def test_text_is_aligned_in_per_cent_with_a_star_and_its_meaning():
    text = to_text(ROWS)
    table, notes = text.split("\n\n")
    lines = table.splitlines()
    assert lines[0].split() == ["digits,", "in", "%", "ACC", "ARI", "ECE", "CONF", "seconds"]
    assert "94.3 ± 0.6" in lines[2]
    assert {line.index("41 s") for line in lines[1:]} == {lines[1].index("41 s")}
    assert lines[1].split()[7] == "-"  # ECE of k-means
    assert lines[4].startswith("linear*")
    assert "over 5 seeds" in notes
    assert "* uses labels" in notes


def test_text_shows_the_columns_that_a_row_has_or_those_asked_for_in_two_blocks_where_it_is_too_wide():
    text = to_text(ROWS, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert [text.count(word) for word in ("CDC-Cal", "ACC", "ARI", "ECE", "CONF")] == [2, 1, 1, 1, 1]
    one_seed = to_text([row("a", 0.9, None, None)])
    assert "One seed" in one_seed
    assert not {"±", "ECE"} & set(one_seed.split())
    assert to_text(ROWS, ["seconds", "ACC"]).splitlines()[0].split()[-2:] == ["seconds", "ACC"]


def test_a_figure_that_is_undefined_in_some_seeds_says_over_how_many_it_is_the_mean():
    facts = {"set": "s", "method": "m", "group": "g", "uses_labels": False, "labels": True}
    cells = [
        {**facts, "seed": seed, "rows": [{"label": "m", "figures": {"ACC": 0.9, "AUROC": auroc}}]}
        for seed, auroc in enumerate((None, 0.8, 0.8))
    ]
    rows = collect(cells, ["m"])
    for written in (to_text(rows), to_markdown(rows)):
        assert "80.0 ± 0.0 (2)" in written
        assert "mean over the n others" in written
    assert "90.0 ± 0.0 (" not in to_text(rows)
    assert "(2)" in to_latex(rows)


def test_markdown_marks_best_and_second_among_rows_without_labels():
    lines = to_markdown(ROWS).splitlines()
    assert lines[2].startswith("| method | ACC ↑ | ARI ↑ | ECE ↓ | CONF | seconds |")
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}
    scan, ours, linear = (next(line for line in lines if name in line) for name in ("SCAN", "CDC-Cal", "linear"))
    assert "**96.1 ± 0.6**" in ours
    assert "**1.1 ± 0.6**" in ours
    assert "*94.3 ± 0.6*" in scan
    assert "**" not in linear


def test_markdown_neutralises_names():
    line = next(line for line in to_markdown([row(HOSTILE, 0.9, 0.1)]).splitlines() if "50%" in line)
    assert len(re.findall(r"(?<!\\)\|", line)) == 7
    assert r"\<b\>" in line
    assert "\n" not in to_markdown([row("two\nlines", 0.9, 0.1)]).split("two")[1].split("lines")[0]


def test_latex_of_one_set_has_all_columns_and_rules_between_groups():
    latex = to_latex(ROWS)
    lines = body(latex)
    width = len(re.search(r"\\begin{tabular}{(l c*)}".replace(" ", ""), latex).group(1))  # type: ignore[union-attr]
    assert width == 6
    assert {line.count("&") for line in lines if line.endswith(r"\\")} == {width - 1}
    assert lines.count(r"\midrule") == 3
    assert r"\textbf{96.1}{\tiny$\pm$0.6}" in latex
    assert r"\underline{94.3}" in latex
    assert "linear$^*$ & 99.0{" in latex
    assert latex.count(r"\begin{") == latex.count(r"\end{") == 2


def test_latex_of_several_sets_groups_their_main_columns_and_fills_gaps():
    other = [row("SCAN", 0.5, 0.2, set="animals"), row("CDC-Cal", 0.6, 0.1, set="animals", group="CDC")]
    latex = to_latex([*ROWS, *other])
    lines = body(latex)
    assert lines[0] == r"method & \multicolumn{3}{c}{digits} & \multicolumn{3}{c}{animals} \\"
    assert lines[1] == r"\cmidrule(lr){2-4}\cmidrule(lr){5-7}"
    assert lines[2].count("ACC") == lines[2].count("ARI") == lines[2].count("ECE") == 2
    assert next(line for line in lines if line.startswith("k-means")).endswith(r"& - & - & - & - \\")
    assert {line.count("&") for line in lines[2:] if line.endswith(r"\\")} == {6}


def test_latex_escapes_names_so_that_braces_stay_balanced_and_no_argument_is_read():
    latex = to_latex([row(HOSTILE, 0.9, 0.1, set=HOSTILE), row("*", 0.8, 0.1, set=HOSTILE)])
    braces = re.sub(r"[^{}]", "", re.sub(r"\\[{}\\%&$#_]", "", latex))
    while "{}" in braces:
        braces = braces.replace("{}", "")
    assert braces == ""
    assert latex.count(r"\end{tabular}") == 1
    assert r"{[}50\% \& \$x\_1\$ \#\{a\}\textbackslash{}end\{tabular\}" in latex
    assert not any(line.startswith(("[", "*")) for line in body(latex))


@pytest.mark.parametrize("write", [to_csv, to_markdown, to_latex, to_text])
def test_control_characters_and_broken_names_reach_no_file_and_no_terminal(write):
    written = write([row("\x1b[31mred\udc80", 0.9, 0.1), row("b", 0.8, 0.2)])
    assert "\x1b" not in written
    written.encode("utf-8")


def test_what_reads_the_same_is_both_best_and_alone_it_is_unmarked():
    equal = [row("a", 0.9301, 0.1), row("b", 0.9299, 0.1), row("c", 0.9, 0.1)]
    latex = to_latex(equal, ["ACC", "ECE"])
    assert latex.count(r"\textbf{93.0}") == 2
    assert r"\underline{90.0}" in latex
    assert r"\textbf{10.0}" not in latex


def test_two_rows_of_one_label_bear_their_methods_and_nothing_finished_writes_only_the_head_of_the_csv():
    text = to_text([row("CDC-Cal", 0.9, 0.1, method="cdc"), row("CDC-Cal", 0.8, 0.1, method="cdc:k=4")])
    assert "CDC-Cal (cdc:k=4)" in text
    assert (to_text([]), to_markdown([]), to_latex([])) == ("", "", "")
    assert read(to_csv([])) == []
