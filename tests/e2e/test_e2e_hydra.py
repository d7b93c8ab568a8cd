"""The stage inside Hydra's applications: recipes in its search path, and its callback at the end of a job."""

import importlib.metadata
import json
import logging
import os
import subprocess
import time
import types
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from cdc_plugin.checkpoints.formats.solo_learn.args import infer_settings
from cdc_plugin.checkpoints.read import read_run_args
from cdc_plugin.config.load import load_config, to_yaml
from cdc_plugin.config.recipes import recipe_folder, recipe_names
from cdc_plugin.integrations import hydra_callback
from cdc_plugin.integrations.hydra_searchpath import RecipeSearchPath
from tests.helpers.commands import run_python

SOLO_YAML = """
defaults:
  - _self_
  - override hydra/hydra_logging: disabled
  - override hydra/job_logging: disabled
hydra:
  output_subdir: null
  run:
    dir: .
name: tiny
method: simclr
data:
  num_classes: 7
checkpoint:
  dir: trained
"""

# Writes its run folder as solo-learn does, and shows the command that the callback would run.
SOLO_APP = """
import json, sys
from pathlib import Path

import hydra
from omegaconf import OmegaConf

import cdc_plugin.integrations.hydra_callback as callback


def show(words, **rest):
    print("COMMAND", *words[1:])
    return callback.subprocess.CompletedProcess(words, 3)


callback.subprocess.run = show


@hydra.main(version_base="1.2", config_path=".")
def main(cfg):
    folder = Path(cfg.checkpoint.dir) / cfg.method / "0"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(OmegaConf.to_container(cfg)))


main()
"""


def composed(overrides, folder):
    """The config that an application gets which has only its own YAML and the search path plug-in."""
    (folder / "solo.yaml").write_text(SOLO_YAML)
    Plugins.instance().register(RecipeSearchPath)
    with initialize_config_dir(str(folder), version_base="1.2"):
        return OmegaConf.to_container(compose("solo", overrides), resolve=True)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_comes_out_of_hydra_as_it_goes_in(name, tmp_path):
    node = composed([f"+cdc={name}"], tmp_path)["cdc"]
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(node))
    assert to_yaml(load_config(again)) == to_yaml(load_config(name))


def test_the_recipe_is_a_node_of_its_own_that_can_be_overridden_and_refer_to_the_rest(tmp_path):
    found = composed(["+cdc=cifar10", "cdc.epochs=3", "cdc.clusters=${data.num_classes}", "+cdc.seed=5"], tmp_path)
    assert (found["cdc"]["epochs"], found["cdc"]["clusters"], found["cdc"]["seed"]) == (3, 7, 5)
    assert found["data"] == {"num_classes": 7}


def test_the_recipes_come_last_in_the_search_path_so_that_they_hide_nothing():
    search_path = ConfigSearchPathImpl()
    search_path.append("main", "pkg://solo")
    RecipeSearchPath().manipulate_search_path(search_path)
    assert [element.provider for element in search_path.get_path()] == ["main", "cdc-plugin"]
    folder = Path(search_path.get_path()[-1].path.removeprefix("file://"))
    assert (folder / "cdc" / "cifar10.yaml").is_file()
    assert (folder / "__init__.py").is_file()  # without it Hydra does not take pkg://cdc_plugin.recipes


def test_an_installed_package_brings_its_hydra_plugin():
    try:
        files = importlib.metadata.files("cdc-plugin") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert "hydra_plugins/cdc_plugin_searchpath.py" in {file.as_posix() for file in files}


def test_a_finished_job_starts_the_stage_on_its_run_folder_and_survives_its_failure(tmp_path):
    (tmp_path / "solo.yaml").write_text(SOLO_YAML)
    (tmp_path / "app.py").write_text(SOLO_APP)
    where = f"hydra.searchpath=[file://{recipe_folder().parent}]"
    more = "hydra.callbacks.cdc_refine.options=[--epochs,3]"
    words = ["--config-name", "solo", where, "+cdc=digits", "hydra/callbacks=cdc_refine", more]
    done = run_python("app.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Path("trained/simclr/0")
    assert f"COMMAND -m cdc_plugin --backbone {run} --out {run / 'cdc'} --epochs 3" in done.stdout
    assert f"To try again: cdc-refine --backbone {run}" in done.stderr
    assert json.loads((tmp_path / run / "args.json").read_text())["cdc"]["data"] == "digits"


@pytest.mark.parametrize(
    ("data", "recipe", "expected"),
    [
        ({"dataset": "custom", "train_path": "photos"}, "cifar10", "photos"),
        ({"dataset": "cifar100", "train_path": "photos"}, "cifar20", "cifar20"),
        ({"dataset": "custom", "train_path": "not/here"}, "cifar10", "cifar10"),
    ],
    ids=["own images", "same files", "images gone"],
)
def test_of_a_recipe_the_settings_are_taken_but_not_other_images_and_statistics(tmp_path, data, recipe, expected):
    (tmp_path / "photos").mkdir()
    node = json.loads(json.dumps(asdict(load_config(recipe, {"epochs": 3}))))
    args = {"method": "simclr", "backbone": {"name": "resnet18"}, "data": data, "augmentations": [{"crop_size": 24}]}
    (tmp_path / "args.json").write_text(json.dumps({**args, "cdc": node}))
    found = infer_settings(*read_run_args(tmp_path))
    assert Path(found["data"]).name == expected
    assert found["epochs"] == 3
    assert not {"mean", "std", "input_size"} & set(found)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A callback whose job has written a run folder, and the commands it would run."""
    for name in hydra_callback.RANKS:
        monkeypatch.delenv(name, raising=False)
    commands = []

    def note(words, env, **rest):
        commands.append((words, env))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(hydra_callback.subprocess, "run", note)
    config = OmegaConf.create({"name": "tiny", "method": "byol", "checkpoint": {"dir": str(tmp_path)}})
    callback = hydra_callback.RefineWhenPretrained()
    callback.on_job_start(config)
    ended = JobReturn(cfg=config, status=JobStatus.COMPLETED)

    def write(run_id, **other):
        folder = tmp_path / "byol" / run_id
        folder.mkdir(parents=True)
        content = {**OmegaConf.to_container(config), **other, "wandb_run_id": run_id}
        (folder / "args.json").write_text(json.dumps(content))
        return folder

    def end():
        callback.on_job_end(config, ended)
        return commands

    return types.SimpleNamespace(end=end, ended=ended, write=write, failed=JobStatus.FAILED)


def test_runs_and_results_of_before_are_left_alone(job):
    old = job.write("old") / "args.json"
    os.utime(old, (time.time() - 3600,) * 2)
    new = job.write("new")
    assert job.end()[0][0][2:] == ["cdc_plugin", "--backbone", str(new), "--out", str(new / "cdc")]
    (new / "cdc").mkdir()
    assert job.end()[1][0][-1] == str(new / "cdc-2")


def test_of_runs_at_the_same_time_the_one_with_this_config_is_taken(job):
    own = job.write("own")
    job.write("other", name="large")
    assert job.end()[0][0][4] == str(own)


@pytest.mark.parametrize("runs", [(), ("a", "b")])
def test_where_the_run_folder_is_not_certain_nothing_is_started(job, caplog, runs):
    for name in runs:
        job.write(name)
    logging.getLogger("cdc_plugin.hydra").disabled = True  # as Hydra's logging leaves it
    assert not job.end()
    assert "the pretraining is complete: expected one run folder" in caplog.text


def test_a_failed_job_and_other_ranks_start_nothing_and_the_first_leaves_the_process_group(job, monkeypatch):
    job.write("0")
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not job.end()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not {"WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"} & set(job.end()[0][1])
    job.ended.status = job.failed
    assert len(job.end()) == 1
