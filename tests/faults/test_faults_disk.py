"""Full disks, folders that cannot be written to, and files that disappear."""

import resource
import shutil
import signal

import pytest

from tests.helpers.fault_runs import EPOCHS, TRAIN_BATCH, Fault, assert_refused, count_epochs, list_names, refine

FULL = "(no space|disk full).*--resume"


@pytest.mark.parametrize(
    ("fault", "epochs", "words"),
    [
        (Fault("torch:save", "half-fill-disk", call=3), 1, FULL),
        (Fault("os:fsync", "fill-disk", call=5), 1, FULL),  # config, state, history, state of epoch 1, its history
        (Fault("os:replace", "fill-disk", matching="metrics.jsonl", call=EPOCHS + 1), EPOCHS, FULL),
        (Fault("os:replace", "fill-disk", matching="predictions.csv"), EPOCHS, FULL),
        (Fault("tempfile:mkstemp", "deny", call=4), 1, "cannot write .*Read-only file system"),
    ],
)
def test_a_disk_that_is_full_or_locked_ends_the_run_in_one_line_and_the_earlier_state_is_whole(
    case, out, fault, epochs, words
):
    line = assert_refused(refine(*case.words, "--out", out, fault=fault), words)
    assert str(out) in line
    assert count_epochs(out) in (epochs - 1, epochs)
    assert not {name for name in list_names(out) if name.startswith(".")}
    case.check(out)


def small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes then fail with EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_write_that_fails_for_real_is_one_line_and_nothing_half_is_left(case, out):
    """A limit on file sizes makes torch's C++ writer fail, which has its own error messages."""
    assert_refused(refine(*case.words, "--out", out, limit=small_files), r"cannot write .*last\.pt")
    assert list_names(out) == {"config.yaml", "train.log"}
    case.check(out)


def test_data_that_disappeared_are_named_on_resume(case, tmp_path, out):
    data = tmp_path / "digits.npz"
    shutil.copy(case.words[3], data)
    refine(*case.words, "--data", data, "--out", out, fault=Fault(TRAIN_BATCH, call=5))
    data.rename(tmp_path / "elsewhere.npz")
    before = (out / "last.pt").read_bytes()
    assert_refused(refine("--resume", "--out", out), str(data))
    (tmp_path / "elsewhere.npz").rename(data)
    assert (out / "last.pt").read_bytes() == before
    assert refine("--resume", "--out", out).code == 0
    assert (out / "predictions.csv").read_bytes() == (case.whole / "predictions.csv").read_bytes()


def test_an_image_that_disappears_while_the_folder_is_read_is_skipped_and_named(
    case, digits, write_images, tmp_path, out
):
    photos = write_images(tmp_path / "photos", digits[0][:120])
    gone = photos / "image 050.png"
    fault = Fault("cdc_plugin.data.decode:decode_file", "delete", path=str(gone))
    ended = refine(*case.words, "--data", photos, "--out", out, "--epochs", 1, fault=fault)
    assert ended.code == 0, ended.errors
    assert not gone.exists()
    assert "skipped image 050.png" in ended.errors
    assert "1 image could not be read" in ended.out
    assert len((out / "predictions.csv").read_text().splitlines()) == 120  # a header and 119 images
