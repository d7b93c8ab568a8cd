"""The arena's choice of constants, on records whose answer is known."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ARENA = Path(__file__).parents[1] / "benchmarks" / "arena"
sys.path.append(str(ARENA))

import choose  # noqa: E402
import entries  # noqa: E402
import tables  # noqa: E402

from cdc_plugin.core.estimate import find_bounds, from_logit, to_logit  # noqa: E402

TRUE = (-2.0, 1.2, 0.6)  # what the made-up accuracies follow


def seen(confidence: float, probe: float, **more) -> dict:
    signals = TRUE[0] + TRUE[1] * to_logit(confidence, 10) + TRUE[2] * to_logit(probe, 10)
    return {"confidence": confidence, "probe": probe, "accuracy": from_logit(signals, 10), **more}


def make_run(source: str, number: int) -> dict:
    """A run that is stuck after its first round, better for a restart, and settled after the second of three."""
    confidence, probe = 0.5 + 0.04 * number, 0.98 - 0.03 * ((7 * number) % 8)
    first = {**seen(confidence, probe), "moved": 1.0, "inertia_ratio": 1.01, "restarted": True}
    first |= {"accuracy": 0.3, "kmeans": 0.4}
    second = {**seen(confidence, probe), "moved": 0.02, "inertia_ratio": 1.0, "restarted": False, "kmeans": 0.2}
    name = {"name": f"set{number}", "source": source, "seed": 0, "clusters": 10, "kmeans": 0.2}
    return {**name, "rounds": [first, second, {**second, "moved": 0.01}]}


@pytest.fixture
def runs() -> list[dict]:
    return [make_run(f"source{number % 6}", number) for number in range(12)]


def test_constants_are_found_again(runs):
    assert choose.choose_stuck(runs) < 1.01
    assert choose.choose_settled(runs) > 0.02
    found = choose.choose_level(runs, 0.03)
    ends = [choose.find_end(run, 0.03)[1] for run in runs]
    left = [choose.distance(run, end, found) for run, end in zip(runs, ends, strict=True)]
    assert max(left) < 0.6  # drawn a little towards the confidence as it is


def test_a_source_has_no_part_in_what_it_is_judged_by(runs):
    chosen = choose.leave_one_out(runs, lambda rest: {run["source"] for run in rest})
    assert all(source not in rest and len(rest) == 5 for source, rest in chosen.items())


def test_the_bound_of_distances_covers_nine_of_ten():
    assert choose.quantile(list(np.linspace(0, 1, 201))) == pytest.approx(0.91, abs=0.02)


def test_an_interval_of_the_distance_holds_the_truth(runs):
    level = choose.choose_level(runs, 0.03)
    for run in runs:
        end = choose.find_end(run, 0.03)[1]
        for factor, holds in ((1.001, True), (0.9, False)):
            half = factor * choose.distance(run, end, level)
            low, high = find_bounds(choose.estimate(run, end, level), half)
            assert low <= choose.truth_of(run, end) <= high or not holds


def test_runs_return_to_the_start_only_where_that_costs_nothing(runs):
    for run in runs:
        run["start"] = {"probe": 1.0}
    pairs = [(run, {**run, "ACC": 0.0}) for run in runs]
    assert choose.choose_unreadable(pairs, 0.03) <= min(choose.find_end(run, 0.03)[1]["probe"] for run in runs)
    pairs = [(run, {**run, "ACC": 1.0}) for run in runs]
    assert choose.choose_unreadable(pairs, 0.03) == max(choose.UNREADABLE)


def test_results_are_tables_with_means_over_seeds(tmp_path, runs):
    for seed in range(2):
        record = {**runs[0], "seed": seed, "ACC": 0.9, "NMI": 0.8, "ECE": 0.02 + 0.02 * seed, "epochs": 20, "cpu": 50.0}
        record |= {"expected": [0.9, 0.8, 0.95], "selected": 0.5, "selected_right": 0.97}
        folder = tmp_path / "runs" / f"set0-{seed}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    tables.write_results(tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "3.0 ± 1.0" in text
    assert "2 of 2" in text
    assert "<table>" in (tmp_path / "results.html").read_text()


def test_variants_of_sets_keep_images_and_labels_together():
    images = np.arange(400, dtype=np.uint8).repeat(12).reshape(400, 2, 2, 3)
    labels = np.arange(400) % 10
    for change in (entries.halve, entries.unbalance):
        kept, found = change(images, labels)
        assert len(kept) == len(found) < 400
        assert set(np.unique(found)) == set(range(found.max() + 1))
    assert entries.add_noise(images, labels)[0].shape == images.shape
    assert len({(entry.name) for entry in entries.ENTRIES}) == len(entries.ENTRIES)
