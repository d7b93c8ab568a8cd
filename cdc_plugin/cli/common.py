"""Options made of the settings, printed tables, and the frame that alone exits: what all commands share.

Nothing heavy is imported before the arguments are understood: ``--help`` answers at once.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from cdc_plugin import __version__
from cdc_plugin.config.schema import RefineConfig, list_settings
from cdc_plugin.errors import (
    COMMAND_LINE,
    ConfigError,
    UserError,
    flatten,
    is_out_of_memory,
    join_words,
    option,
    shorten,
)
from cdc_plugin.training.signals import Terminated, ending_on_termination, find_interruption, noticing_interrupts

ARGUMENTS: dict[str, dict[str, Any]] = {"int": {"type": int}, "list[str]": {"action": "append"}}  # of add_argument
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for `mallopt`


def make_parser(program: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with ``--help`` and ``--version``."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"cdc-plugin {__version__}")
    return parser


def add_settings(
    container: argparse._ActionsContainer, *names: str, schema: type = RefineConfig, **changes: Any
) -> None:
    """Add settings as options, with the help of their fields unless ``changes`` has another; not given is None."""
    for name in names:
        item = list_settings(schema)[name]
        kind, rule = str(item.type).removesuffix(" | None"), item.metadata
        flag, given = f"--{name.replace('_', '-')}", {"help": rule["help"]}
        if kind == "bool":
            flag = flag.replace("--", "--no-") if item.default else flag
            given |= {"action": "store_const", "const": not item.default}
        else:
            given["metavar"] = rule["metavar"] or rule["symbol"]
            given |= ARGUMENTS.get(kind, {})
            if rule["default"] != "none":
                given["help"] += f" (default: {rule['default']})"
        container.add_argument(flag, dest=name, **{**given, **changes})


def add_features(container: argparse._ActionsContainer) -> None:
    """Add vectors in place of images, of one file or of several side by side."""
    add_settings(container, "features", nargs="+", action="extend")


def add_result_folder(container: argparse._ActionsContainer) -> None:
    """Add where a run writes to, and what it does with an earlier one there."""
    add_settings(container, "out")
    existing = container.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="resume the run in --out")
    existing.add_argument("--overwrite", action="store_true", help="replace the result files in --out")


def collect_flags(options: argparse.Namespace, schema: type = RefineConfig) -> dict[str, Any]:
    """Return the settings among the options that were given."""
    settings = list_settings(schema)
    return {name: value for name, value in vars(options).items() if name in settings and value is not None}


def list_recipes(group: str) -> None:
    """Print the shipped recipes, each with what it is for."""
    from cdc_plugin.config.recipes import recipe_names, recipe_summary

    names = recipe_names(group)
    for name in names:
        print(f"{name:{max(map(len, names))}s} {recipe_summary(name, group)}")


def start_log(quiet: bool) -> None:
    """Log to the terminal, or nowhere; of the processes that torchrun starts, the main one alone speaks."""
    log = logging.getLogger("cdc_plugin")
    if quiet or not is_main_process():
        log.addHandler(logging.NullHandler())  # without any, Python prints warnings itself
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def is_main_process() -> bool:
    """Return whether this process is the one that speaks for all that torchrun starts."""
    return os.environ.get("RANK", "0") == "0"


def set_up_process() -> None:
    """Set up a process that runs a command, before torch is imported; a library leaves this to its caller."""
    # Read by OpenMP when torch is imported: waiting threads sleep instead of spinning, which on a busy machine
    # took a third of the time and a quarter of the CPU seconds of the "active" policy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and weights may be no text; stderr does so anyway
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", module="PIL")  # about single images, which are read or named as skipped
    # Let the C library keep freed memory for the next tensor: requesting new pages for each took 5 % of a ResNet's
    # time and more than half of the time of a weak view.
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError, OSError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(MMAP_THRESHOLD, 1 << 30)
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


@contextlib.contextmanager
def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, kept: str = ""
) -> Iterator[argparse.Namespace]:
    """Give the options to the body of a command; what the user can mend becomes a message and exit code 2.

    An interruption adds how to continue: what it says itself, else ``kept`` and the command as it was typed.
    """
    # key=value words may stand before, between and after the options.
    options = parser.parse_intermixed_args(arguments)
    set_up_process()
    program = parser.prog if "WORLD_SIZE" not in os.environ else f"torchrun ... -m cdc_plugin {parser.prog[4:]}"
    words = sys.argv[1:] if arguments is None else arguments
    context = COMMAND_LINE.set((program, *map(str, words)))
    pressed: list[KeyboardInterrupt] = []
    try:
        with ending_on_termination(), noticing_interrupts() as pressed:
            _refuse_empty(options)
            yield options
    except (KeyboardInterrupt, Exception) as error:
        interruption = find_interruption(error) or next(iter(pressed), None)
        if interruption is not None:
            reason, code = "interrupted", 130
            if isinstance(interruption, Terminated):
                reason, code = f"stopped by {interruption.name}", interruption.exit_code
            hint = getattr(interruption, "hint", kept and f"{kept}: {program} {join_words(words)}".rstrip())
            message = "; ".join(filter(None, [f"{parser.prog}: {reason}", hint])) if is_main_process() else ""
        elif isinstance(error, UserError):
            message, code = "" if error.told else f"{parser.prog}: error: {error}", 2
        elif isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            message, code = "", 1
        elif isinstance(error, OSError) and error.strerror:  # a name that is too long, for instance, or a failing disk
            where = "a file" if error.filename is None else shorten(str(error.filename))
            message, code = f"{parser.prog}: error: {error.strerror}: {where}", 2
        elif is_out_of_memory(error):
            message, code = f"{parser.prog}: error: not enough memory ({error}); try a smaller batch or input size", 2
        else:
            raise
        if message:
            print(flatten(message), file=sys.stderr)
        sys.exit(code)
    finally:
        COMMAND_LINE.reset(context)


def _refuse_empty(options: argparse.Namespace) -> None:
    """Refuse the empty word of a shell variable that is not set, which as a path would be the current folder."""
    for name, value in vars(options).items():
        if name != "overrides" and (value == "" or (isinstance(value, list) and "" in value)):
            raise ConfigError(f"{option(name, '...')} is empty; is a variable of the shell not set?")


def format_percent(value: float | None) -> str:
    """Return a share in percent, or a dash where there is none.

    >>> format_percent(0.9876), format_percent(None)
    ('98.8', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}"


def format_table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], label_width: int, cell_width: int
) -> list[str]:
    """Return the lines of a table: labels to the left, cells to the right of their columns."""
    return [
        f"{label:{label_width}s}" + "".join(f"{cell:>{cell_width}s}" for cell in cells)
        for label, cells in [(title, columns), *rows]
    ]


def describe_unreadable(count: int) -> str:
    """Return where to find the names of images that could not be read."""
    subject, object_ = ("image", "it") if count == 1 else ("images", "them")
    return f"{count} {subject} could not be read; report.json names {object_}"
