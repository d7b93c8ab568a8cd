"""Genuine checkpoints, damaged at random or made hostile: refused in one line, or loaded exactly as before."""

import functools
import random
import shutil
import zipfile

import pytest
import torch

from cdc_plugin.checkpoints import load_checkpoint, read_checkpoint
from cdc_plugin.errors import UserError
from tests.benchmarks import fuzz_checkpoints as fuzz
from tests.helpers.checkpoint_builders.genuine import needs_shared, unpack

pytestmark = needs_shared
# Small ones; each pickles what its framework leaves beside the weights.
CASES = ("timm-test_resnet", "solo-simsiam-wrn")


@pytest.fixture(scope="module", params=CASES)
def genuine(request, tmp_path_factory):
    return unpack(request.param, tmp_path_factory.mktemp(request.param))[0]


@functools.cache
def computed(file):
    return fuzz.features(file)


@pytest.mark.parametrize("damage", fuzz.DAMAGES)
def test_damage_is_refused_or_changes_nothing(genuine, damage):
    victim = genuine.with_name(f"damaged-{genuine.name}")
    shutil.copyfile(genuine, victim)
    fuzz.DAMAGES[damage](victim, random.Random(damage))
    assert fuzz.attempt(victim, computed(genuine)) in ("refused", "same")


def test_command_hidden_in_a_genuine_file_is_refused_and_does_not_run(genuine, tmp_path):
    command = f"touch {tmp_path}/ran".encode()
    call = b"cposix\nsystem\n(X" + len(command).to_bytes(4, "little") + command + b"tR0"
    with zipfile.ZipFile(genuine) as old, zipfile.ZipFile(tmp_path / "hostile.ckpt", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, content[:2] + call + content[2:] if name.endswith("data.pkl") else content)
    with pytest.raises(UserError, match=r"^[^\n]*posix\.system[^\n]*refused[^\n]*$"):
        load_checkpoint(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()


def test_copies_in_the_legacy_container_and_in_half_precision_compute_the_same(genuine):
    copy, state = genuine.with_name(f"copy-{genuine.name}"), read_checkpoint(genuine).state
    shutil.copyfile(genuine, copy)
    fuzz._save(copy, state, zipped=False)
    assert not zipfile.is_zipfile(copy)
    assert torch.equal(fuzz.features(copy), computed(genuine))
    shutil.copyfile(genuine, copy)
    fuzz._save(copy, {key: value.half() if value.is_floating_point() else value for key, value in state.items()})
    torch.testing.assert_close(fuzz.features(copy), computed(genuine), rtol=0.05, atol=0.05)
