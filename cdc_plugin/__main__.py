"""``python -m cdc_plugin predict ...`` is ``cdc-predict ...``, and so on; without the name of a command ``cdc-refine``.

``torchrun`` starts modules, not commands: ``torchrun --nproc-per-node 4 -m cdc_plugin predict ...``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "refine": "cli.refine",
    "predict": "cli.predict",
    "evaluate": "cli.evaluate",
    "compare": "cli.compare",
    "inspect": "cli.inspect",
    "export": "cli.export",
    "pretrain": "cli.pretrain",
}


def choose(words: Sequence[str]) -> tuple[Callable[[Sequence[str]], None], list[str]]:
    """Return the command that the first word names, and the remaining words."""
    named = bool(words) and words[0] in COMMANDS
    name = words[0] if named else "refine"
    module = importlib.import_module(f"cdc_plugin.{COMMANDS[name]}")
    return getattr(module, f"{name}_command"), list(words[named:])


if __name__ == "__main__":
    command, rest = choose(sys.argv[1:])
    command(rest)
