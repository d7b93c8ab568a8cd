"""Describe feature vectors of samples of any kind, in one space or several, as other programs computed them.

They are read where they lie, block by block: memory does not grow with their number. Pictures may lie beside them, for
the report alone.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cdc_plugin.data import cache
from cdc_plugin.data.decode import Pixels, UnreadableImageError
from cdc_plugin.data.sources import describe_source, find_kind
from cdc_plugin.data.sources.arrays import (
    LABEL_KEYS,
    find_member,
    is_archive,
    number_labels,
    number_rows,
    open_stream,
    read_header,
    read_member_header,
    split_rows,
)
from cdc_plugin.data.sources.base import UNLABELLED, ImageSource
from cdc_plugin.data.sources.hugging_face import load_hub_dataset, load_saved_dataset, open_parquet
from cdc_plugin.errors import DataError, shorten

VECTOR_KEYS = ("features", "embeddings", "embedding", "vectors", "vector", "x", "X", "data")
NAME_KEYS = ("id", "ids", "path", "paths", "name", "names", "file_name", "filename")
EXPECTED = "a .npy, .npz or .parquet file, a saved Hugging Face data set, hf:NAME:SPLIT or an array (N, D)"
IN_MEMORY = 64 * 1024**2  # bytes; more rows that have to be unpacked lie in a file
BLOCK = 4096  # rows that are unpacked at once
LARGEST = 16_384  # numbers of a sample; a covariance of them takes 2 GB
DIGESTED = 64 * 1024**2  # bytes of every space that its digest sees, in rows evenly spread
PICTURE_SIDE = 224  # pixels at which a person can tell what a picture shows


@dataclass(frozen=True)
class Space:
    """The vectors (N, D) of one file or array, of any real type, in memory or mapped, and what lies beside them."""

    rows: NDArray[Any]
    title: str
    names: list[str] | None = None
    labels: NDArray[Any] | None = None
    class_names: list[str] | None = None


@dataclass(frozen=True)
class FeatureSource:
    """Vectors of the same N samples in one space or several, side by side; indexing reads them as float32 (n, D)."""

    spaces: tuple[Space, ...]
    names: list[str]
    labels: NDArray[np.int64] | None
    class_names: list[str] | None
    digest: str
    pictures: ImageSource | None = None
    places: NDArray[np.int64] | None = None  # (N,) which of the pictures belongs to each sample; None for its own

    def __len__(self) -> int:
        return len(self.names)

    @property
    def dims(self) -> list[int]:
        """Return how many numbers each space has."""
        return [space.rows.shape[1] for space in self.spaces]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), sum(self.dims)

    @property
    def description(self) -> str:
        return " + ".join(space.title for space in self.spaces)

    def __getitem__(self, places: Any) -> NDArray[np.float32]:
        places = places if isinstance(places, slice) else np.asarray(places)
        with np.errstate(over="ignore"):  # found below
            parts = [cache.copy_rows(space.rows, places).astype(np.float32) for space in self.spaces]
        for space, part in zip(self.spaces, parts, strict=True):
            finite = np.isfinite(part).all(axis=1)
            if not finite.all():
                row = np.arange(len(self))[places][~finite][0]
                raise DataError(
                    f"{space.title}: row {row} is not finite in float32 (NaN, infinite or too large); expected finite "
                    "numbers: remove such rows, or compute them again"
                )
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def picture(self, index: int) -> Pixels | None:
        """Return the picture (H, W, 3) of a sample; None where there is none that can be read."""
        if self.pictures is None:
            return None
        with contextlib.suppress(UnreadableImageError):
            return np.asarray(self.pictures.read(index if self.places is None else int(self.places[index])))
        return None


def name_sample(source: Any) -> str:
    """Return what messages call a sample of a source: an image, unless there is nothing but its vector.

    >>> name_sample(describe_features(np.zeros((5, 8)))), name_sample("digits")
    ('sample', 'image')
    """
    return "sample" if isinstance(source, FeatureSource) and source.pictures is None else "image"


def describe_features(
    sources: Any, beside: Any = None, labels: bool = True, root: str | os.PathLike[str] | None = None
) -> FeatureSource:
    """Return the vectors of one source or of several side by side, with the images of ``beside`` as their pictures.

    >>> describe_features([np.zeros((5, 8)), np.ones((5, 3), np.float16)])[[0, 4]].shape
    (2, 11)
    """
    spaces = open_spaces(sources, labels)
    if (difference := explain_difference(spaces)) is not None:
        raise DataError(difference)
    count, named = len(spaces[0].rows), [space for space in spaces if space.names is not None]
    known = next((space for space in spaces if space.labels is not None), None)
    numbers, classes = None, None
    if known is not None:
        numbers, classes = number_labels(known.labels, count, known.title, known.class_names)
    parts = [part for space in spaces for part in _digest_parts(space)]
    names = named[0].names if named else None
    source = FeatureSource(tuple(spaces), names or number_rows((count,)), numbers, classes, cache.compute_digest(parts))
    return source if beside is None else _add_pictures(source, beside, names is not None, labels, root)


def open_spaces(sources: Any, labels: bool = False) -> list[Space]:
    """Return the spaces of one source or of several, each as it is."""
    return [_open_space(source, labels) for source in split_sources(sources)]


def explain_difference(spaces: Sequence[Space]) -> str | None:
    """Return why spaces cannot be of the same samples in the same order, by their numbers of rows and their names."""
    first = spaces[0]
    for space in spaces[1:]:
        if len(space.rows) != len(first.rows):
            return (
                f"{first.title} has {len(first.rows)} rows and {space.title} {len(space.rows)}; spaces side by side "
                "need the vectors of the same samples in the same order"
            )
    named = [space for space in spaces if space.names is not None]
    for space in named[1:]:
        if space.names != named[0].names:
            return (
                f"the names of the samples in {named[0].title} and {space.title} differ; put the rows of both into "
                "the same order"
            )
    return None


def split_sources(sources: Any) -> list[Any]:
    """Return the spaces that were given, one or a list of them; rows in a list are one space.

    >>> len(split_sources("emb.npy")), len(split_sources([[1.0, 2.0], [3.0, 4.0]])), len(split_sources(["a", "b"]))
    (1, 1, 2)
    """
    if not isinstance(sources, list | tuple):
        return [sources]
    if not sources:
        raise DataError(f"no features are given; expected {EXPECTED}")
    if not isinstance(sources[0], list | tuple | int | float) and getattr(sources[0], "ndim", 2) > 1:
        return list(sources)
    try:
        return [np.asarray(sources)]
    except ValueError as error:
        raise DataError("the rows of the list of features differ in length; expected vectors of one length") from error


def _open_space(source: Any, labels: bool) -> Space:
    """Return one space; refuse what does not have one vector of numbers for each sample."""
    if isinstance(source, str | os.PathLike):
        space = _open_path(os.fspath(source), labels)
    elif type(source).__module__.split(".")[0] == "datasets":
        space = _open_dataset(source, type(source).__name__, labels)
    else:
        space = _open_object(source, labels)
    return replace(space, rows=_check_rows(space.rows, space.title))


def _open_object(source: Any, labels: bool) -> Space:
    """Return the space of a tensor, an array or a table of pandas and its kind."""
    if hasattr(source, "todense") or getattr(source, "layout", torch.strided) != torch.strided:
        raise DataError(
            f"a sparse {type(source).__name__} holds the features; expected dense vectors: reduce them first, for "
            "example by sklearn.decomposition.TruncatedSVD"
        )
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        return Space(source.float().numpy() if source.dtype == torch.bfloat16 else source.numpy(), "array")
    rows = source.to_numpy() if hasattr(source, "to_numpy") else np.asanyarray(source)
    if rows.dtype != object or len(rows) == 0:
        return Space(rows, "array")
    if hasattr(source, "columns"):  # one of them holds the vectors, others their names or labels
        import pyarrow

        table = source.to_arrow() if hasattr(source, "to_arrow") else pyarrow.Table.from_pandas(source)
        return _open_columns(table.schema, len(table), lambda name: table.column(name).chunks, "table", labels)
    try:
        return Space(np.stack([np.asarray(row) for row in rows]), "array")
    except ValueError as error:
        raise _explain_ragged("array") from error


def _check_rows(rows: NDArray[Any], title: str) -> NDArray[Any]:
    if rows.dtype.kind not in "biuf":
        raise DataError(
            f"{title} holds {rows.dtype}; expected real numbers: an array (N, D) with one vector for each sample"
        )
    if rows.ndim > 2 and sorted(rows.shape[1:])[-2] == 1:  # pooled maps (N, D, 1, 1)
        rows = rows.reshape(len(rows), -1)
    if rows.ndim != 2:
        hint = "; pool the tokens of a sample, or take one of them: x[:, 0]" if rows.ndim == 3 else ""
        raise DataError(f"{title}: expected an array (N, D), one vector for each sample; found {rows.shape}{hint}")
    if len(rows) == 0 or rows.shape[1] < 2:
        raise DataError(f"{title} holds no vectors (shape {rows.shape}); expected (N, D) with D of at least 2")
    if rows.shape[1] > LARGEST:
        raise DataError(
            f"{title} has vectors of {rows.shape[1]:,} numbers, at most {LARGEST:,} are taken; reduce them first, for "
            "example by sklearn.decomposition.TruncatedSVD"
        )
    return rows


def _open_path(source: str, labels: bool) -> Space:
    kind, path = find_kind(source), Path(source).expanduser()
    if kind == "array":
        with _explain_unreadable(path):
            return _open_archive(path, labels) if is_archive(path) else _open_array(path)
    if kind == "parquet":
        return _open_parquet(path, labels)
    if kind in ("saved", "hub"):
        load = load_saved_dataset if kind == "saved" else load_hub_dataset
        return _open_dataset(load(source), source, labels)
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); copy or compute it again")
    found = f"{source} holds no features" if path.exists() else f"nothing at {source}"
    raise DataError(f"{found}; expected {EXPECTED}; check the path")


def _open_array(path: Path) -> Space:
    with open_stream(path, None) as stream:
        shape, _, dtype = read_header(stream, path.stat().st_size)
    empty = prod(shape) == 0  # which cannot be mapped
    return Space(np.empty(shape, dtype) if empty else np.load(path, mmap_mode="r", allow_pickle=False), str(path))


def _open_archive(path: Path, labels: bool) -> Space:
    """Return the vectors of a .npz file with their names and labels, if it holds some; large ones are unpacked once."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        headers = {key: read_member_header(archive, key) for key in archive.files[:1000]}
        arrays = {key: dtype.kind for key, (shape, dtype) in headers.items() if len(shape) > 1}
        vectors = [(key, kind == "f") for key, kind in arrays.items() if kind in "iuf"]
        key = _choose_vectors(vectors, list(headers), str(path))
        (count, *width), dtype = headers[key]

        def read(keys: Sequence[str]) -> NDArray[Any] | None:
            name = next((name for name in keys if name in headers and name != key), None)
            if name is None:
                return None
            if headers[name][1].hasobject:
                raise DataError(f"{path}: {name} holds pickled objects; save it as an array of numbers or words")
            return archive[name]

        words, numbers = read(NAME_KEYS), read(LABEL_KEYS) if labels else None
        member = find_member(archive, key)
        if prod((count, *width)) * dtype.itemsize <= IN_MEMORY or headers[key][1].hasobject:
            return Space(archive[key], str(path), _to_names(words, count), numbers)

    def blocks() -> Iterator[NDArray[Any]]:
        with open_stream(path, member) as stream:
            column_first = read_header(stream)[1]
            if column_first:
                raise ValueError("it is stored column by column; save np.ascontiguousarray(x)")
            for rows in split_rows(range(count), BLOCK, prod(width) * dtype.itemsize):
                block = np.empty((len(rows), *width), dtype)
                if stream.readinto(block.reshape(-1).view(np.uint8)) < block.nbytes:
                    raise EOFError
                yield block

    return Space(_keep(blocks, (count, *width)), str(path), _to_names(words, count), numbers)


def _open_parquet(path: Path, labels: bool) -> Space:
    """Return the column of vectors of a parquet file, or of those of a folder, and its names and labels."""
    schema, count, read = open_parquet(path)
    return _open_columns(schema, count, read, str(path), labels)


def _open_dataset(dataset: Any, title: str, labels: bool) -> Space:
    """Return the column of vectors of a Hugging Face data set, and its names and labels."""
    import datasets

    if isinstance(dataset, datasets.DatasetDict) and len(dataset) == 1:
        dataset = next(iter(dataset.values()))
    if not isinstance(dataset, datasets.Dataset):
        splits = f" with the splits {', '.join(dataset)}; give one of them" if isinstance(dataset, dict) else ""
        raise DataError(f"{title} is a {type(dataset).__name__}{splits}; expected a datasets.Dataset")

    def read(column: str) -> Iterator[Any]:
        chosen = dataset.select_columns([column]).with_format("arrow")
        for start in range(0, len(dataset), BLOCK):
            yield from chosen[start : start + BLOCK].column(column).chunks

    space = _open_columns(dataset.features.arrow_schema, len(dataset), read, title, labels)
    label = next((name for name in LABEL_KEYS if name in dataset.features), "")
    classes = getattr(dataset.features.get(label), "names", None)
    if space.labels is not None and classes and (space.labels < 0).any():  # what sets without public labels have
        return replace(space, labels=None)
    return replace(space, class_names=classes)


def _open_columns(schema: Any, count: int, read: Callable[[str], Iterable[Any]], title: str, labels: bool) -> Space:
    """Return the vectors in a column of lists; ``read`` yields the parts of a column."""
    from pyarrow import types

    kinds = [(item.name, getattr(item.type, "value_type", None)) for item in schema]  # that of lists
    vectors = [(n, types.is_floating(k)) for n, k in kinds if k and (types.is_floating(k) or types.is_integer(k))]
    column = _choose_vectors(vectors, schema.names, title)

    def read_all(keys: Sequence[str]) -> NDArray[Any] | None:
        name = next((name for name in keys if name in schema.names), None)
        kind = None if name is None else schema.field(name).type
        if kind is None or not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
            return None
        values = [value for part in read(name) for value in part.to_pylist()]  # type: ignore[arg-type]
        return None if None in values else np.array(values)

    def blocks() -> Iterator[NDArray[Any]]:
        width = None
        for part in read(column):
            for start in range(0, len(part), BLOCK):
                block = _to_matrix(part.slice(start, BLOCK), f"{title}, column {column}")
                if width not in (None, block.shape[1]):
                    raise _explain_ragged(f"{title}, column {column}")
                width = block.shape[1]
                yield block

    first = next(blocks(), None)
    if first is None:
        raise DataError(f"{title} holds no rows; expected at least one vector")
    names = _to_names(read_all(NAME_KEYS), count)
    return Space(_keep(blocks, (count, first.shape[1])), title, names, read_all(LABEL_KEYS) if labels else None)


def _to_matrix(column: Any, title: str) -> NDArray[np.float32]:
    """Return the lists of a column of pyarrow as rows."""
    from pyarrow import compute

    lengths = compute.list_value_length(column)
    if lengths.null_count or len(set(lengths.unique().to_pylist())) != 1:
        raise _explain_ragged(title)
    return column.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), -1)


def _explain_ragged(title: str) -> DataError:
    return DataError(f"{title}: expected vectors of one length in every row; some are missing, longer or shorter")


def _choose_vectors(candidates: Sequence[tuple[str, bool]], present: Sequence[str], title: str) -> str:
    """Return which of the candidates, by name and whether they hold fractions, is the array of vectors."""
    names = [name for name, _ in candidates]
    for known in VECTOR_KEYS:
        if known in names:
            return known
    fractions = [name for name, fractional in candidates if fractional] or names
    if len(fractions) == 1:
        return fractions[0]
    raise DataError(
        f"{title}: expected the vectors (N, D) under one of {', '.join(VECTOR_KEYS)}; found "
        f"{shorten(', '.join(present), 200)}; save them as np.savez(path, features=x, y=labels) does"
    )


def _keep(blocks: Callable[[], Iterable[NDArray[Any]]], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return unpacked rows, few in memory, many in a mapped file that goes with this process."""
    if 4 * prod(shape) > IN_MEMORY:
        rows = cache.write_private_rows("features", blocks(), shape, np.float32)
        if rows is not None:
            return cache.protect(rows)
    return np.concatenate([np.asarray(block, np.float32) for block in blocks()])


def _to_names(values: NDArray[Any] | None, count: int) -> list[str] | None:
    if values is None or values.shape != (count,):
        return None
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]


def _digest_parts(space: Space) -> Iterator[str | bytes]:
    yield f"{space.rows.shape} {space.rows.dtype}"
    step = -(-space.rows.nbytes // DIGESTED)
    for rows in split_rows(range(0, len(space.rows), step), BLOCK, space.rows[:1].nbytes):
        yield cache.copy_rows(space.rows, slice(rows.start, rows.stop, step)).tobytes()


def _add_pictures(
    source: FeatureSource, beside: Any, named: bool, labels: bool, root: str | os.PathLike[str] | None
) -> FeatureSource:
    """Return the source with pictures: those that the names of its samples name, else all in their order."""
    pictures = describe_source(beside, PICTURE_SIDE, root, labels)
    places = None
    if named:
        known = {os.path.splitext(name)[0]: place for place, name in enumerate(pictures.names)}
        known |= {name: place for place, name in enumerate(pictures.names)}
        missing = [name for name in source.names if name not in known]
        if missing:
            raise DataError(
                f"{pictures.description} has no image {shorten(missing[0])} ({len(missing)} of {len(source)} names are "
                f"not there); expected paths below it such as {shorten(pictures.names[0])}"
            )
        places = np.array([known[name] for name in source.names], dtype=np.int64)
    elif len(pictures) != len(source):
        raise DataError(
            f"{source.description} has {len(source)} rows and {pictures.description} {len(pictures)} images; expected "
            f"the same in the same order (sorted by path: {', '.join(map(shorten, pictures.names[:2]))}, ...), or a "
            "column of paths beside the vectors"
        )
    found = None if pictures.labels is None or (pictures.labels == UNLABELLED).any() else pictures.labels
    numbers, classes = source.labels, source.class_names
    if numbers is None and labels and found is not None:
        numbers, classes = (found if places is None else found[places]), pictures.class_names
    names = source.names if named else pictures.names
    return replace(source, names=names, labels=numbers, class_names=classes, pictures=pictures, places=places)


@contextlib.contextmanager
def _explain_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # damaged files make NumPy and zipfile raise nearly every kind of error
        reason = "it ends early" if isinstance(error, EOFError) else " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} cannot be read as a NumPy file ({reason}); expected an array (N, D) without pickled objects, such "
            "as np.save(path, features) writes"
        ) from error
