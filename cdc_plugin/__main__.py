"""``cdc COMMAND ...`` and ``python -m cdc_plugin COMMAND ...``; the latter refines where no command is named.

``cdc predict ...`` is ``cdc-predict ...``, and so on. ``torchrun`` starts modules, not commands:
``torchrun --nproc-per-node 4 -m cdc_plugin predict ...``.
"""

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from cdc_plugin import __version__

COMMANDS = {
    "refine": "turn a pretrained backbone into calibrated clusters",
    "predict": "sort new images into the clusters of a finished run",
    "evaluate": "report on clustering models, one or several side by side",
    "compare": "run clustering methods side by side on your own images",
    "inspect": "say what a checkpoint is and whether it suits a set of images",
    "export": "write a refined network for another library",
    "pretrain": "train a backbone on your images alone, for refine to start from",
}
USAGE = "\n".join(
    [
        "usage: cdc COMMAND ...",
        "",
        "Calibrated clusters from any self-supervised image backbone, without labels.",
        "",
        "commands (cdc COMMAND --help shows their options):",
        *(f"  {name:10s} {summary}" for name, summary in COMMANDS.items()),
    ]
)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command that the first word names."""
    first, *rest = list(sys.argv[1:] if words is None else words) or ["--help"]
    if first in COMMANDS:
        run(first, rest)
    elif first in ("-h", "--help", "--version"):
        print(f"cdc-plugin {__version__}" if first == "--version" else USAGE)
    else:
        near = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(COMMANDS)}"
        print(f"cdc: error: unknown command {first!r}; {hint}", file=sys.stderr)
        sys.exit(2)


def run(name: str, words: Sequence[str]) -> None:
    """Run a command; only its own module is imported."""
    module = importlib.import_module(f"cdc_plugin.cli.{name}")
    getattr(module, f"{name}_command")(list(words))


def run_process(words: Sequence[str]) -> None:
    """Run a command that a process was started for; one of torchrun's processes then leaves at once.

    A thread of gloo that lets go of a tensor while the interpreter is torn down aborts the process, which torchrun
    would report in place of the exit code.
    """
    code = 0
    try:
        main(words)
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        code = ended.code
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_process(sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in COMMANDS else ["refine", *sys.argv[1:]])
