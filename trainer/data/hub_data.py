"""Data sets that package `datasets` reads: their builder, rows and errors."""

import functools
import itertools
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.compressed import check_no_compressed_duplicates
from trainer.data.datasets_patches import (
    check_is_own,
    check_lossless,
    check_tables,
    own_files_only,
    read_csv_strictly,
)
from trainer.data.files import (
    COMPRESSED,
    NoColumn,
    check_directory,
    check_numbered_files,
)
from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import check_link_target, check_regular, path_of
from trainer.text import note, override

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

    from trainer.data.corpus import HubSource

DOCUMENTATION = re.compile(r"(?i)(readme|license)(\.(txt|rst))?|.*\.md")
# Files that `datasets.save_to_disk` writes beside the rows: splits, columns, names of
# data files.
DICT_FILE, STATE_FILE = "dataset_dict.json", "state.json"
SAVED_TO_DISK = (DICT_FILE, "dataset_info.json", STATE_FILE)
# The words by which `datasets` finds splits in names of files that are in no archive.
SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|test|valid|dev)(?:ing|ation)?(?![a-z])")

ROWS_PER_BATCH = 1000
# The last bytes of an Arrow stream, and of an Arrow file.
ARROW_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1")
# Their readers notice damage everywhere. What follows a damaged stream of the others is
# left out in silence.
EXACT_COMPRESSIONS = ("gzip", "zstd", "zip")


def check_not_builder(name: str) -> None:
    """Raise UserError for `text`, `json` and other file formats of `datasets`.

    By such a name, `datasets` would read all files in the working directory.
    """
    if name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}"):
        raise UserError(
            f"data.name={name} is a file format of the package datasets, not a data"
            " set; data=text data.paths=[FILE,...] reads files"
        )


def local_files(folder: Path) -> list[Path]:
    """Return the files below `folder`; an empty list if it is no directory.

    Raises:
      UserError: a link that `datasets` would not follow, or by which it would read a
          file twice, or that leads nowhere; or a directory that cannot be listed.
    """
    advice = f"remove it, or read data=text data.paths=[{folder}/]"
    files: dict[Path, Path] = {}
    for path in sorted(folder.rglob("*")):
        if not is_hidden(path, folder):
            check_directory(path)
        if path.is_dir() and path.is_symlink():
            raise UserError(
                f"data.name={folder}: {path} is a link to a directory, which data=hf"
                f" does not follow; {advice}"
            )
        if not path.is_file():
            if not is_hidden(path, folder):
                check_link_target(path)
            continue
        check_regular(path)
        same_file = files.setdefault(path.resolve(), path)
        if same_file != path:
            raise UserError(
                f"data.name={folder}: {path} is {same_file} by a link, and would be"
                f" read twice; {advice}"
            )
    return list(files.values())


def is_hidden(path: Path, folder: Path) -> bool:
    """Return whether a file below `folder` is one that `datasets` does not read."""
    return any(part[0] == "." for part in path.relative_to(folder).parts)


def open_builder(
    source: "HubSource", local: Sequence[Path], cache_key: str
) -> "DatasetBuilder":
    """Return the reader of a hub data set; print how it differs from `data=text`.

    Args:
      source: the data set.
      local: the files of a local directory; empty for a data set of the hub.
      cache_key: a digest of the corpus, its column and the times of its files.

    Raises:
      UserError: the data set's README.md names files elsewhere.
    """
    import datasets

    # A cache of its own: `datasets` recognizes changed files by their times of
    # modification only, and a table of another program or column was not checked.
    cache = Path(datasets.config.HF_DATASETS_CACHE, cache_key)
    load_builder = functools.partial(
        datasets.load_dataset_builder,
        source.name,
        source.config,
        revision=source.revision,
        cache_dir=cache,
    )
    with own_files_only(source.name):
        builder = load_builder()
    if builder.name == "parquet":
        from pyarrow.dataset import ParquetFragmentScanOptions

        builder.config.fragment_scan_options = ParquetFragmentScanOptions(
            page_checksum_verification=True
        )
        # By default it is the size of the first group of rows, which may be 0.
        builder.config.batch_size = builder.config.batch_size or ROWS_PER_BATCH
    if builder.name == "csv":
        # Settings of its own give it a cache without the tables of pandas.
        with own_files_only(source.name):
            builder = load_builder(usecols=[source.column], keep_default_na=False)
        # Not the README.md's types: they name all columns, and only one is read.
        text = datasets.Value("string")
        builder.info.features = datasets.Features({source.column: text})
        read_csv_strictly(builder, source.column)
    else:
        check_lossless(source.name, builder)
    check_tables(builder, source.column)
    data_files = builder.config.data_files or {}
    splits, folder = data_files.values(), path_of(source.name)
    for file in itertools.chain(*splits):
        check_is_own(source.name, file)
    if builder.name == "text":
        note(
            f"data.name={source.name}: `datasets` makes each line a document; data=text"
            " data.paths=[FILE] reads a file as it stands"
        )
    if builder.name == "arrow":
        check_saved_files(folder, itertools.chain(*splits), local)
        check_separate_splits(folder, data_files)
    check_no_file_twice(source.name, splits)
    if local:
        files = [Path(file) for file in itertools.chain(*splits)]
        check_numbered_files(files)
        check_no_compressed_duplicates(files)
        note_unread_files(source.name, local, itertools.chain(*splits))
        for file in files:
            check_compression(file)
            check_single_split(file)
            if builder.name == "arrow":
                check_arrow_end(file)
    return builder


def check_saved_files(
    folder: Path, read_files: Iterable[str], local: Sequence[Path]
) -> None:
    """Raise UserError for an Arrow file that is no part of a saved data set.

    `datasets` reads all files in the directory: also those that `map` wrote there, and
    those of a larger data set that was saved there before. The state.json names the
    files of the saved data set.
    """
    saved_states = [path for path in local if path == folder / STATE_FILE]
    states = saved_states or [path for path in local if path.name == STATE_FILE]
    saved = {
        os.path.realpath(state.parent / entry["filename"])
        for state in states
        for entry in read_json_or_empty(state).get("_data_files", [])
    }
    for file in read_files:
        is_foreign = Path(file).name.startswith("cache-")
        if states:
            is_foreign = os.path.realpath(file) not in saved
        if is_foreign:
            raise UserError(
                f"data.name={folder}: {file} is no part of the data set that `datasets`"
                " saved there, but the result of a `map` or of an earlier data set;"
                " move it elsewhere"
            )


def check_separate_splits(
    folder: Path, data_files: Mapping[str, Sequence[str]]
) -> None:
    """Raise UserError if `datasets` would read several saved splits as one.

    It does so with splits, such as `a` and `b`, whose names hold none of the words
    train, validation and test.
    """
    if not (folder / DICT_FILE).is_file():
        return
    for split, files in data_files.items():
        directory, *others = dict.fromkeys(Path(file).parent for file in files)
        if others:
            raise UserError(
                f"data.name={folder}: `datasets` reads {directory.name} and"
                f" {others[0].name} as one split, {str(split)!r}; choose one by"
                f" {override('data.name', folder / directory.name)}"
            )


def check_single_split(file: Path) -> None:
    """Raise UserError for a zip file with several splits, which is read as one."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    matches = filter(None, map(SPLIT_IN_NAME.search, names))
    splits = {match[1] for match in matches}
    if len(splits) > 1:
        raise UserError(
            f"{file} holds files of {' and '.join(sorted(splits))}, which `datasets`"
            " reads as one split; unpack it"
        )


def check_no_file_twice(name: str, splits: Iterable[Sequence[str]]) -> None:
    """Raise UserError for a file that several patterns of a README.md name."""
    for files in splits:
        repeated = [file for file, count in Counter(files).items() if count > 1]
        if repeated:
            raise UserError(
                f"data.name={name}: its README.md names {repeated[0]} by several"
                " patterns, and it would be read twice; correct it"
            )


def check_compression(file: Path) -> None:
    """Raise UserError for a file whose damage would leave out texts in silence.

    Readers take a damaged header of a tar archive for its end.
    """
    with file.open("rb") as content:
        head = content.read(8)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic) and kind not in EXACT_COMPRESSIONS:
            raise UserError(
                f"{file} is {kind}: `datasets` leaves out what follows damage in it;"
                " decompress it"
            )
    if tarfile.is_tarfile(file):
        raise UserError(
            f"{file} is a tar archive: `datasets` leaves out what follows damage in it;"
            " unpack it"
        )


def check_arrow_end(file: Path) -> None:
    """Raise UserError for Arrow data that were cut, whose rows up to there are read."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - len(ARROW_ENDS[0])))
        if not content.read().endswith(ARROW_ENDS):
            raise UserError(
                f"{file} lacks the end of Arrow data, so that rows may be missing;"
                " download or copy it again, or save it again"
            )


def note_unread_files(
    name: str, local: Sequence[Path], read_files: Iterable[str]
) -> None:
    """Print which files of a directory `datasets` leaves out.

    `datasets` reads the files of one format, and only those whose names match its
    patterns.
    """
    read_paths, folder = set(map(os.path.realpath, read_files)), path_of(name)
    data = [
        path
        for path in local
        if path.name not in SAVED_TO_DISK
        and not DOCUMENTATION.fullmatch(path.name)
        and not is_hidden(path, folder)
    ]
    unread = [path for path in data if os.path.realpath(path) not in read_paths]
    if unread:
        note(
            f"data.name={name}: `datasets` leaves out {unread[0]} ({len(unread):,} of"
            f" {len(data):,} files); data=text data.paths=[{name}] reads all"
        )


def load_hub(source: "HubSource", builder: "DatasetBuilder") -> "IterableDataset":
    """Return the rows of a hub data set."""
    if source.streaming:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split).to_iterable_dataset()


def check_column(dataset: "IterableDataset", column: str) -> None:
    """Raise UserError for a missing column."""
    names = dataset.column_names or list(next(iter(dataset), {}))
    if not names:
        raise UserError("the corpus is empty: it has no rows")
    if column not in names:
        raise NoColumn(column, names)


@contextmanager
def hub_errors(source: "HubSource") -> Iterator[None]:
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
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}, column"
            f" {source.column!r}: {' '.join(str(cause).split())}; data=text"
            " data.paths=[FILE,...] reads files of any columns and types"
        ) from error
    except UserError:
        raise
    # `datasets` raises errors of any class for a file that it cannot read.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        advice = ""
        if path_of(source.name).is_dir():
            advice = f"; data=text data.paths=[{source.name}] reads files of any names"
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}: {lines[0]}{advice}"
        ) from error
