"""Random damage to genuine checkpoints: each must be refused in one line, or compute what the whole file does.

Run on demand: ``python tests/benchmarks/fuzz_checkpoints.py FILE... --count 500``. Exit code 1 if a file fell through.
"""

import argparse
import collections
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cdc_plugin.checkpoints import load_checkpoint, read_checkpoint
from cdc_plugin.checkpoints.read import find_state_dict
from cdc_plugin.errors import UserError

Damage = Callable[[Path, random.Random], None]
TOLERANCE = 1e-4


def flip_bytes(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(dice.choice((1, 1, 2, 16, 256))):
        content[dice.randrange(len(content))] ^= dice.randrange(1, 256)
    file.write_bytes(content)


def flip_headers(file: Path, dice: random.Random) -> None:
    """Change a byte among the first or last, where the directory and the pickle lie."""
    content = bytearray(file.read_bytes())
    place = dice.randrange(min(20_000, len(content)))
    content[place if dice.random() < 0.5 else -1 - place] ^= dice.randrange(1, 256)
    file.write_bytes(content)


def truncate(file: Path, dice: random.Random) -> None:
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(dice.choice((0, 1, dice.randrange(size), dice.randrange(size), size - dice.randrange(1, 64))))


def zero_block(file: Path, dice: random.Random) -> None:
    """Leave a hole of zeros, as of a download that was broken off."""
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(dice.randrange(size))
        stream.write(bytes(min(dice.choice((64, 4096, 1 << 18)), size - stream.tell())))


def swap_blocks(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    length = min(dice.choice((16, 512, 8192)), len(content) // 3)
    first, second = dice.randrange(len(content) // 2 - length), dice.randrange(len(content) // 2, len(content) - length)
    a, b = content[first : first + length], content[second : second + length]
    content[first : first + length], content[second : second + length] = b, a
    file.write_bytes(content)


def legacy_flip(file: Path, dice: random.Random) -> None:
    """Flip a bit of the pickle in the old container, which has no checksums; for its numbers see `legacy_number`."""
    numbers = _save_legacy(file)
    _flip_bit(file, dice.randrange(file.stat().st_size - numbers), dice)


def legacy_number(file: Path, dice: random.Random) -> None:
    _flip_bit(file, -1 - dice.randrange(_save_legacy(file)), dice)


def _save_legacy(file: Path) -> int:
    """Write the file in the old container and return how many of its last bytes are numbers."""
    state = read_checkpoint(file).state
    _save(file, state, zipped=False)
    return sum(tensor.nbytes + 8 for tensor in state.values())


def safetensors_number(file: Path, dice: random.Random) -> None:
    """Flip a bit of one number in a safetensors file, which has no checksums either."""
    state = {key: value.clone().contiguous() for key, value in read_checkpoint(file).state.items()}
    save_file(state, file)
    _flip_bit(file, -1 - dice.randrange(sum(tensor.nbytes for tensor in state.values())), dice)


def drop_keys(file: Path, dice: random.Random) -> None:
    state = read_checkpoint(file).state
    for key in dice.sample(list(state), dice.choice((1, 1, 3, len(state) // 2))):
        del state[key]
    _save(file, state)


def rename_key(file: Path, dice: random.Random) -> None:
    state = read_checkpoint(file).state
    key = dice.choice(list(state))
    _save(file, {(f"{k}_" if k == key else k): v for k, v in state.items()})


def change_one(change: Callable[[Tensor, random.Random], Any], fits: Callable[[Tensor], bool] | None = None) -> Damage:
    """Change one weight that ``fits`` and save the file anew: its checksums are valid."""

    def damage(file: Path, dice: random.Random) -> None:
        state = read_checkpoint(file).state
        key = dice.choice([key for key, value in state.items() if fits is None or fits(value)])
        _save(file, state | {key: change(state[key], dice)})

    return damage


def reshaped(tensor: Tensor, dice: random.Random) -> Tensor:
    """Return the weight without a row, with one more, flat or empty."""
    if tensor.ndim == 0:
        return tensor.repeat(2)
    return dice.choice((tensor[:-1], torch.cat([tensor, tensor[:1]]), tensor.flatten()[:-1], tensor[:0]))


def spoilt(tensor: Tensor, dice: random.Random) -> Tensor:
    """Return the weight with a number that is NaN, infinite or absurd."""
    tensor = tensor.contiguous().clone()
    tensor.view(-1)[dice.randrange(tensor.numel())] = dice.choice((float("nan"), float("inf"), -1e30))
    return tensor


def is_matrix(tensor: Tensor, square: bool) -> bool:
    return tensor.ndim > 1 and (tensor.shape[0] == tensor.shape[1]) is square


TYPES = (torch.int64, torch.uint8, torch.bool, torch.complex64)
NO_TENSORS = (None, "text", [1.0, 2.0], {"a": 1})
DAMAGES: dict[str, Damage] = {
    **{work.__name__: work for work in (flip_bytes, flip_headers, truncate, zero_block, swap_blocks, legacy_flip)},
    "drop_keys": drop_keys,
    "rename_key": rename_key,
    "change_shape": change_one(reshaped),
    "transpose": change_one(lambda t, _: t.transpose(0, 1), lambda t: is_matrix(t, square=False)),
    "add_nan": change_one(spoilt, lambda t: t.is_floating_point() and t.numel() > 0),
    "other_type": change_one(lambda t, dice: t.to(dice.choice(TYPES)), torch.is_floating_point),
    "no_tensor": change_one(lambda _, dice: dice.choice(NO_TENSORS)),
}
# No file tells that these happened unless the number became absurd; they are counted on request, to know the share.
UNMARKED: dict[str, Damage] = {
    "legacy_number": legacy_number,
    "safetensors_number": safetensors_number,
    "square_transpose": change_one(lambda t, _: t.transpose(0, 1).contiguous(), lambda t: is_matrix(t, square=True)),
}


def features(path: Path) -> Tensor:
    """Compute what the network in a file makes of fixed noise, with its heads' answers and its normalisation."""
    loaded = load_checkpoint(path)
    side = min(loaded.backbone.input_size or 64, 64)
    noise = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = loaded.backbone.eval()(noise)
        answers = [head.eval()(found).flatten() for head in loaded.heads]
    return torch.cat([found.flatten(), *answers, loaded.backbone.mean.flatten(), loaded.backbone.std.flatten()])


def attempt(path: Path, expected: Tensor) -> str:
    """Return how a damaged file ends: refused, same, or a failure in words."""
    try:
        found = features(path)
    except UserError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:  # the very thing that is looked for
        return f"{type(error).__name__}: {error}"
    if found.shape == expected.shape and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
        return "same"
    return "loads another network"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=500, help="damaged copies in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the files that fell through")
    parser.add_argument("--unmarked", action="store_true", help="only damage that leaves no mark in the file")
    options = parser.parse_args()
    damages = UNMARKED if options.unmarked else DAMAGES
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures, slowest = [], 0.0
    with tempfile.TemporaryDirectory() as temporary:
        copies = {file: _copy_of_run(file, Path(temporary) / str(i)) for i, file in enumerate(options.files)}
        expected = {file: features(copy) for file, copy in copies.items()}
        for number in range(options.count):
            dice = random.Random(f"{options.seed}/{number}")
            name, damage = list(damages.items())[number % len(damages)]
            file = options.files[number // len(damages) % len(options.files)]
            victim = copies[file].with_name(f"damaged-{file.name}")
            shutil.copyfile(file, victim)
            damage(victim, dice)
            start = time.perf_counter()
            result = attempt(victim, expected[file])
            slowest = max(slowest, time.perf_counter() - start)
            fine = result in ("refused", "same")
            table[name][result if fine else "fell through"] += 1
            if not fine:
                failures.append(f"{number} {file.parent.name}/{file.name} {name}: {result[:300]}")
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(victim, options.keep / f"{number}-{file.name}")
            victim.unlink()
    print(f"{'damage':20}{'refused':>9}{'same':>6}{'fell through':>14}")
    for name, counts in table.items():
        print(f"{name:20}{counts['refused']:9}{counts['same']:6}{counts['fell through']:14}")
    print(f"slowest {slowest:.1f} s", *failures, sep="\n")
    return 1 if failures else 0


def _flip_bit(file: Path, place: int, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def _copy_of_run(file: Path, folder: Path) -> Path:
    """Copy a file with the small ones beside it, which say what the network is."""
    folder.mkdir()
    for beside in file.parent.iterdir():
        if beside.suffix in (".json", ".yaml") and beside.stat().st_size < 1_000_000:
            shutil.copyfile(beside, folder / beside.name)
    return Path(shutil.copyfile(file, folder / file.name))


def _save(file: Path, state: dict[Any, Any], zipped: bool = True) -> None:
    """Write other weights in the frame that the file had."""
    payload = read_checkpoint(file).payload
    frame = next((key for key, value in payload.items() if isinstance(value, dict) and _holds(value)), None)
    others = {
        k: v for k, v in payload.items() if isinstance(v, int | float | str) or (isinstance(v, dict) and _holds(v))
    }
    content = others | {frame: state} if frame else state
    torch.save(content, file.with_suffix(".new"), _use_new_zipfile_serialization=zipped)
    file.with_suffix(".new").replace(file)


def _holds(value: dict[Any, Any]) -> bool:
    try:
        return len(find_state_dict(value)) == len(value)
    except UserError:
        return False


if __name__ == "__main__":
    sys.exit(main())
