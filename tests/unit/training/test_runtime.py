import errno
import os
import stat

import pytest
import torch
from safetensors import SafetensorError

from cdc_plugin.core.random_streams import generator
from cdc_plugin.data.atomic import write_atomically
from cdc_plugin.errors import UserError
from cdc_plugin.training.runtime import Runtime, choose_device


def test_streams_repeat_for_the_same_numbers_and_differ_for_others():
    def draw(*parts: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=generator(*parts)).tolist())

    keys = [(seed, purpose, epoch) for seed in range(4) for purpose in range(1, 6) for epoch in range(-3, 6)]
    keys += [(seed,) for seed in range(4)] + [(seed, purpose) for seed in range(4) for purpose in range(1, 6)]
    streams = [draw(*key) for key in keys]
    assert len(set(streams)) == len(keys)
    assert [draw(*key) for key in keys] == streams


def test_the_order_of_the_numbers_counts_and_large_or_negative_ones_are_taken():
    assert generator(1, 2).initial_seed() != generator(2, 1).initial_seed()
    for seed in (-5, 2**63, 2**70):
        torch.rand(1, generator=generator(seed))


def test_streams_of_neighbouring_seeds_are_unrelated():
    first, second = (torch.randn(2000, generator=generator(seed, 1)) for seed in (0, 1))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 0.1


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    torch.rand(3, generator=generator(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_devices_by_name():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "", "cpu:x"])
def test_a_device_that_is_not_there_is_refused_in_one_line(name):
    with pytest.raises(UserError, match="device='cpu'") as refusal:
        choose_device(name)
    assert "\n" not in str(refusal.value)


def test_autocast_is_off_for_float32_and_on_for_bfloat16():
    layer = torch.nn.Linear(2, 2)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with Runtime(torch.device("cpu"), precision).autocast():
            assert layer(torch.ones(1, 2)).dtype == dtype


def test_a_file_is_replaced_whole_and_no_other_is_left(tmp_path):
    path = tmp_path / "results ä.txt"
    path.write_text("old")
    write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_results_are_as_readable_as_other_files(tmp_path):
    ordinary, written = tmp_path / "ordinary", tmp_path / "written"
    ordinary.touch()
    write_atomically(written, lambda temporary: temporary.write_text("x"))
    assert stat.S_IMODE(os.stat(written).st_mode) == stat.S_IMODE(os.stat(ordinary).st_mode)


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt(), OSError(errno.EIO, "broken")], ids=repr)
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "state"
    path.write_text("old")

    def write(temporary):
        temporary.write_text("half of the n")
        raise failure

    with pytest.raises((type(failure), UserError)):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_full_disk_is_told_in_words_and_the_old_file_stays(tmp_path, monkeypatch, function):
    path = tmp_path / "last.pt"
    path.write_text("old")

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, full)
    with pytest.raises(UserError, match=r"no space left while writing .*last\.pt.*--resume"):
        write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


TORCH = RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
TORCH_IN_BETWEEN = RuntimeError("basic_ios::clear: iostream error")
TORCH_AT_THE_END = RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 18176 vs 18072")
SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("failure", [TORCH, TORCH_IN_BETWEEN, TORCH_AT_THE_END, SAFETENSORS], ids=str)
def test_a_full_disk_is_recognised_in_the_words_of_other_writers_too(tmp_path, failure):
    def write(_temporary):
        raise failure

    with pytest.raises(UserError, match="disk full"):
        write_atomically(tmp_path / "last.pt", write)


def test_other_runtime_errors_are_not_disguised(tmp_path):
    def write(_temporary):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        write_atomically(tmp_path / "last.pt", write)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write_atomically(tmp_path / "absent" / "file", lambda temporary: temporary.write_text("x"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_real_write_to_a_full_device_is_told(tmp_path):
    def write(_temporary):
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(UserError, match="no space left"):
        write_atomically(tmp_path / "file", write)
    assert list(tmp_path.iterdir()) == []
