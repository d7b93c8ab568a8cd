import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cdc_plugin.checkpoints.load_model import load_model
from cdc_plugin.cli.predict import predict_command
from cdc_plugin.core.hierarchy import Hierarchy
from cdc_plugin.core.mahalanobis import Prototypes
from cdc_plugin.evaluation import predict as prediction
from cdc_plugin.evaluation import predict_resume as prediction_parts
from cdc_plugin.evaluation import records as tables
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.models.heads import ClusterHead
from tests.helpers.commands import read_table


@pytest.fixture
def model(tiny_backbone, tmp_path) -> Path:
    """A result folder of a model that is more or less sure of the digits."""
    torch.manual_seed(3)
    heads = [ClusterHead(8, 12, 3) for _ in range(2)]
    for head in heads:
        head(torch.randn(40, 8))
        head[-1].weight.data *= 30
    folder = tmp_path / "run"
    folder.mkdir()
    Clusterer(tiny_backbone, *heads).save(folder, {})
    return folder


@pytest.fixture
def photos(tmp_path, digits, write_images) -> Path:
    return write_images(tmp_path / "photos", digits[0][:30])


def table_of(path: Path) -> object:
    """What a file holds; of Parquet the rows, as its groups may differ."""
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return path.read_bytes()


def sort(capsys, *words: object) -> list[str]:
    """Run the command; returns the lines it printed."""
    predict_command([str(word) for word in words] + ["--device", "cpu"])
    return capsys.readouterr().out.splitlines()


def test_a_threshold_marks_rows_and_drops_none(capsys, model, photos, tmp_path):
    out = tmp_path / "new.csv"
    lines = sort(capsys, "--model", model, "--data", photos, "--out", out, "--min-confidence", 0.8)
    rows = read_table(out)
    marked = [row["selected"] == "1" for row in rows]
    assert len(rows) == 30
    assert marked == [float(row["confidence"]) >= 0.8 for row in rows]
    assert 0 < sum(marked) < 30
    expected = np.mean([float(row["confidence"]) for row in rows if row["selected"] == "1"])
    assert lines[1] == (
        f"{sum(marked)} of 30 images ({100 * sum(marked) / 30:.1f} %) selected: confidence at least 0.8, "
        f"expected accuracy {100 * expected:.1f} %"
    )


def test_a_target_takes_the_largest_set_and_its_threshold_gives_the_same_set_again(capsys, model, photos, tmp_path):
    words = ["--model", model, "--data", photos]
    lines = sort(capsys, *words, "--out", tmp_path / "a.csv", "--target-accuracy", 0.85)
    threshold = lines[1].split("at least ")[1].split(",")[0]
    sort(capsys, *words, "--out", tmp_path / "b.csv", "--min-confidence", threshold)
    rows = read_table(tmp_path / "a.csv")
    assert rows == read_table(tmp_path / "b.csv")
    confidence = sorted((float(row["confidence"]) for row in rows), reverse=True)
    count = sum(row["selected"] == "1" for row in rows)
    assert 0 < count < 30
    assert np.mean(confidence[:count]) >= 0.85 > np.mean(confidence[: count + 1])


def test_nothing_and_everything_selected_are_said_plainly(capsys, model, photos, tmp_path):
    words = ["--model", model, "--data", photos, "--out", tmp_path / "new.csv", "--overwrite"]
    assert "all 30 images selected: confidence at least 0.1" in sort(capsys, *words, "--min-confidence", 0.1)[1]
    line = sort(capsys, *words, "--target-accuracy", 1)[1]
    surest = max(row["confidence"] for row in read_table(tmp_path / "new.csv"))
    assert line == f"no image selected: the surest has confidence {surest}"
    assert {row["selected"] for row in read_table(tmp_path / "new.csv")} == {"0"}


@pytest.mark.parametrize("name", ["new.csv", "new.parquet", "new.json", "new.xml", "sorted"])
@pytest.mark.parametrize("wish", [[], ["--min-confidence", 0.8], ["--target-accuracy", 0.85]], ids=str)
def test_many_images_in_parts_are_written_as_few_in_one_are(capsys, model, photos, tmp_path, monkeypatch, name, wish):
    tools = {"new.json": "label-studio", "new.xml": "cvat", "sorted": "folders"}
    to = ["--to", tools[name]] if name in tools else []
    (photos / "image 011.png").write_bytes(b"x")
    written, said = [], []
    for size in (8192, 8):
        monkeypatch.setattr(prediction_parts, "PART", size)
        words = ["--model", model, "--data", photos, "--out", tmp_path / name, "--batch-size", 8, *to, *wish]
        said.append(sort(capsys, *words, "--overwrite"))
        files = [path for path in tmp_path.rglob("*") if path.is_file() and not {"run", "photos"} & set(path.parts)]
        assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
        written.append({path: table_of(path) for path in files})
    assert said[0] == said[1]
    assert written[0] == written[1]


def test_images_in_parts_are_drawn_for_an_audit_as_all_at_once_are(capsys, model, photos, tmp_path, monkeypatch):
    sheets = []
    for size in (8192, 8):
        monkeypatch.setattr(prediction_parts, "PART", size)
        sort(capsys, "--model", model, "--data", photos, "--out", tmp_path / "check", "--audit", 9, "--overwrite")
        sheets.append((tmp_path / "check" / "audit.csv").read_bytes())
    assert sheets[0] == sheets[1]
    assert not list(tmp_path.glob(".*"))


def test_a_table_that_cannot_be_written_leaves_the_parts_for_the_next_time(
    capsys, refuse, model, photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(prediction_parts, "PART", 8)
    words = ["--model", model, "--data", photos, "--out", tmp_path / "new.csv"]

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as fault:
        fault.setattr(tables, "_format", full)
        assert "no space left while writing" in refuse("predict", *words, "--device", "cpu")
    assert len(list((tmp_path / ".new.csv.parts").glob("*.npz"))) == 4
    with monkeypatch.context() as fault:
        fault.setattr(prediction, "_compute_columns", full)  # nothing is computed again
        sort(capsys, *words, "--min-confidence", 0.9)
    assert len(read_table(tmp_path / "new.csv")) == 30
    assert not (tmp_path / ".new.csv.parts").exists()


def test_without_a_wish_there_is_no_column_of_selected_images(capsys, model, photos, tmp_path):
    lines = sort(capsys, "--model", model, "--data", photos, "--out", tmp_path / "new.csv")
    assert len(lines) == 1
    assert "selected" not in read_table(tmp_path / "new.csv")[0]


def test_an_old_models_confidence_is_called_what_it_is(capsys, model, photos, tmp_path, monkeypatch):
    import cdc_plugin.evaluation.models

    opened = cdc_plugin.evaluation.models.open_model(model)
    opened.model.clustering_head = opened.model.calibration_head
    monkeypatch.setattr(cdc_plugin.evaluation.models, "open_model", lambda path, head: opened)
    predict_command(["--model", str(model), "--data", str(photos), "--out", str(tmp_path / "a.csv"), "--device", "cpu"])
    assert "its confidence is that of the old model as it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-confidence", "0"], "--min-confidence takes a number above 0 and up to 1"),
        (["--min-confidence", "nan"], "found nan"),
        (["--target-accuracy", "95"], "such as 0.95; found 95"),
        (["--target-accuracy", "-1"], "--target-accuracy takes a number above 0"),
        (["--batch-size", "0"], "--batch-size takes at least 1"),
        (["--audit", "0"], "--audit takes"),
        (["--to", "exel"], "--to takes one of csv"),
        (["--audit", "5", "--to", "csv"], "leave --to csv out"),
    ],
    ids=str,
)
def test_mistakes_end_with_one_line_before_any_work(refuse, tmp_path, words, message):
    line = refuse("predict", "--model", "nowhere", "--data", "nowhere", "--out", tmp_path / "p.csv", *words)
    assert message in line


def test_what_is_missing_is_named(refuse):
    assert "missing --model, --data, --out" in refuse("predict")
    assert "missing --out" in refuse("predict", "--model", "a", "--data", "b")
    assert "leave --model out" in refuse("predict", "--answers", "a", "--model", "b")


def test_two_wishes_at_once_end_with_code_two(capsys):
    with pytest.raises(SystemExit) as end:
        predict_command(["--min-confidence", "0.9", "--target-accuracy", "0.9"])
    assert end.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_places_models_and_data_that_will_not_do_end_with_one_line(refuse, tmp_path, model, photos):
    out = tmp_path / "p.csv"
    assert r"a\n\x1bb" in refuse("predict", "--model", model, "--data", "a\n\x1bb", "--out", tmp_path / "p.csv")
    assert "--data ... is empty" in refuse("predict", "--model", model, "--data", "", "--out", tmp_path / "p.csv")
    assert "data is empty" in refuse("refine", "--backbone", "x.pt", "data=''")
    assert "is a folder" in refuse("predict", "--model", model, "--data", photos, "--out", tmp_path)
    assert "no folder" in refuse("predict", "--model", model, "--data", photos, "--out", tmp_path / "a" / "b.csv")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no images" in refuse("predict", "--model", model, "--data", empty, "--out", out)
    assert "expected a checkpoint" in refuse("predict", "--model", empty, "--data", photos, "--out", out)
    assert "there is no" in refuse("predict", "--model", tmp_path / "none", "--data", photos, "--out", out)
    for name in ("config.yaml", "last.pt"):
        (empty / name).write_bytes(b"")
    line = refuse("predict", "--model", empty, "--data", photos, "--out", out)
    assert f"cdc-refine --resume --out {empty}" in line
    assert not out.exists()


def test_what_the_card_warned_of_is_told_to_those_who_rely_on_confidence(model, photos, capsys, tmp_path):
    described = json.loads((model / "model.json").read_text())
    described["provenance"] = {"warnings": ["1 cluster is empty."]}
    (model / "model.json").write_text(json.dumps(described))
    words = ["--model", str(model), "--data", str(photos), "--device", "cpu"]
    predict_command([*words, "--out", str(tmp_path / "a.csv")])
    assert "1 cluster is empty." not in capsys.readouterr().err
    predict_command([*words, "--out", str(tmp_path / "b.csv"), "--target-accuracy", "0.5"])
    assert "warning: when this model was refined: 1 cluster is empty." in capsys.readouterr().err


def test_outliers_are_counted_and_never_selected(model, photos, capsys, tmp_path):
    loaded = load_model(model)
    loaded.prototypes = Prototypes(torch.zeros(1, 8), torch.eye(8), limit=0.5)  # unit features lie at distance 1
    loaded.save(model, {})
    lines = sort(
        capsys, "--model", model, "--data", photos, "--out", tmp_path / "a.csv", "--min-confidence", "0.000001"
    )
    assert any(line.startswith("30 images are unlike") and "none of them selected" in line for line in lines)
    assert {(row["outlier"], row["selected"]) for row in read_table(tmp_path / "a.csv")} == {("1", "0")}


LEVELS = Hierarchy(((0, 2), (0, 1)), (0.25, 0.5))


def add(folder: Path, **parts: object) -> None:
    """Store a model again with more parts."""
    loaded = load_model(folder)
    for name, part in parts.items():
        setattr(loaded, name, part)
    loaded.save(folder, {})


def test_a_level_merges_clusters_and_keeps_the_cluster_itself(capsys, model, photos, tmp_path):
    add(model, hierarchy=LEVELS)
    sort(capsys, "--model", model, "--data", photos, "--out", tmp_path / "leaves.csv")
    leaves = read_table(tmp_path / "leaves.csv")
    for level, groups in ((3, {0: 0, 1: 1, 2: 2}), (2, {0: 0, 1: 1, 2: 0}), (1, {0: 0, 1: 0, 2: 0})):
        sort(capsys, "--model", model, "--data", photos, "--out", tmp_path / f"{level}.csv", "--level", level)
        rows = read_table(tmp_path / f"{level}.csv")
        assert [(row["leaf"], row["leaf_confidence"]) for row in rows] == [
            (leaf["cluster"], leaf["confidence"]) for leaf in leaves
        ]
        assert all(float(row["confidence"]) >= float(row["leaf_confidence"]) for row in rows)
        assert {row["cluster"] for row in rows} <= {str(group) for group in groups.values()}
        for row, leaf in zip(rows, leaves, strict=True):
            if float(leaf["confidence"]) > 0.5:
                assert int(row["cluster"]) == groups[int(leaf["cluster"])]
    assert {row["confidence"] for row in rows} == {"1.000000"}
    assert {(row["second_cluster"], row["second_confidence"]) for row in rows} == {("0", "0.000000")}


def test_a_level_goes_into_every_output(capsys, model, photos, tmp_path):
    add(model, hierarchy=LEVELS)
    words = ("--model", model, "--data", photos, "--level", 2)
    sort(capsys, *words, "--out", tmp_path / "links", "--to", "folders")
    assert {path.name for path in (tmp_path / "links").iterdir()} <= {"cluster 00", "cluster 01", "links.csv"}
    sort(capsys, *words, "--out", tmp_path / "tasks.json", "--to", "label-studio")
    assert json.loads((tmp_path / "tasks.json").read_text())[0]["data"].keys() >= {"cluster", "leaf"}
    sort(capsys, *words, "--out", tmp_path / "labels.json", "--to", "fiftyone")
    assert json.loads((tmp_path / "labels.json").read_text())["classes"] == ["cluster 00", "cluster 01"]
    sort(capsys, *words, "--out", tmp_path / "tags.xml", "--to", "cvat")
    assert "leaf" in (tmp_path / "tags.csv").read_text().splitlines()[0]


def test_a_level_that_there_is_not_is_refused(refuse, model, photos, tmp_path):
    words = ("predict", "--model", model, "--data", photos, "--out", tmp_path / "a.csv", "--level")
    assert "cdc-refine" in refuse(*words, 2)
    add(model, hierarchy=LEVELS)
    for level in (0, 4, -2):
        assert "1 to 3" in refuse(*words, level)


def test_finished_parts_of_another_level_are_not_taken(model, photos):
    add(model, hierarchy=LEVELS)
    loaded = load_model(model)
    described = [
        prediction_parts.describe_inputs(prediction.prepare(loaded, photos, torch.device("cpu"), 8, level, kept))
        for level, kept in ((None, False), (2, False), (3, False), (3, True))
    ]
    assert len({json.dumps(inputs, sort_keys=True) for inputs in described}) == 4


def test_new_kinds_need_prototypes_and_a_page_of_their_own(refuse, capsys, model, photos, tmp_path):
    words = ("--model", model, "--data", photos, "--out", tmp_path / "a.csv", "--new-kinds")
    assert "cdc-refine" in refuse("predict", *words)
    assert "--audit" in refuse("predict", *words, "--audit", 3)
    add(model, prototypes=Prototypes(torch.zeros(2, 8), torch.eye(8), limit=9.0))
    lines = sort(capsys, *words)
    assert "no new kind" in lines[1]
    assert {row["new_kind"] for row in read_table(tmp_path / "a.csv")} == {"-1"}
    assert not (tmp_path / "a.new-kinds.html").exists()
    (tmp_path / "a.new-kinds.html").touch()
    (tmp_path / "a.csv").unlink()
    assert "a.new-kinds.html already exists" in refuse("predict", *words)


def test_three_images_are_no_new_kind(capsys, model, tmp_path, digits, write_images):
    add(model, prototypes=Prototypes(torch.zeros(2, 8), torch.eye(8), limit=0.5))
    few = write_images(tmp_path / "few", digits[0][:3])
    lines = sort(capsys, "--model", model, "--data", few, "--out", tmp_path / "a.csv", "--new-kinds")
    assert any("no new kind" in line and "found 3" in line for line in lines)
