"""Try everything on the GPU of this machine, ten minutes: ``python tests/benchmarks/gpu_check.py``.

Runs every command and training variant on the device, compares results with those of the CPU, and measures an epoch
by part, and memory. Ends with a block to paste into an issue; exits with 1 if anything failed or differs.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(1, str(HERE.parent.parent))  # the package of this checkout

# Read when a GPU multiplies its first matrices, before the run that needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch  # noqa: E402
from epoch import epoch  # noqa: E402
from measure import Setting  # noqa: E402

import cdc_plugin  # noqa: E402
from cdc_plugin.__main__ import main as command  # noqa: E402
from cdc_plugin.comparison.methods import METHODS  # noqa: E402
from cdc_plugin.errors import UserError  # noqa: E402
from cdc_plugin.training.runtime import choose_device  # noqa: E402

DEMO = Path(cdc_plugin.__file__).with_name("demo_backbone")
VARIANTS = (
    "precision=float32",
    "precision=bfloat16",
    "precision=float16",
    "deterministic=true",
    "compile=true",
    "passes=full",
    "heads=clu",
    "heads=clu+cal",
    "stop_gradient=false",
    "freeze_backbone=true",
    "init=random",
    *(f"selection={name}" for name in ("confident-column", "fixed", "flexmatch+gsf", "freematch+ppf")),
    *(f"calibration={name}" for name in ("label-smoothing", "focal", "l1", "none")),
)
# Apple's devices do not train in half precision; a CPU takes minutes for it, and for compiling.
LEFT_OUT = {"mps": ("precision=float16",), "cpu": ("precision=float16", "compile=true")}
# As far as seeds differ on the demo: a device that rounds otherwise is another seed.
MOST_ACCURACY, MOST_ECE = 0.03, 0.02
EPOCHS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _check(options.device, options.epochs, options.only, Path(folder))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda or mps (default: what there is), or cpu, to try this script")
    parser.add_argument("--epochs", type=int, default=10, help="of the runs whose results are compared (10)")
    parser.add_argument("--only", metavar="WORD", default="", help="checks whose name contains this")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = choose_device("auto").type
        if options.device == "cpu":
            parser.error("torch finds no GPU on this machine; --device cpu tries the script itself")
    try:
        choose_device(options.device)
    except UserError as error:
        parser.error(str(error))
    return options


def _check(device: str, epochs: int, only: str, folder: Path) -> int:
    reports: dict[str, Path] = {}

    def refine(name: str, *words: object, where: str = device, backbone: Path = DEMO, length: int = EPOCHS) -> str:
        out = reports[name] = folder / name.replace("=", "-")
        inputs = "--backbone", backbone, "--data", "digits", "--clusters", 10
        _run("refine", *inputs, "--out", out, "--device", where, *words, epochs=length)
        return _figures(out)

    def pair(command: str, *words: object) -> str:
        _run(command, *words, "--device", device)
        return ""

    def compare_results() -> str:
        for name, where in (("cpu", "cpu"), ("device", device)):
            refine(name, where=where, length=epochs)
        cpu, own = (_read(reports[name]) for name in ("cpu", "device"))
        for figure, most in (("ACC", MOST_ACCURACY), ("ECE", MOST_ECE)):
            if abs(cpu[figure] - own[figure]) > most:
                raise AssertionError(f"{figure} {own[figure]:.4f} on the device, {cpu[figure]:.4f} on the CPU")
        return f"device {_figures(reports['device'])}; CPU {_figures(reports['cpu'])}"

    def same_again() -> str:
        tables = [
            (folder / name / "predictions.csv").read_bytes()
            for name in ("first", "second")
            if refine(name, "deterministic=true")
        ]
        if tables[0] != tables[1]:
            raise AssertionError("two runs with deterministic=true differ")
        return "equal, byte for byte"

    def run() -> Path:
        """Return the folder of the default run, which --only may have left out."""
        if "default" not in reports:
            refine("default")
        return reports["default"]

    names = ",".join(name for name in METHODS if name != "old")
    variants = [name for name in VARIANTS if name not in LEFT_OUT.get(device, ())]
    checks: dict[str, Callable[[], str]] = {
        "CPU and device agree": compare_results,
        "deterministic twice": same_again,
        "default": lambda: refine("default"),
        **{name: (lambda name=name: refine(name, name)) for name in variants},
        "init keep": lambda: refine("kept", "--init", "keep", backbone=run()),
        "resume": lambda: pair("refine", "--resume", "--out", run()),
        "inspect": lambda: pair("inspect", DEMO, "--data", "digits"),
        "predict": lambda: pair("predict", "--model", run(), "--data", "digits", "--out", folder / "a.csv"),
        "evaluate": lambda: pair("evaluate", "--model", run(), "--data", "digits", "--out", folder / "evaluated"),
        "export": lambda: _run("export", "--model", run(), "--to", "hub", "--out", folder / "hub"),
        "pretrain": lambda: pair("pretrain", "--data", "digits", "--out", folder / "pretrained", "epochs=1"),
        "compare": lambda: _run(
            *(
                "compare",
                "--backbone",
                DEMO,
                "--data",
                "digits",
                "--clusters",
                10,
                "--methods",
                names,
                "--seeds",
                1,
                "--jobs",
                1,
            ),
            *("--out", folder / "grid", "--device", device),
            epochs=1,
        ),
    }
    if device == "cuda" and torch.cuda.device_count() > 1:
        checks["two GPUs"] = lambda: _torchrun(folder / "two")
    lines = [_try(name, check, device) for name, check in checks.items() if only in name]
    parts = epoch(Setting(device=device, quick=device == "cpu")).table() if only in "epoch" else ""
    failed = sum("FAILED" in line for line in lines)
    print("\nTo paste into an issue:\n\n```")
    print(_machine(device), *lines, parts, f"{len(lines) - failed} of {len(lines)} checks passed", sep="\n")
    print("```")
    return int(failed > 0)


def _try(name: str, check: Callable[[], str], device: str) -> str:
    """Run one check and return its line; what it prints is shown only if it fails."""
    cuda, printed, since = device == "cuda", io.StringIO(), time.monotonic()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            result = check()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        print(printed.getvalue(), traceback.format_exc(), sep="\n", file=sys.stderr)
        result = f"FAILED: {type(error).__name__}: {error}"
    memory = f"{torch.cuda.max_memory_allocated() / 2**20:7.0f} MB" if cuda else ""
    line = f"{name:30}{time.monotonic() - since:7.1f} s {memory}  {result}".rstrip()
    print(line, flush=True)
    return line


def _run(*words: object, epochs: int | None = None) -> str:
    """Run a command in this process, and raise if it does not end well."""
    try:
        command([*map(str, words), *([] if epochs is None else [f"epochs={epochs}"])])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"exit code {end.code}") from end
    return ""


def _torchrun(out: Path) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "cdc_plugin", "--backbone", DEMO, "--data", "digits", "--clusters", "10", "--out", out]
    subprocess.run([*launcher, *map(str, words), f"epochs={EPOCHS}"], check=True, timeout=600, cwd=HERE.parent.parent)
    return _figures(out)


def _read(out: Path) -> dict[str, float]:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))["after"]["calibration_head"]


def _figures(out: Path) -> str:
    found = _read(out)
    return f"ACC {100 * found['ACC']:.1f}, ECE {100 * found['ECE']:.1f}"


def _machine(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    count = torch.cuda.device_count() if device == "cuda" else 1
    system = f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"cdc-plugin {cdc_plugin.__version__}, {device}: {count} x {name}, {system}"


if __name__ == "__main__":
    sys.exit(main())
