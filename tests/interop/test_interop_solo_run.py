"""A recipe inside a genuine pretraining run of solo-learn, then ``cdc-refine`` on the run folder alone.

Runs where solo-learn and what it needs are installed, with its checkout on the path:
``PYTHONPATH=SOLO_LEARN python -m pytest tests/interop/test_interop_solo_run.py``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc_plugin.config.recipes import recipe_folder
from tests.helpers import ROOT

# What a machine without GPU, wandb and downloads needs: solo-learn's scripts are made for several GPUs.
CPU = [
    *("data.dataset=custom", "data.val_path=null", "data.num_workers=0", "optimizer.batch_size=32", "max_epochs=1"),
    *("accelerator=cpu", 'devices="1"', "strategy=auto", "sync_batchnorm=False", "precision=32"),
    *("wandb.enabled=False", "auto_resume.enabled=False", "+enable_progress_bar=False"),
]


def solo_learn() -> Path:
    """The checkout of solo-learn that is on the path."""
    found = importlib.util.find_spec("solo")
    places = [Path(place).parent for place in (found and found.submodule_search_locations) or []]
    checkouts = [place for place in places if (place / "main_pretrain.py").is_file()]
    if not checkouts:
        pytest.skip("no checkout of solo-learn on the path")
    for name in ("hydra", "lightning", "wandb", "einops"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"solo-learn needs {name}, which is not installed")
    return checkouts[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, digits, write_images):
    """Where solo-learn ran with a recipe and our callback; 96 images lie below ``photos``."""
    checkout = solo_learn()
    home = tmp_path_factory.mktemp("solo")
    pixels, labels = digits
    write_images(home / "photos", pixels[:96], labels[:96])
    words = ["--config-path", str(checkout / "scripts/pretrain/cifar"), "--config-name", "simclr", *CPU]
    words += ["data.train_path=photos", f"hydra.searchpath=[file://{recipe_folder().parent}]"]
    words += ["+cdc=cifar10", "cdc.epochs=1", "cdc.clusters=${data.num_classes}", "cdc.batch_size=48"]
    words += ["cdc.mini_clusters=24"]
    words += ["hydra/callbacks=cdc_refine"]
    run(home, str(checkout / "main_pretrain.py"), *words)
    return home


def run(where, *words):
    paths = os.pathsep.join([str(ROOT), str(solo_learn())])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *words], cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_folder(folder):
    (found,) = (folder / "trained_models" / "simclr").iterdir()
    return found


def test_the_run_carries_the_recipe_and_the_callback_has_refined_it(folder):
    node = json.loads((run_folder(folder) / "args.json").read_text())["cdc"]
    assert (node["epochs"], node["mini_clusters"], node["clusters"]) == (1, 24, "${data.num_classes}")
    report = json.loads((run_folder(folder) / "cdc" / "report.json").read_text())
    assert (report["images"], report["clusters"], report["epochs"]) == (96, 10, 1)


def test_the_run_folder_alone_is_enough_later_and_from_elsewhere(folder, tmp_path):
    run(tmp_path, "-m", "cdc_plugin", "--backbone", str(run_folder(folder)), "--out", "out", "--quiet")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["images"], report["clusters"], report["epochs"]) == (96, 10, 1)
    described = json.loads((tmp_path / "out" / "model.json").read_text())["backbone"]
    # solo-learn normalises custom images as ImageNet, whatever the recipe says; 32 px are its crops.
    assert described["mean"] == pytest.approx([0.485, 0.456, 0.406])
    assert described["input_size"] == 32
