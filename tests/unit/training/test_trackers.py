import contextlib
import errno
import json
import sys
import types

import pytest

from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.errors import UserError
from cdc_plugin.training import trackers as module
from cdc_plugin.training.trackers import NOTES, flat_figures, make_trackers, open_trackers, trackers
from tests.helpers.event_files import events, scalars

CONFIG = RefineConfig(backbone="b.pt", data="photos", clusters=3)
EPOCHS = [{"epoch": float(n), "clustering_loss": 1 / n, "selected": 0.5} for n in (1, 2, 3, 4)]
METRICS = {"images": 90, "labels": True, "data": "photos", "after": {"head": {"ACC": 0.75, "ECE": None}}}


class Recorder:
    """A tracker that writes down what it is told; ``broken`` names a method that fails."""

    def __init__(self, broken=None):
        self.broken, self.calls = broken, []

    def _note(self, name, *arguments):
        if name == self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.calls.append((name, *arguments))

    def start(self, config, folder, kept):
        self._note("start", config["clusters"], folder, dict(kept))
        kept["mine"] = "x"

    def epoch(self, stats, number):
        self._note("epoch", number, stats["clustering_loss"])

    def finish(self, figures):
        self._note("finish", figures)

    def close(self):
        self._note("close")

    @property
    def epochs(self):
        return [call[1] for call in self.calls if call[0] == "epoch"]


@pytest.fixture
def add(monkeypatch):
    """add(name, tracker): registered as a third party's would be."""
    monkeypatch.setattr(trackers, "entries", dict(trackers.entries))

    def register(name, tracker):
        trackers.entries[name] = lambda: tracker
        return tracker

    return register


def test_everything_reaches_each_tracker_that_is_known_and_it_is_closed(add, tmp_path):
    for nobody in (None, []):
        with open_trackers(nobody, tmp_path, CONFIG, EPOCHS) as track:
            track.finish(METRICS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"unknown tracker 'tensorbord'; did you mean 'tensorboard'\?.*wandb"):
        make_trackers(["tensorbord"])
    both = [add("one", Recorder()), add("two", Recorder())]
    with open_trackers(["one", "two", "one"], tmp_path, CONFIG, []) as track:
        track.epoch(EPOCHS[0])
        track.finish(METRICS)
    for tracker in both:
        told = [("start", 3, tmp_path, {}), ("epoch", 1, 1.0), ("finish", {"images": 90, "after/head/ACC": 0.75})]
        assert tracker.calls == [*told, ("close",)]


def test_a_resumed_run_passes_on_what_was_missed_and_nothing_twice(add, tmp_path):
    first = add("one", Recorder())
    with contextlib.suppress(KeyboardInterrupt), open_trackers(["one"], tmp_path, CONFIG, []) as track:
        track.epoch(EPOCHS[0])
        raise KeyboardInterrupt  # the state of epoch 2 is saved, but was not passed on
    assert first.calls[-1] == ("close",)
    again, late = add("one", Recorder()), add("late", Recorder())
    with open_trackers(["one", "late"], tmp_path, CONFIG, EPOCHS[:2]) as track:
        track.epoch(EPOCHS[2])
    assert again.calls[0][-1] == {"mine": "x", "epoch": 1}
    assert (first.epochs, again.epochs, late.epochs) == ([1], [2, 3], [1, 2, 3])
    notes = json.loads((tmp_path / NOTES).read_text())
    assert {name: kept["epoch"] for name, kept in notes.items()} == {"one": 3, "late": 3}


@pytest.mark.parametrize("method", ["start", "epoch", "finish", "close"])
def test_a_tracker_that_fails_is_left_behind_with_one_warning(add, tmp_path, caplog, method):
    broken, sound = add("broken", Recorder(method)), add("sound", Recorder())
    with open_trackers(["broken", "sound"], tmp_path, CONFIG, []) as track:
        for stats in EPOCHS:
            track.epoch(stats)
        track.finish(METRICS)
    assert sound.epochs == [1, 2, 3, 4]
    assert [call[0] for call in sound.calls[-2:]] == ["finish", "close"]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("tracker broken failed and is left out from now on")
    assert "No space left" in warning
    # What it has not seen is told when the run is resumed.
    told = json.loads((tmp_path / NOTES).read_text()).get("broken", {}).get("epoch", 0)
    assert told == len(broken.epochs) == (0 if method in ("start", "epoch") else 4)


@pytest.mark.parametrize("notes", ["[half a", "[" * 20_000, '{"one": {"epoch": "last"}}'])
def test_notes_that_cannot_be_read_or_written_do_not_end_the_run(add, tmp_path, monkeypatch, notes):
    (tmp_path / NOTES).write_text(notes)
    tracker = add("one", Recorder())

    def full(path, text):
        raise UserError("no space left")

    monkeypatch.setattr(module, "write_text", full)
    with open_trackers(["one"], tmp_path, CONFIG, EPOCHS[:2]):
        pass
    assert tracker.epochs == [1, 2]


FOLDER = types.ModuleType("wandb")  # as wandb leaves it behind: it can be imported like a package
FOLDER.__path__ = []


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [("tensorboard", "tensorboardX", None), ("wandb", "wandb", None), ("wandb", "wandb", FOLDER)],
)
def test_a_missing_package_is_refused_with_what_to_type(monkeypatch, name, package, module):
    for loaded in [key for key in sys.modules if key.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, module)
    with pytest.raises(UserError, match=rf"needs the package {package}.*; type: pip install .cdc-plugin\[log\].") as no:
        make_trackers([name])
    assert "\n" not in str(no.value)


def test_figures_are_the_finite_numbers_of_a_report():
    report = {"a": {"b": {"c": 1, "d": None}, "e": [1, 2]}, "f": 0.5, "g": True, "h": "word", "i": float("nan")}
    assert flat_figures(report) == {"a/b/c": 1, "f": 0.5}


def test_tensorboard_files_hold_every_epoch_once_also_after_a_resume(tmp_path):
    with open_trackers(["tensorboard"], tmp_path, CONFIG, []) as track:
        track.epoch(EPOCHS[0])
        on_disk = scalars(tmp_path / "tensorboard")  # before anything is closed: a killed run has it, too
    assert on_disk == [("train/clustering_loss", 1, 1.0), ("train/selected", 1, 0.5)]
    for _ in range(2):  # the second time nothing is left to do
        with open_trackers(["tensorboard"], tmp_path, CONFIG, EPOCHS[:2]) as track:
            track.finish(METRICS)
    assert scalars(tmp_path / "tensorboard") == [
        *on_disk,
        ("train/clustering_loss", 2, 0.5),
        ("train/selected", 2, 0.5),
        ("images", 2, 90.0),
        ("after/head/ACC", 2, 0.75),
    ]
    found = list(events(tmp_path / "tensorboard"))
    sessions = [(number, event.step) for number, event in found if event.HasField("session_log")]
    assert sessions == [(0, 1), (1, 2), (2, 3)]
    (settings,) = [v for _, event in found for v in event.summary.value if v.HasField("tensor")]
    assert b'"clusters": 3' in settings.tensor.string_val[0]


def test_tensorboard_files_of_an_overwritten_run_go_and_other_files_stay(tmp_path):
    with open_trackers(["tensorboard"], tmp_path, CONFIG, EPOCHS):
        pass
    (tmp_path / "tensorboard" / "mine.txt").write_text("mine")
    (tmp_path / NOTES).unlink()  # as --overwrite does
    with open_trackers(["tensorboard"], tmp_path, CONFIG, EPOCHS[:1]):
        pass
    assert [step for _, step, _ in scalars(tmp_path / "tensorboard")] == [1, 1]
    assert (tmp_path / "tensorboard" / "mine.txt").read_text() == "mine"


class Wandb:
    """What `wandb.init` gives, as far as it is used."""

    def __init__(self, monkeypatch):
        self.inits, self.logged, self.summary, self.codes = [], [], {}, []
        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=self.init))

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, values, step, commit):
        assert commit  # a killed run must not lose its last epoch
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.codes.append(exit_code)


@pytest.mark.parametrize("stated", [False, True])
def test_wandb_continues_the_same_run_where_its_variables_say(tmp_path, monkeypatch, stated):
    places = {"project": "cdc-plugin", "name": tmp_path.name, "dir": str(tmp_path)}
    for name in places:
        monkeypatch.delenv(f"WANDB_{name.upper()}", raising=False)
        if stated:
            places[name] = f"my {name}"
            monkeypatch.setenv(f"WANDB_{name.upper()}", places[name])
    wandb = Wandb(monkeypatch)
    with contextlib.suppress(KeyboardInterrupt), open_trackers(["wandb"], tmp_path, CONFIG, []) as track:
        track.epoch(EPOCHS[0])
        raise KeyboardInterrupt
    with open_trackers(["wandb"], tmp_path, CONFIG, EPOCHS[:1]) as track:
        track.epoch(EPOCHS[1])
        track.finish(METRICS)
    first, second = wandb.inits
    assert first == second
    assert {name: first[name] for name in places} == places
    assert (first["resume"], first["config"]["clusters"], len(first["id"])) == ("allow", 3, 12)
    assert [step for step, _ in wandb.logged] == [1, 2]
    assert wandb.logged[1][1] == {"train/clustering_loss": 0.5, "train/selected": 0.5}
    assert wandb.summary == {"images": 90, "after/head/ACC": 0.75}
    assert wandb.codes == [1, 0]  # interrupted, then whole
