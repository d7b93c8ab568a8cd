import os
import subprocess
import sys
import zipfile

import pytest
import torch

from cdc_plugin.errors import UserError
from cdc_plugin.training import run_folder
from cdc_plugin.training.run_folder import (
    RESULT_FILES,
    clear_results,
    comparison_folder,
    evaluation_folder,
    leave_nothing_behind,
    read_state,
    write_state,
)
from tests.helpers import ROOT
from tests.helpers.pretend_device import PretendDevice


def fill(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("content")


def begun(folder):
    (folder / "config.yaml").write_text("data: x\nepochs: 3\nseed: 0\nprecision: float32\n")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def prepare_folder(out, name="x", resume=False, overwrite=False):
    folder = run_folder.prepare_folder(None if out is None else str(out), name, resume, overwrite)
    os.close(run_folder._claims.pop(folder.absolute()))  # as if the run had ended at once
    return folder


def test_a_new_folder_is_made_with_its_parents_and_numbered_without_a_name(tmp_path, monkeypatch):
    assert names_in(prepare_folder(tmp_path / "a b" / "ü")) == []
    monkeypatch.chdir(tmp_path)
    made = [str(prepare_folder(None, "my photos!")) for _ in range(3)]
    assert made == [os.path.join("cdc-runs", f"my-photos-{number}") for number in (1, 2, 3)]
    begun(tmp_path / made[-1])
    assert str(prepare_folder(None, "my photos!", resume=True)) == made[-1]
    assert str(prepare_folder(None, "my photos!", overwrite=True)) == made[-1]
    assert str(prepare_folder(None, "other")).endswith("other-1")


NOT_EMPTY = r"not empty \(a, b, config\.yaml, \.\.\.\).*resume=True.*overwrite=True"


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["config.yaml", "thesis.tex", "a", "b"], {}, NOT_EMPTY),
        (["thesis.tex"], {"resume": True}, r"nothing to resume .* no config\.yaml"),
        ([], {"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_a_folder_that_a_run_cannot_use_is_refused_and_left_alone(tmp_path, names, options, message):
    fill(tmp_path, *names)
    with pytest.raises(UserError, match=message):
        prepare_folder(tmp_path, **options)
    assert names_in(tmp_path) == sorted(names)


def test_overwrite_removes_the_files_of_a_run_and_no_other(tmp_path):
    foreign = ["thesis.tex", ".hidden", ".config.yaml.swp", "model.safetensors.bak", "report.json.txt"]
    fill(tmp_path, *RESULT_FILES, *foreign)
    fill(tmp_path / "cache", "images")
    prepare_folder(tmp_path, overwrite=True)
    assert set(RESULT_FILES) <= set(names_in(tmp_path))  # the new run may still turn out to be impossible
    clear_results(tmp_path)
    assert names_in(tmp_path) == sorted([*foreign, "cache", "train.log"])
    assert names_in(tmp_path / "cache") == ["images"]


def test_resume_removes_nothing_but_half_written_files(tmp_path):
    fill(tmp_path, "last.pt", "notes.txt", ".last.pt.k3_x9qzb", ".last.pt.backup", ".vimrc", ".tmpAb3dE9")
    begun(tmp_path)
    prepare_folder(tmp_path, resume=True)
    assert names_in(tmp_path) == sorted(["config.yaml", "last.pt", "notes.txt", ".last.pt.backup", ".vimrc"])


def test_a_run_killed_before_its_first_state_or_that_failed_at_once_does_not_block_the_folder(tmp_path):
    fill(tmp_path, "train.log")  # all that a run with a mistyped checkpoint leaves behind
    assert prepare_folder(tmp_path) == tmp_path
    fill(tmp_path, ".config.yaml.ab_d3fgh")
    assert prepare_folder(tmp_path, resume=True) == tmp_path


@pytest.mark.parametrize("text", ["", "data: x\n", "data: x\nepochs: 3\nseed: 0\npreci"])
def test_settings_that_were_cut_are_not_filled_up_with_defaults(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is not whole .*precision.*overwrite=True"):
        prepare_folder(tmp_path, resume=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux only")
def test_settings_that_state_no_size_are_not_read(tmp_path):
    (tmp_path / "config.yaml").symlink_to("/proc/self/status")  # as /proc/kmsg, which never ends
    with pytest.raises(UserError, match=r"config\.yaml is not whole \(it has no data, epochs, seed, precision\)"):
        prepare_folder(tmp_path, resume=True)


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be locked here")
def test_a_folder_that_another_process_writes_to_is_refused_until_it_ends_in_any_way(tmp_path):
    code = (
        "import sys; from cdc_plugin.training.run_folder import prepare_folder;"
        "prepare_folder(sys.argv[1], 'x', resume=False, overwrite=True); print(flush=True); sys.stdin.read()"
    )
    command, environment = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with pytest.raises(UserError, match=r"another run is writing to .*another folder"):
        prepare_folder(tmp_path, overwrite=True)
    other.kill()
    other.communicate()
    assert prepare_folder(tmp_path, overwrite=True) == tmp_path


@pytest.mark.parametrize("second", [evaluation_folder, comparison_folder])
def test_one_evaluation_or_comparison_writes_to_a_folder(tmp_path, second):
    fill(tmp_path, "comparison.json")
    with evaluation_folder(tmp_path, "x", overwrite=True):
        with pytest.raises(UserError, match="another run is writing"), second(tmp_path, "x", overwrite=True):
            pass
        with pytest.raises(UserError, match="another run is writing"):
            prepare_folder(tmp_path, overwrite=True)
    with second(tmp_path, "x", overwrite=True):
        pass


def test_a_folder_in_place_of_a_page_is_refused_before_anything_is_evaluated(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match="is a folder"), evaluation_folder(tmp_path, "x", overwrite=True):
        pass


def test_a_run_that_never_started_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = prepare_folder(None)
    leave_nothing_behind(folder)
    assert names_in(tmp_path) == []
    fill(prepare_folder(None), "config.yaml")
    leave_nothing_behind(folder)
    assert (folder / "config.yaml").is_file()


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_the_way_is_refused(tmp_path, path):
    fill(tmp_path, "file")
    with pytest.raises(UserError, match="give the path of a folder"):
        prepare_folder(tmp_path / path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot write"):
            prepare_folder(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_state_reads_back_equal_no_state_is_none_and_a_broken_one_is_told(tmp_path):
    assert read_state(tmp_path) is None
    write_state(tmp_path, {"epoch": 3, "weights": {"a": torch.arange(4.0)}, "history": [{"loss": 0.5}]})
    state = read_state(tmp_path)
    assert state["epoch"] == 3
    assert torch.equal(state["weights"]["a"], torch.arange(4.0))
    assert names_in(tmp_path) == ["last.pt"]
    (tmp_path / "last.pt").write_bytes(b"half")
    with pytest.raises(UserError, match=r"last\.pt cannot be read .*overwrite=True") as refusal:
        read_state(tmp_path)
    assert "\n" not in str(refusal.value)


def test_the_state_of_a_stranger_neither_hangs_nor_crashes(tmp_path):
    doubled = b"\x80\x02)" + b"2\x86" * 60 + b"q\x00}h\x00K\x01s."  # a tuple whose hash takes years
    with zipfile.ZipFile(tmp_path / "last.pt", "w") as archive:
        archive.writestr("a/data.pkl", doubled)
    with pytest.raises(UserError, match="cannot be read"):
        read_state(tmp_path)


def test_a_state_on_a_device_is_written_with_few_waits_and_read_as_it_was(tmp_path):
    with PretendDevice() as device:
        many = [torch.rand(3, 2, 4, 4).to("cuda", memory_format=torch.channels_last) for _ in range(30)]
        rest = {"steps": torch.tensor(7), "wide": torch.rand(2, 5).to("cuda").T, "none": torch.empty(0, 3).to("cuda")}
        steps = [torch.tensor(float(number)).to("cuda") for number in range(30)]
        counts = torch.arange(5).to("cuda")
        device.waits.clear()
        write_state(tmp_path, {"many": (many, steps), **rest, "counts": counts, "word": "x"})
        assert sum(device.waits.values()) <= 2  # for floats and for whole numbers
        expected = [each.cpu() for each in (*many, *steps, *rest.values(), counts)]
    read = read_state(tmp_path)
    found = [*read["many"][0], *read["many"][1], *(read[name] for name in rest), read["counts"]]
    assert read["word"] == "x"
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [each.stride() for each in found[:30]] == [each.stride() for each in expected[:30]]
