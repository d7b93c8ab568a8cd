"""Whole processes: peak memory of runs on many images, and how long commands take before they do anything.

As a command of its own it is the run that is measured: ``processes.py IMAGES FOLDER key=value...`` prints its peak.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import RUN_FLAGS, Found, Limit, Setting, child_environment, command_seconds, peak_memory

MEGABYTE = 1 << 20
FLAT = 1.2  # times the memory for ten times the images
MODES = {"all trained": (), "frozen backbone": ("freeze_backbone=true", "frozen_views=1")}


def memory(setting: Setting, fewer: int = 10_000) -> Found:
    """Peak memory of one epoch at 32 px with a tiny network, on 10k and on 100k images in a file."""
    from material import digits_file

    fewer = fewer // 5 if setting.quick else fewer
    rows, limits = {}, []
    with tempfile.TemporaryDirectory() as folder:
        files = {count: digits_file(Path(folder), count) for count in (fewer, 10 * fewer)}
        for mode, words in MODES.items():
            peaks = {count: _peak(file, Path(folder), (*words, *setting.words)) for count, file in files.items()}
            rows[mode] = {f"{count:,} images, MB": peak / MEGABYTE for count, peak in peaks.items()}
            few, many = peaks.values()
            rows[mode]["bytes an image"] = (many - few) / (9 * fewer)
            limits.append(Limit(f"memory, {mode}: 10 times the images", many / few, FLAT))
    return Found("memory: peak of a run of one epoch, 32 px", rows, limits)


def starting(setting: Setting) -> Found:
    """CPU seconds of ``--help``, of importing the package and of what a run has to import."""
    repeats = 1 if setting.quick else 3
    commands = {
        "python alone": ["-c", "pass"],
        "cdc-refine --help": ["-m", "cdc_plugin", "--help"],
        "import cdc_plugin": ["-c", "import cdc_plugin"],
        "import of all that a run needs": ["-c", "import cdc_plugin.pipeline"],
    }
    rows = {name: {"seconds": command_seconds(arguments, repeats)} for name, arguments in commands.items()}
    more = rows["cdc-refine --help"]["seconds"] - rows["python alone"]["seconds"]
    return Found("starting", rows, [Limit("--help: CPU seconds beyond Python's own", more, 0.25)])


def _peak(images: Path, folder: Path, words: tuple[str, ...]) -> int:
    command = [sys.executable, __file__, str(images), str(folder / "run"), *words]
    answer = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    if answer.returncode:
        raise RuntimeError(f"the run that was to be measured failed: {answer.stderr[-2000:]}")
    return int(json.loads(answer.stdout.splitlines()[-1])["peak"])


def _child(images: str, out: str, words: list[str]) -> None:
    from cdc_plugin.cli.common import set_up_process

    set_up_process()  # as the commands do
    import torch
    from torch import nn

    from cdc_plugin import pipeline
    from cdc_plugin.models.backbone import Backbone
    from cdc_plugin.training.request import configure

    torch.set_num_threads(1)
    layers = (nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(nn.Sequential(*layers), 16, (0.31,) * 3, (0.35,) * 3, 32)
    small = {"epochs": 1, "hidden": 64, "batch_size": 1000, "mini_clusters": 100}
    flags = {**RUN_FLAGS, **small, "data": images, "backbone": "<tiny>", "out": out}
    pipeline.run(configure(None, flags, words), module=backbone, overwrite=True)
    print(json.dumps({"peak": peak_memory()}))


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3:])
