import contextlib
import json
import logging
import os

import pytest

from cdc_plugin.errors import OutputError
from cdc_plugin.training.progress import TrainingProgress, log, log_to, show_progress
from cdc_plugin.training.run_folder import write_history

STATS = {"clustering_loss": 0.5, "calibration_loss": 0.25, "selected": 0.75, "confidence": 0.5}


def test_log_lines_are_appended_with_time_and_level_and_the_handler_goes_away(tmp_path):
    path = tmp_path / "train.log"
    handlers, level = list(log.handlers), log.level
    for word in ("first", "zweitens ü"):
        with contextlib.suppress(ZeroDivisionError), log_to(path):
            log.info("%s", word)
            _ = 1 / 0
    log.info("nobody listens")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["INFO first", "INFO zweitens ü"]
    assert (log.handlers, log.level) == (handlers, level)


def test_a_file_name_that_is_no_valid_text_is_logged_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log, "propagate", False)  # pytest cannot pass such text between its processes
    with log_to(tmp_path / "train.log"):
        log.info("skipped %s", b"\xff.png".decode("utf-8", "surrogateescape"))
    assert r"skipped \udcff.png" in (tmp_path / "train.log").read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_the_log_is_never_written_through_a_link_or_to_a_pipe(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (tmp_path / "train.log").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe.log")
    for name in ("train.log", "pipe.log"):
        with pytest.raises(OutputError, match=name), log_to(tmp_path / name):
            log.info("a line")
    assert victim.read_text() == "mine"


def test_history_is_one_json_object_per_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}]
    for length in (1, 2):
        write_history(path, history[:length])
    assert [json.loads(line) for line in path.read_text().splitlines()] == history


def test_an_epoch_is_logged_and_recorded_and_bars_are_silent_off_a_terminal(caplog, capsys):
    assert list(show_progress(iter("abc"), 3, "letters")) == ["a", "b", "c"]
    bar = TrainingProgress(2, 5, 3)
    with caplog.at_level(logging.INFO, logger="cdc_plugin"):
        for _ in range(3):
            bar.after_batch(STATS)
        record = bar.record_epoch({"epoch": 3, **STATS})
        assert not caplog.messages  # the state is saved first
        bar.after_epoch(record)
    bar.close()
    assert set(record) == {"epoch", *STATS, "seconds"}
    assert caplog.messages[0].startswith("epoch 3/5: clustering loss 0.5000, calibration loss 0.2500, selected 75.0%")
    assert caplog.messages[0].endswith("left")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00")])
def test_the_time_left_in_words(seconds, text):
    bar = TrainingProgress(0, 2, 1)
    bar.began -= seconds
    assert bar._time_left(1) == text
