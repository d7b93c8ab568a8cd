"""Read the two containers that ``torch.save`` writes, without torch's loader, and check them byte by byte.

Newer files are zip archives with a checksum for every tensor, which torch ignores; here a flipped byte is noticed.
Older ones are a sequence of pickles followed by the raw numbers; of those, at least every length must agree.
"""

import io
import itertools
import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from cdc_plugin.checkpoints.safe_pickle.machine import PickleMachine
from cdc_plugin.checkpoints.safe_pickle.values import Storage, storage_type

PICKLE_LIMIT, IN_MEMORY = 64 << 20, 1 << 30
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
ENCRYPTED, SIZES_FOLLOW, UTF8 = 0x1, 0x8, 0x800


def read_archive(file: Path) -> Any:
    """Return the payload of a zip archive."""
    content = _content(file)
    with zipfile.ZipFile(file) as archive:
        records = _locate_records(archive, content)
    roots = [name.removesuffix("data.pkl") for name in records if name.count("/") <= 1 and name.endswith("data.pkl")]
    if len(roots) != 1:
        raise UnpicklingError(f"it has {len(roots)} pickles")
    root = roots[0]
    order = records.get(f"{root}byteorder")
    if order is not None and content[slice(*order)] != b"little":
        raise UnpicklingError("it is from a big-endian machine")
    start, end = records[f"{root}data.pkl"]
    if end - start > PICKLE_LIMIT:
        raise UnpicklingError(f"its pickle has {end - start} bytes")
    storages: dict[str, Storage] = {}

    def find_storage(identity: tuple[Any, ...]) -> Storage:
        if len(identity) != 5 or identity[0] != "storage":
            raise UnpicklingError("a persistent id is malformed")
        _, kind, key, _, count = identity
        name, dtype = f"{root}data/{key}", storage_type(kind)
        if name not in storages:
            if name not in records or type(count) is not int:
                raise UnpicklingError(f"the numbers {str(key)[:20]!r} are missing")
            first, last = records[name]
            if count * dtype.itemsize != last - first:
                raise UnpicklingError(f"{str(key)[:20]!r} has {last - first} bytes, not {count} numbers")
            storages[name] = Storage(_numbers(content, first, count, dtype))
        return Storage(storages[name].numbers.view(dtype))

    return PickleMachine(io.BytesIO(content[start:end]), find_storage).load()


def read_legacy(file: Path) -> Any:
    """Return the payload of a file of torch before 1.6, or of its old serialisation."""
    content = _content(file)
    if PickleMachine(content).load() != LEGACY_MAGIC:
        raise UnpicklingError("it is a pickle, but not of torch.save")
    if PickleMachine(content).load() != LEGACY_PROTOCOL:
        raise UnpicklingError("its protocol is unknown")
    machine = PickleMachine(content).load()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise UnpicklingError("it is from a big-endian machine")
    storages: dict[str, Storage] = {}
    left = len(content)

    def find_storage(identity: tuple[Any, ...]) -> Any:
        nonlocal left
        if len(identity) == 4 and identity[0] == "module":  # a class with its source code, which stays unread
            return identity[1]
        if len(identity) != 6 or identity[0] != "storage":
            raise UnpicklingError("a persistent id is malformed")
        _, kind, key, _, count, view = identity
        dtype = storage_type(kind)
        if key not in storages:
            left -= count * dtype.itemsize
            if type(count) is not int or count < 0 or left < 0:
                raise UnpicklingError("it declares more numbers than it has bytes")
            storages[key] = Storage(torch.empty(count, dtype=dtype))
        numbers = storages[key].numbers.view(dtype)
        if view is None:
            return Storage(numbers)
        _, offset, count = view
        if min(offset, count) < 0 or offset + count > numbers.numel():
            raise UnpicklingError("a part of the numbers lies outside them")
        return Storage(numbers[offset : offset + count])

    payload = PickleMachine(content, find_storage).load()
    keys = PickleMachine(content).load()
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(map(str, storages)):
        raise UnpicklingError("the list of its numbers does not agree with its content")
    for key in keys:
        numbers = storages[key].numbers
        length = content.read(8)
        if len(length) != 8 or struct.unpack("<q", length)[0] != numbers.numel():
            raise UnpicklingError("the length of its numbers does not agree with its content")
        raw = content.read(numbers.nbytes)
        if len(raw) != numbers.nbytes:
            raise UnpicklingError("it ends before its numbers do")
        if raw:
            numbers.copy_(torch.frombuffer(bytearray(raw), dtype=numbers.dtype))
    if content.tell() != len(content):
        raise UnpicklingError("it has more bytes than numbers")
    return payload


def _content(file: Path) -> mmap.mmap:
    """Return the bytes of a file; a very large one stays on disk until they are used."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        if size > IN_MEMORY:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        # Whoever overwrites a mapped file ends the process that reads it, so map nothing where there is no need.
        content = mmap.mmap(-1, size)
        stream.readinto(content)
        return content


def _numbers(content: mmap.mmap, first: int, count: int, dtype: torch.dtype) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if first % dtype.itemsize:  # torch aligns to 64 bytes, other writers need not
        return torch.frombuffer(bytearray(content[first : first + count * dtype.itemsize]), dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=first)


def _locate_records(archive: zipfile.ZipFile, content: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Return start and end of every record, after comparing its two headers, its place and its checksum."""
    # The source code in a TorchScript archive is compressed, and stays unread.
    entries = [entry for entry in archive.infolist() if not entry.is_dir() and "/code/" not in entry.filename]
    # With torch.serialization.set_crc32_options(False) all are zero.
    checked = any(entry.CRC for entry in entries)
    records: dict[str, tuple[int, int]] = {}
    for entry in entries:
        start = _data_offset(entry, content)
        end = start + entry.file_size
        if entry.filename in records or end > archive.start_dir:
            raise UnpicklingError(f"the record {entry.filename[:60]} is out of place")
        records[entry.filename] = (start, end)
        with memoryview(content) as view:
            if checked and zlib.crc32(view[start:end]) != entry.CRC:
                raise UnpicklingError(f"the checksum of {entry.filename[:60]} is wrong")
    if any(begin < end for (_, end), (begin, _) in itertools.pairwise(sorted(records.values()))):
        raise UnpicklingError("its records overlap")
    return records


def _data_offset(entry: zipfile.ZipInfo, content: mmap.mmap) -> int:
    """Return where a record's bytes begin, if the header before them agrees with the directory at the end."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise UnpicklingError(f"the record {entry.filename[:60]} is compressed, as torch.save never does")
    header = content[entry.header_offset : entry.header_offset + LOCAL_HEADER.size]
    mark, _, flags, method, _, _, crc, packed, size, name_length, extra_length = LOCAL_HEADER.unpack(header)
    begin = entry.header_offset + LOCAL_HEADER.size
    encoding = "utf-8" if entry.flag_bits & UTF8 else "cp437"
    name = content[begin : begin + name_length].decode(encoding, errors="replace")
    elsewhere = flags & SIZES_FOLLOW or 0xFFFFFFFF in (packed, size)  # large sizes stand in the extra field
    same = elsewhere or (crc, packed, size) == (entry.CRC, entry.compress_size, entry.file_size)
    if mark != b"PK\3\4" or name != entry.orig_filename or method or flags & ENCRYPTED or not same:
        raise UnpicklingError(f"the two headers of {entry.filename[:60]} disagree")
    return begin + name_length + extra_length
