"""Refine many real sets from backbones of several qualities: ``python tests/benchmarks/arena ../shared --out DIR``.

Default settings, nothing tuned for a set. What is finished is not run again. The whole takes three hours on two cores,
``--small`` 25 minutes. Writes RESULTS.md and results.html; `choose.py` chooses the constants from the same folder.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(ROOT)]

import numpy as np  # noqa: E402
from entries import ENTRIES, Entry, write_data  # noqa: E402
from tables import write_results  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, help="folder with data/, backbones/ and weights/")
    parser.add_argument("--out", type=Path, required=True, help="folder of backbones, runs and tables")
    parser.add_argument("--small", action="store_true", help="four entries, one seed")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="entries whose name holds a word")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--to-the-end", action="store_true", help="train all rounds, for choose.py")
    options = parser.parse_args(arguments)
    entries = [entry for entry in ENTRIES if entry.small or not options.small]
    entries = [entry for entry in entries if not options.only or any(word in entry.name for word in options.only)]
    seeds = range(1 if options.small else options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool:
        pretrained = {e.data + e.quality: e for e in entries if e.backbone.isdigit()}.values()
        list(pool.map(lambda entry: pretrain(entry, options.shared, options.out), pretrained))
        tasks = [(entry, seed) for seed in seeds for entry in entries]
        list(pool.map(lambda task: refine(*task, options.shared, options.out, options.to_the_end), tasks))
    write_results(options.out)
    print(f"results: {options.out / 'RESULTS.md'}, {options.out / 'results.html'}")
    return 0


def pretrain(entry: Entry, shared: Path, out: Path) -> None:
    """Make a backbone by ``cdc-pretrain``, from the images of the set alone."""
    folder = out / "backbones" / f"{entry.data}-{entry.quality}"
    if (folder / "model.safetensors").is_file():
        return
    words = ["--data", write_data(entry.data, shared, out / "data"), "--out", folder, "--epochs", entry.backbone]
    run(["-m", "cdc_plugin", "pretrain", *map(str, words), "--quiet", "--overwrite"], f"backbone {folder.name}")


def refine(entry: Entry, seed: int, shared: Path, out: Path, to_the_end: bool) -> None:
    """Run one entry in a process of its own, unless its record is there."""
    folder = out / "runs" / f"{entry.name}-{seed}"
    if (folder / "run.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    data = write_data(entry.data, shared, out / "data")
    made = entry.backbone.isdigit()
    backbone = out / "backbones" / f"{entry.data}-{entry.quality}" if made else shared / entry.backbone
    request = dataclasses.asdict(entry) | {
        "name": entry.name,
        "seed": seed,
        "data": str(data),
        "backbone": str(backbone),
        "clusters": int(np.load(data)["y"].max()) + 1,
        "out": str(folder),
        "to_the_end": to_the_end,
    }
    run([str(HERE / "one_run.py"), json.dumps(request)], folder.name)


def run(words: list[str], name: str) -> None:
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    outcome = "" if done.returncode == 0 else f" failed: {(done.stderr.splitlines() or ['?'])[-1]}"
    print(f"{name}: {time.monotonic() - began:.0f} s{outcome}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
