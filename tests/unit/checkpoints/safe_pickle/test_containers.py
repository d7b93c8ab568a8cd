"""Both of torch's containers: every byte that matters is checked, every declared size is doubted."""

import pickle
import struct
import zipfile

import pytest
import torch
from torch import nn

from cdc_plugin.checkpoints import load_checkpoint
from cdc_plugin.checkpoints.read import read_checkpoint
from cdc_plugin.errors import UserError

WEIGHTS = {"conv.weight": torch.arange(24.0).view(2, 3, 2, 2), "conv.bias": torch.ones(2)}


def pickled(module, name, *arguments):
    """The bytes of a call, in protocol 2."""
    content = pickle.dumps(arguments, 2)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + content[2:-1] + b"R."


def refused(path):
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def archive_of(path, records, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


def records_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_all_kinds_are_those_that_were_saved(tmp_path, zipped, protocol):
    shared = torch.arange(12.0)
    tensors = {
        **{str(kind): torch.arange(6).to(kind) for kind in (torch.float64, torch.float16, torch.bfloat16)},
        **{str(kind): torch.arange(6).to(kind) for kind in (torch.int64, torch.int8, torch.uint8, torch.bool)},
        "complex": torch.tensor([1 + 2j]),
        "view": shared[3:7],
        "transposed": shared.view(3, 4).t(),
        "last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.rand(3)),
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
    }
    if zipped:
        tensors["float8"] = torch.ones(3).to(torch.float8_e4m3fn)
        tensors["uint16"] = torch.arange(3).to(torch.uint16)
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    found = read_checkpoint(tmp_path / "a.pt").state
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].stride() == tensor.stride(), name
        assert torch.equal(found[name].to(torch.complex64), tensor.detach().to(torch.complex64)), name


def test_tensors_that_share_numbers_do_so_again(tmp_path):
    numbers = torch.rand(4)
    torch.save({"a": numbers, "b": numbers[1:]}, tmp_path / "a.pt")
    found = read_checkpoint(tmp_path / "a.pt").state
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_the_weights_only_loader_of_torch_opens_is_read_as_torch_reads_it(tmp_path, zipped):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2).half())
    optimizer = torch.optim.Adam(network[:2].parameters())
    network[1](network[0](torch.rand(2, 3, 5, 5))).sum().backward()
    optimizer.step()
    payload = {"state_dict": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "tag": (1.5, None)}
    torch.save(payload, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    ours = read_checkpoint(tmp_path / "a.pt").payload
    assert_same(ours, torch.load(tmp_path / "a.pt", weights_only=True))


def assert_same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset()
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert_same(list(ours), list(theirs))
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def test_changing_a_tensor_does_not_change_the_file(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    read_checkpoint(tmp_path / "a.pt").state["conv.bias"].zero_()
    assert read_checkpoint(tmp_path / "a.pt").state["conv.bias"].tolist() == [1, 1]


def test_every_flipped_byte_is_noticed_or_without_effect(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    noticed = 0
    for place in range(0, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 0x41
        (tmp_path / "b.pt").write_bytes(content)
        try:
            found = read_checkpoint(tmp_path / "b.pt").state
        except UserError:
            noticed += 1
            continue
        assert list(found) == list(WEIGHTS)
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert noticed > 20


def test_archive_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHTS, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_checkpoint(tmp_path / "a.pt").state["conv.weight"], WEIGHTS["conv.weight"])


def test_archive_that_other_tools_packed_is_read_unless_compressed(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    records = records_of(tmp_path / "a.pt")
    found = read_checkpoint(archive_of(tmp_path / "b.pt", records)).state
    assert torch.equal(found["conv.weight"], WEIGHTS["conv.weight"])
    records["a/data/0"] = bytes(50_000_000)
    packed = archive_of(tmp_path / "c.pt", records, zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < 100_000
    assert "is compressed" in refused(packed)


def test_records_that_do_not_agree_with_the_pickle_are_refused(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    records = records_of(tmp_path / "a.pt")
    short = records | {"a/data/0": records["a/data/0"][:-4]}
    assert "not 24 numbers" in refused(archive_of(tmp_path / "b.pt", short))
    assert "missing" in refused(archive_of(tmp_path / "c.pt", {k: v for k, v in records.items() if k != "a/data/0"}))
    assert "2 pickles" in refused(archive_of(tmp_path / "d.pt", records | {"b/data.pkl": b"N."}))
    assert "big-endian" in refused(archive_of(tmp_path / "e.pt", records | {"a/byteorder": b"big"}))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "words"),
    [
        (0, (10**12,), (0,), "more numbers than the file has"),
        (0, (3, 10**9), (0, 0), "more numbers than the file has"),
        (0, (25,), (1,), "more numbers"),
        (20, (5,), (1,), "more numbers"),
        (-1, (2,), (1,), "impossible"),
        (0, (2,), (-1,), "impossible"),
        (0, (-2, -2), (1, 1), "impossible"),
        (0, (2, 2), (1,), "impossible"),
        (0, (1,) * 40, (1,) * 40, "impossible"),
        (2**70, (2,), (1,), "more numbers"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_beyond_their_numbers_are_refused(tmp_path, offset, size, stride, words, zipped):
    class Tampered:
        def __init__(self, tensor):
            self.tensor = tensor

        def __reduce_ex__(self, _protocol):
            storage = torch.storage.TypedStorage(
                wrap_storage=self.tensor.untyped_storage(), dtype=self.tensor.dtype, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, {})

    payload = {"a": Tampered(torch.arange(24.0)), "b": torch.ones(1)}
    torch.save(payload, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert words in refused(tmp_path / "a.pt")


def test_legacy_file_that_declares_more_than_it_has_is_refused(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    assert whole.count(b"K\x18") >= 1  # 24 numbers
    (tmp_path / "b.pt").write_bytes(whole.replace(b"K\x18", b"J" + struct.pack("<i", 2**31 - 1)))
    assert "more numbers than it has bytes" in refused(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(whole + b"junk")
    assert "more bytes than numbers" in refused(tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes(whole[:-9])
    assert "damaged" in refused(tmp_path / "d.pt")
    length = struct.pack("<q", 24)
    assert whole.count(length) == 1
    (tmp_path / "e.pt").write_bytes(whole.replace(length, struct.pack("<q", 23)))
    assert "does not agree" in refused(tmp_path / "e.pt")


NAMES = [
    *(("os", "system"), ("posix", "system"), ("subprocess", "Popen"), ("builtins", "eval"), ("__builtin__", "exec")),
    *(("runpy", "_run_code"), ("torch.hub", "load"), ("torch.storage", "_load_from_bytes"), ("numpy", "load")),
    *(("torch.jit", "load"), ("pickle", "loads"), ("someone.tools", "run")),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_hostile_calls_are_named_and_refused_in_every_container(tmp_path, module, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attack = pickled(module, name, "touch ran")
    torch.save(WEIGHTS, tmp_path / "a.pt")
    torch.save(WEIGHTS, tmp_path / "l.pt", _use_new_zipfile_serialization=False)
    archive_of(tmp_path / "zip.pt", records_of(tmp_path / "a.pt") | {"a/data.pkl": attack})
    start = (tmp_path / "l.pt").read_bytes()
    magic_end = start.index(b".") + 1
    (tmp_path / "bare.pt").write_bytes(attack)
    (tmp_path / "text.pt").write_bytes(f"c{module}\n{name}\n(S'touch ran'\ntR.".encode())
    (tmp_path / "second.pt").write_bytes(start[:magic_end] + attack)
    for file in ("zip.pt", "bare.pt", "text.pt", "second.pt"):
        message = refused(tmp_path / file)
        assert f".{name}" in message, file
        assert "refused" in message, file
    assert not (tmp_path / "ran").exists()


def test_weights_whose_names_are_no_text_are_refused(tmp_path):
    torch.save({"\ud800": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="cannot recognise"):
        load_checkpoint(tmp_path / "a.pt")


def test_pickle_inside_a_pickle_is_never_opened(tmp_path):
    inner = pickled("os", "system", f"touch {tmp_path}/ran")
    torch.save({"state_dict": WEIGHTS, "extra": inner, "more": [inner]}, tmp_path / "a.pt")
    assert set(read_checkpoint(tmp_path / "a.pt").state) == set(WEIGHTS)
    assert not (tmp_path / "ran").exists()


def test_weights_of_a_scripted_network_are_read_and_its_code_is_not(tmp_path):
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    torch.jit.save(torch.jit.script(network), tmp_path / "a.pt")
    code = {name: b"import os" for name in records_of(tmp_path / "a.pt") if name.endswith(".py")}
    for file in (tmp_path / "a.pt", archive_of(tmp_path / "b.pt", records_of(tmp_path / "a.pt") | code)):
        state = read_checkpoint(file).state
        assert state.keys() == network.state_dict().keys()
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_a_zip_behind_a_pickle_is_not_taken_for_the_checkpoint(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pt")
    attack = pickled("os", "system", f"touch {tmp_path}/ran")
    (tmp_path / "b.pt").write_bytes(attack + (tmp_path / "a.pt").read_bytes())
    assert "system" in refused(tmp_path / "b.pt")
    assert not (tmp_path / "ran").exists()
