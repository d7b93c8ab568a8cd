"""Measure speed and memory, and check both against stated limits: ``python tests/benchmarks/run.py``.

Prints tables, then everything as JSON; exits with 1 if a limit is broken. One thread and CPU seconds, so that other
work on the machine matters little; figures of other machines differ, ratios hardly.
"""

import argparse
import ast
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(1, str(HERE.parent.parent))  # the package of this checkout

from cdc_plugin.cli.common import set_up_process  # noqa: E402

set_up_process()  # as the commands do

import torch  # noqa: E402
from epoch import epoch, frozen_epoch  # noqa: E402
from measure import Found, Setting  # noqa: E402
from parts import growth, initialisation, kmeans_against_scikit_learn  # noqa: E402
from processes import memory, starting  # noqa: E402

BENCHMARKS: dict[str, Callable[[Setting], Found]] = {
    "epoch": epoch,
    "frozen": frozen_epoch,
    "kmeans": kmeans_against_scikit_learn,
    "initialisation": initialisation,
    "growth": growth,
    "memory": memory,
    "starting": starting,
}
# Commands of their own.
SCRIPTS = (
    "gpu_check.py",
    "metrics.py",
    "batchnorm.py",
    "fuzz_checkpoints.py",
    "mutants.py",
    "timm_index.py",
    "unbalanced.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.list:
        lines = [f"{name:16}{(work.__doc__ or '').splitlines()[0]}" for name, work in BENCHMARKS.items()]
        docs = {script: ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))) for script in SCRIPTS}
        others = [f"{script:24}{(doc or '').splitlines()[0]}" for script, doc in docs.items()]
        print(*lines, "\ncommands of their own:", *others, sep="\n")
        return 0
    torch.set_num_threads(1)
    setting = Setting(options.quick, options.device, options.backbone, options.data, tuple(options.set))
    found = {}
    for name in options.only or BENCHMARKS:
        found[name] = BENCHMARKS[name](setting)
        print(found[name].table(), flush=True)
    broken = [limit for result in found.values() for limit in result.limits if not limit.kept]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    results = {name: result.as_json() for name, result in found.items()}
    record = {"machine": machine, "setting": vars(setting), "results": results, "limits_broken": len(broken)}
    text = json.dumps(record, indent=2)
    print(f"\n{text}")
    if options.json:
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help="some of them")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, one to two minutes of CPU in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file, too")
    parser.add_argument("--device", default="cpu", help="device of the epoch: cpu (the default), cuda or mps")
    parser.add_argument("--backbone", metavar="FILE", help="checkpoint or timm:NAME for the epoch")
    parser.add_argument("--data", metavar="PATH", help="images for the epoch: all of them are one epoch")
    parser.add_argument("--set", nargs="+", default=(), metavar="KEY=VALUE", help="settings of the runs measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
