"""Genuine checkpoints, damaged at random or made hostile: refused in one line, or loaded exactly as before."""

import functools
import importlib.util
import io
import random
import shutil
import zipfile

import pytest
import torch

from cdc_plugin.checkpoints import load_checkpoint, read_checkpoint
from cdc_plugin.errors import UserError
from tests.helpers import ROOT
from tests.helpers.checkpoint_builders.genuine import needs_shared, unpack

pytestmark = needs_shared
# Small ones; each pickles what its framework leaves beside the weights.
CASES = ("timm-test_resnet", "solo-simsiam-wrn")


@functools.cache
def fuzzing():
    """The script that damages files, as a module."""
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tests" / "benchmarks" / "fuzz_checkpoints.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=CASES)
def genuine(request, tmp_path_factory):
    return unpack(request.param, tmp_path_factory.mktemp(request.param))[0]


@functools.cache
def computed(file):
    return fuzzing().features(file)


def with_record(file, target, name, content):
    """A copy of an archive in which one record is replaced."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
        for record in old.namelist():
            new.writestr(record, content if record.endswith(name) else old.read(record))
    return target


@pytest.mark.parametrize("damage", fuzzing().DAMAGES)
def test_damage_is_refused_or_changes_nothing(genuine, damage):
    fuzz = fuzzing()
    victim = genuine.with_name(f"damaged-{genuine.name}")
    shutil.copyfile(genuine, victim)
    fuzz.DAMAGES[damage](victim, random.Random(damage))
    assert fuzz.attempt(victim, computed(genuine)) in ("refused", "same")


def test_command_hidden_in_a_genuine_file_is_refused_and_does_not_run(genuine, tmp_path):
    with zipfile.ZipFile(genuine) as archive:
        name = next(record for record in archive.namelist() if record.endswith("data.pkl"))
        content = archive.read(name)
    command = f"touch {tmp_path}/ran".encode()
    call = b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR0"
    with_record(genuine, tmp_path / "hostile.ckpt", "data.pkl", content[:2] + call + content[2:])
    with pytest.raises(UserError, match=r"^[^\n]*posix\.system[^\n]*refused[^\n]*$"):
        load_checkpoint(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()


def test_half_precision_copy_computes_nearly_the_same(genuine):
    fuzz = fuzzing()
    state = {k: v.half() if v.is_floating_point() else v for k, v in read_checkpoint(genuine).state.items()}
    half = genuine.with_name(f"half-{genuine.name}")
    shutil.copyfile(genuine, half)
    fuzz._save(half, state)
    torch.testing.assert_close(fuzz.features(half), computed(genuine), rtol=0.05, atol=0.05)


def test_legacy_copy_computes_the_same(genuine):
    fuzz = fuzzing()
    old = genuine.with_name(f"legacy-{genuine.name}")
    shutil.copyfile(genuine, old)
    fuzz._save(old, read_checkpoint(genuine).state, zipped=False)
    assert not zipfile.is_zipfile(io.BytesIO(old.read_bytes()))
    assert torch.equal(fuzz.features(old), computed(genuine))
