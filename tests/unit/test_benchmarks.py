"""The pieces of ``tests/benchmarks/run.py`` on tiny sizes: figures mean nothing here, but everything has to run."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import epoch  # noqa: E402
import gpu_check  # noqa: E402
import material  # noqa: E402
import measure  # noqa: E402
import parts  # noqa: E402
import processes  # noqa: E402
import run  # noqa: E402
from measure import Found, Limit, Setting, Stopwatch  # noqa: E402

from cdc_plugin.training.refiner import Refiner  # noqa: E402
from cdc_plugin.training.runtime import choose_device  # noqa: E402


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is set."""
    now = [0.0]
    monkeypatch.setattr(measure, "device_seconds", lambda _: now[0])
    return now


@pytest.fixture
def tiny_networks(monkeypatch):
    monkeypatch.setattr(epoch, "resnet18", lambda width=64: material.resnet18(8))


@pytest.mark.parametrize(("words", "said"), [(["--device", "gpu"], "'gpu' cannot be used here"), ([], "no GPU")])
def test_gpu_check_refuses_a_device_that_is_not_there_before_it_checks_anything(words, said, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "choose_device", lambda name: choose_device("cpu" if name == "auto" else name))
    with pytest.raises(SystemExit) as end:
        gpu_check.main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_time_of_a_nested_section_counts_once(clock):
    watch = Stopwatch()
    with watch.section("epoch"):
        clock[0] += 1
        with watch.section("views"):
            clock[0] += 10
        clock[0] += 100
    clock[0] += 1000
    assert watch.of("epoch") == {"epoch": 101, "views": 10}


def test_a_whole_section_is_not_split(clock):
    watch = Stopwatch(whole=("evaluation",))
    with watch.section("epoch"), watch.section("evaluation"), watch.section("reading"):
        clock[0] += 5
    assert watch.of("epoch") == {"epoch": 0, "evaluation": 5}


def test_timed_functions_are_put_back_even_after_an_error(clock):
    class Owner:
        def work(self):
            clock[0] += 3
            raise RuntimeError

    before, watch = Owner.work, Stopwatch()
    with pytest.raises(RuntimeError), measure.timed(watch, [(Owner, "work", lambda owner: type(owner).__name__)]):
        Owner().work()
    assert Owner.work is before
    assert watch.of("Owner") == {"Owner": 3}


def test_the_exponent_of_a_power_law_is_found():
    assert measure.slope([10, 100, 1000], [3 * size**1.5 for size in (10, 100, 1000)]) == pytest.approx(1.5)


@pytest.mark.parametrize(("value", "code"), [(1.2, 0), (1.3, 1)])
def test_a_broken_limit_is_the_exit_code_and_figures_are_in_the_file(value, code, tmp_path, monkeypatch, capsys):
    found = Found("a title", {"a row": {"seconds": 2.0}}, [Limit("a ratio", value, 1.25)])
    monkeypatch.setattr(run, "BENCHMARKS", {"one": lambda setting: found})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert run.main(["--json", str(tmp_path / "figures.json")]) == code
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["limits_broken"] == code
    assert record["results"]["one"]["limits"][0]["kept"] is (code == 0)
    printed = capsys.readouterr().out
    assert "limit <= 1.25" in printed
    assert ("NOT KEPT" in printed) is (code == 1)


def test_the_list_names_every_benchmark_and_every_script(capsys):
    assert run.main(["--list"]) == 0
    listed = capsys.readouterr().out
    modules = {"run.py", "measure.py", "material.py", "epoch.py", "parts.py", "processes.py"}
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - modules
    assert all(name in listed for name in (*run.BENCHMARKS, *scripts))


def test_an_epoch_is_split_into_its_parts_and_nothing_stays_changed(tiny_networks):
    before = Refiner.train_batch
    found = epoch.epoch(Setting(words=("hidden=16",)), batch=40, count=2)
    named = {"reading", "views", "k-means", "targets", "selection", "heads", "optimisers", "saving", "evaluation"}
    assert named | {"forwards without gradient", "forward", "backward", "rest"} <= set(found.rows)
    shares = [row["share"] for row in found.rows.values() if "share" in row]
    assert sum(shares[: shares.index(1.0)]) == pytest.approx(1)
    assert min(found.rows["epoch / floor"].values()) > 0
    assert len(found.limits) == 3
    assert Refiner.train_batch is before


def test_an_epoch_of_a_frozen_backbone_has_no_pass_of_it(tiny_networks):
    found = epoch.frozen_epoch(Setting(words=("hidden=16",)), batch=40, count=2)
    assert {"k-means", "selection", "heads", "optimisers"} <= set(found.rows)
    assert not {"forward", "backward", "views"} & set(found.rows)


def test_the_floor_repeats_the_passes_and_trains_on_every_image():
    floor, network = epoch._Floor("cpu"), nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        floor.note(network, torch.rand(10, 3, 2, 2))
    floor.note(network, torch.rand(4, 3, 2, 2))
    passes = []
    floor._copy.register_forward_hook(lambda *_: passes.append((len(_[1][0]), torch.is_grad_enabled())))
    floor.measure(10)
    assert passes == [(10, False), (4, True), (4, True), (2, True)]
    assert all(weight.grad is None for weight in network.parameters())


def test_parts_run_on_tiny_sizes():
    quick = Setting(quick=True)
    assert parts.kmeans_against_scikit_learn(quick, 60, 10).rows["this package"]["inertia"] > 0
    rows = parts.growth(quick, 2000).rows
    assert all("exponent" in row for row in rows.values())
    assert {name[0] for name in rows} == {"N", "K", "C"}


def test_peak_memory_is_that_of_a_run_of_its_own(tmp_path):
    peak = processes._peak(material.digits_file(tmp_path, 200), tmp_path, ("clusters=4",))
    assert 50 * processes.MEGABYTE < peak < 8000 * processes.MEGABYTE


def test_seconds_of_a_command_are_counted():
    assert 0 < measure.command_seconds(["-c", "pass"], 1) < 60
