"""What the demo promises, measured on whole runs (a minute or two each): ``pytest -m slow``."""

from __future__ import annotations

import pytest

import cdc_plugin
from cdc_plugin.demo import demo_settings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5), ids=lambda seed: f"seed{seed}")
def test_the_demo_beats_kmeans_and_its_own_start_and_knows_how_sure_it_is(tmp_path, seed):
    report = cdc_plugin.refine(**demo_settings(), recipe="digits", out=tmp_path / "run", seed=seed)
    before, after = report.metrics["before"], report.metrics["after"]["calibration_head"]
    assert after["ACC"] >= 0.96
    assert after["ECE"] <= 0.02
    assert after["ACC"] > before["kmeans"]["ACC"]
    assert after["ACC"] > before["calibration_head"]["ACC"]
    assert before["calibration_head"]["ACC"] >= before["kmeans"]["ACC"] - 0.01
    assert before["calibration_head"]["CONF"] <= before["calibration_head"]["ACC"]
