"""Keep a run on disk: the folder it writes to, and the state it is resumed from."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cdc_plugin.checkpoints.safe_pickle.containers import read_archive
from cdc_plugin.config.load import load_config, to_yaml
from cdc_plugin.config.resolve import ResolvedConfig
from cdc_plugin.config.schema import RefineConfig
from cdc_plugin.data.atomic import has_content, read_small_text, write_atomically, write_text
from cdc_plugin.data.images import ImageSet
from cdc_plugin.data.side import write_side
from cdc_plugin.errors import OutputError, option
from cdc_plugin.models.clusterer import Clusterer
from cdc_plugin.training.features import Features
from cdc_plugin.training.runtime import Runtime

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Settings of a resumed run that are the request's own: its config.yaml may not state them.
OF_THE_REQUEST = ("device", "track", "on_collapse", "trust_checkpoint", "partial_weights")
UNFIXED = ("out", "from_recipe")
CONFIG, START, STATE, HISTORY, LOG = "config.yaml", "start.pt", "last.pt", "metrics.jsonl", "train.log"
PREDICTIONS, REPORT, PAGE = "predictions.csv", "report.json", "report.html"
OTHER_FILES = ("model.safetensors", "model.json", "trackers.json")
RESULT_FILES = (CONFIG, START, STATE, HISTORY, LOG, PREDICTIONS, REPORT, PAGE, *OTHER_FILES)
EVALUATION_FILES = (PAGE, REPORT, PREDICTIONS)
COMPARISON = "comparison.json"
DEFAULT_PARENT = Path("cdc-runs")
SIDE_BY_SIDE = 64 * 1024**2  # bytes that are copied from a device at once, and held there twice for it


@dataclass
class Run:
    """What a run knows between its steps."""

    settings: ResolvedConfig
    folder: Path
    runtime: Runtime
    images: ImageSet
    model: Clusterer
    before: dict[str, Any]  # figures of the state after initialisation
    start: torch.Tensor  # (N,) k-means on the features that the run began with
    start_components: torch.Tensor  # (n, 64) principal components of these features
    start_rows: torch.Tensor  # (n,) which images they are of
    history: list[dict[str, float]] = field(default_factory=list)  # one record per finished epoch
    old: dict[str, Any] | None = None  # the model that is retrofitted: its figures, and its assignment (N,)
    snapshots: list[torch.Tensor] = field(default_factory=list)  # clusters of some images after the last epochs
    reviews: list[dict[str, Any]] = field(default_factory=list)  # what was seen after each round
    assignment: torch.Tensor | None = None  # (N,) clusters at the last review
    start_probe: float = 0.0  # how well the first features know the initial clusters, see `read_linearly`
    count: dict[str, Any] | None = None  # how the number of clusters was found, where it was looked for
    returned: dict[str, Any] = field(default_factory=dict)  # to the start: what was asked for in place of it
    setback: int | None = None  # the epoch in which a loss was not finite, if there was one
    state: dict[str, Any] | None = None  # what the run is resumed from
    features: Features | None = None  # of the plain views, where the backbone is frozen

    @property
    def asked(self) -> ResolvedConfig:
        """The settings that the run began with."""
        return replace(self.settings, **self.returned)


KEPT = (
    "before",
    "history",
    "start",
    "start_components",
    "start_rows",
    "old",
    "snapshots",
    "reviews",
    "assignment",
    "start_probe",
    "count",
    "returned",
    "setback",
)  # of a `Run`, in its state


def begin_run_folder(run: Run, may_return: bool) -> None:
    """Replace an earlier run's files by the settings of this one, and by the weights it may return to."""
    clear_results(run.folder)
    write_text(run.folder / CONFIG, to_yaml(run.settings))
    if may_return:
        write_state(run.folder, run.model.state_dict(), START)


def fixed_settings(config: RefineConfig) -> dict[str, str]:
    """Return, as text, the settings that stay the same however often a run is resumed."""
    return {name: str(value) for name, value in vars(config).items() if name not in (*OF_THE_REQUEST, *UNFIXED)}


def save_run(run: Run, refiner: dict[str, Any]) -> None:
    """Write everything that a resumed run needs, ``refiner`` being the state of training, and the history."""
    backbone = run.model.backbone
    state = {
        "version": 1,
        "refiner": refiner,
        "frozen": backbone.module.state_dict() if run.settings.freeze_backbone else None,
        "backbone": {
            "feature_dim": backbone.feature_dim,
            "mean": backbone.mean.tolist(),
            "std": backbone.std.tolist(),
            **write_side(backbone.input_size),
            "spec": backbone.spec,
        },
        "heads": run.model.calibration_head.spec,
        "digest": run.images.digest,
        "settings": fixed_settings(run.asked),
        **{name: getattr(run, name) for name in KEPT},
    }
    write_state(run.folder, state)
    write_history(run.folder / HISTORY, run.history)


def write_state(folder: Path, state: dict[str, Any], file: str = STATE) -> None:
    """Write a state as `read_state` takes it; the host waits for a device a few times, not once for every tensor."""
    tensors = [tensor for tensor in _tensors_in(state) if tensor.device.type != "cpu"]
    fetched = dict(zip(map(id, tensors), _fetch(tensors), strict=True))
    whole = _replace_tensors(state, fetched) if tensors else state
    write_atomically(folder / file, lambda path: torch.save(whole, path))


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _tensors_in(part)


def _replace_tensors(state: Any, fetched: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(state, dict):
        return {name: _replace_tensors(part, fetched) for name, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_replace_tensors(part, fetched) for part in state)
    return fetched.get(id(state), state)


def _fetch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of a device on the CPU, with the same strides; those of one type are copied side by side."""
    fetched: dict[int, torch.Tensor] = {}
    for kind in {tensor.dtype for tensor in tensors}:
        group, size = [], 0
        same = [(place, tensor.detach()) for place, tensor in enumerate(tensors) if tensor.dtype == kind]
        for place, tensor in same:
            group.append((place, tensor))
            size += tensor.nbytes
            if size < SIDE_BY_SIDE and place != same[-1][0]:
                continue
            # In the order of memory, in which networks and their optimisers need not have the last axis last.
            orders = [sorted(range(each.ndim), key=each.stride, reverse=True) for _, each in group]
            flat = [each.permute(order).flatten() for (_, each), order in zip(group, orders, strict=True)]
            parts = torch.cat(flat).cpu().split([len(each) for each in flat])
            for (number, each), order, part in zip(group, orders, parts, strict=True):
                shape = [each.shape[axis] for axis in order]
                back = sorted(range(each.ndim), key=order.__getitem__)
                fetched[number] = part.clone().view(shape).permute(back)
            group, size = [], 0
    return [fetched[place] for place in range(len(tensors))]


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write one JSON object per epoch; the whole file is replaced, so that a reader never sees half a line."""
    write_text(path, "".join(json.dumps(line) + "\n" for line in history))


def prepare_folder(out: str | None, name: str, resume: bool, overwrite: bool) -> Path:
    """Return the folder of this run, made if it is not there; refuse one that holds other files or is in use.

    It is this process's own until `leave_nothing_behind`. Without ``out`` every run gets a new numbered folder;
    to resume or to overwrite then takes the last.
    """
    if resume and overwrite:
        raise OutputError(f"{option('resume')} and {option('overwrite')} exclude each other")
    folder, present = _make(out, name, latest=resume or overwrite)
    if present and not resume and not overwrite:
        raise OutputError(
            f"{folder} is not empty ({_some(present)}); give another folder, {option('resume')} to continue that run, "
            f"or {option('overwrite')} to replace its files"
        )
    _refuse_blocked(folder, RESULT_FILES)
    if resume and present:
        _check_whole(folder)
    _claim(folder)
    for leftover in _half_written(folder):
        leftover.unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def evaluation_folder(out: str | Path | None, name: str, overwrite: bool) -> Iterator[Path]:
    """Yield the folder of an evaluation, as `prepare_folder` does; the other files of a run in it are left alone."""
    folder, present = _make(out, name, latest=overwrite)
    if present and not overwrite:
        raise OutputError(
            f"{folder} is not empty ({_some(present)}); give another folder, or {option('overwrite')} to replace "
            f"{', '.join(EVALUATION_FILES)} in it"
        )
    _refuse_blocked(folder, EVALUATION_FILES)
    _claim(folder)
    try:
        yield folder
    finally:
        leave_nothing_behind(folder)


@contextlib.contextmanager
def comparison_folder(out: str | Path | None, name: str, overwrite: bool) -> Iterator[Path]:
    """Yield the folder of a comparison: an earlier comparison is continued, any other folder must be empty."""
    folder, present = _make(out, name, latest=overwrite)
    if present and not (folder / COMPARISON).is_file():
        raise OutputError(f"{folder} holds no comparison but {_some(present)}; give another folder")
    _claim(folder)
    try:
        yield folder
    finally:
        # A comparison that could not start, on a mistyped path say, has made nothing worth keeping.
        inner = [(Path(path), files) for path, _, files in os.walk(folder, topdown=False) if Path(path) != folder]
        if not any(files for _, files in inner):
            for file in (COMPARISON, LOG):
                (folder / file).unlink(missing_ok=True)
            for path, _ in inner:
                path.rmdir()
        leave_nothing_behind(folder)


def clear_results(folder: Path) -> None:
    """Remove an earlier run's files and nothing else; its log is kept and continued."""
    for file in RESULT_FILES:
        if file != LOG:
            (folder / file).unlink(missing_ok=True)


def leave_nothing_behind(folder: Path) -> None:
    """Release a folder for other runs; remove it if a run that could not start has left nothing in it."""
    if (handle := _claims.pop(folder.absolute(), None)) is not None:
        os.close(handle)
    with contextlib.suppress(OSError):  # not empty: it stays
        folder.rmdir()
        if folder.parent == DEFAULT_PARENT:
            DEFAULT_PARENT.rmdir()


def stored_request(request: RefineConfig, folder: Path) -> RefineConfig:
    """Return the settings of a run that was killed before its first state: the folder's, where it has them."""
    path = folder / CONFIG
    if request.backbone is not None or not path.is_file():
        return request
    own = ("device", "track", "trust_checkpoint", "partial_weights")  # never from a file
    return replace(load_config(path), **{name: getattr(request, name) for name in own})


_claims: dict[Path, int | None] = {}  # folders this process writes to, with the handle of the lock if there is one


def _claim(folder: Path) -> None:
    """Lock a folder against other threads and, where the system can, processes; the lock ends with the process."""
    busy = OutputError(f"another run is writing to {folder}; wait for its end, or give another folder")
    if folder.absolute() in _claims:
        raise busy
    handle = None
    if fcntl is not None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            handle = None  # a file system without locks
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise busy from error
    _claims[folder.absolute()] = handle


def _refuse_blocked(folder: Path, files: Sequence[str]) -> None:
    blocked = [file for file in files if (folder / file).is_dir()]
    if blocked:
        raise OutputError(f"{folder / blocked[0]} is a folder, where a run writes a file; give another folder")


def _check_whole(folder: Path) -> None:
    """Refuse settings that are missing, or that something has cut: defaults would silently replace the rest."""
    config = folder / CONFIG
    if not config.is_file():
        raise OutputError(f"nothing to resume in {folder}: it has no {CONFIG}; give the folder of a run")
    try:
        names = re.findall(r"^(\w+):", read_small_text(config) if has_content(config) else "", re.MULTILINE)
    except (OSError, ValueError) as error:
        raise OutputError(f"{config} cannot be read ({error}); start again with {option('overwrite')}") from error
    missing = [name for name in ("data", "epochs", "seed", "precision") if name not in names]
    if missing:
        raise OutputError(
            f"{config} is not whole (it has no {', '.join(missing)}); start again with {option('overwrite')}"
        )


def read_state(folder: Path, file: str = STATE) -> dict[str, Any] | None:
    """Return the state of the last finished epoch, or None where a run has not got that far."""
    path = folder / file
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = read_archive(path)  # it may be a stranger's: torch's own reader can be made to run on
        return state
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutputError(f"{path} cannot be read ({reason[:150]}); start again with {option('overwrite')}") from error


def _make(out: str | Path | None, name: str, latest: bool) -> tuple[Path, list[str]]:
    """Return the folder, made if it is not there, and the names of what it holds already."""
    folder = _numbered(name, latest) if out is None else Path(os.path.expanduser(out))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A run that failed at once, on a mistyped path say, leaves its log only.
        ignored = {LOG, *(path.name for path in _half_written(folder))}
        present = sorted(path.name for path in folder.iterdir() if path.name not in ignored)
    except NotADirectoryError as error:
        raise OutputError(f"{folder} is or lies in a file; give the path of a folder") from error
    except FileExistsError as error:
        raise OutputError(f"{folder} is a file; give the path of a folder") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise OutputError(f"cannot make the result folder {str(folder)!r}: {reason}; give another folder") from error
    try:
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}; give another folder") from error
    return folder, present


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _numbered(name: str, latest: bool) -> Path:
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    pattern = re.compile(rf"{re.escape(stem)}-(\d+)")
    taken = [pattern.fullmatch(path.name) for path in DEFAULT_PARENT.glob("*")] if DEFAULT_PARENT.is_dir() else []
    numbers = [int(match.group(1)) for match in taken if match]
    number = max(numbers, default=0) + (0 if latest and numbers else 1)
    return DEFAULT_PARENT / f"{stem}-{number}"


def _half_written(folder: Path) -> list[Path]:
    """Return temporary files of a run that was killed while writing; `write_atomically` or safetensors names them."""
    ours = "|".join(re.escape(file) for file in RESULT_FILES)
    names = re.compile(rf"\.({ours})\.[a-z0-9_]{{8}}|\.tmp[A-Za-z0-9]{{6}}")
    return [path for path in folder.glob(".*") if names.fullmatch(path.name) and not path.is_dir()]
