"""Data sets that package `datasets` reads: their builder, rows and errors."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.datasets_patches import (
    check_is_own,
    check_lossless,
    check_tables,
    own_files_only,
)
from trainer.data.files import (
    NoColumn,
)
from trainer.errors import UserError
from trainer.files import path_of
from trainer.text import note

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

    from trainer.data.corpus import HubSource

ROWS_PER_BATCH = 1000
# Readers of other compressions and of archives leave out what follows damage, or hidden
# members.
EXACT_FILES = re.compile(r"(?is).*\.(json|jsonl|ndjson|parquet|txt)(\.gz|\.zst)?")
DOWNLOADED = "; data=text data.paths=[FILE,...] reads files that were downloaded"


def check_hub_name(name: str) -> None:
    """Raise UserError for what `datasets` would read instead of a data set of the hub.

    That is a directory of this name, and for `text`, `json` and other file formats all
    files in the working directory.
    """
    if path_of(name).exists():
        raise UserError(
            f"data.name={name} is a path, and data=hf reads data sets of the hub;"
            f" data=text data.paths=[{name}] reads JSON lines, Parquet and text"
        )
    if name.isidentifier() and find_spec(f"datasets.packaged_modules.{name}"):
        raise UserError(
            f"data.name={name} is a file format of the package datasets, not a data"
            " set; data=text data.paths=[FILE,...] reads files"
        )


def open_builder(source: "HubSource", cache_key: str) -> "DatasetBuilder":
    """Return the reader of a hub data set.

    Args:
      source: the data set.
      cache_key: a digest of the corpus and its column.

    Raises:
      UserError: its texts may be changed or lost by this reader, or its README.md names
          files elsewhere.
    """
    import datasets

    # A cache of its own: a table of another program or column was not checked.
    cache = Path(datasets.config.HF_DATASETS_CACHE, cache_key)
    # Patterns of a README.md are resolved as the builder is made.
    with own_files_only(source.name):
        builder = datasets.load_dataset_builder(
            source.name, source.config, revision=source.revision, cache_dir=cache
        )
    if builder.name == "parquet":
        from pyarrow.dataset import ParquetFragmentScanOptions

        # By default Arrow does not compare checksums, and reads a letter that the disk
        # changed.
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(
            page_checksum_verification=True
        )
        # By default it is the size of the first group of rows, which may be 0.
        builder.config.batch_size = builder.config.batch_size or ROWS_PER_BATCH
    check_tables(builder, source.column)
    check_lossless(source.name, builder)
    splits = (builder.config.data_files or {}).values()
    for file in itertools.chain(*splits):
        check_is_own(source.name, file)
        if not EXACT_FILES.fullmatch(file):
            raise UserError(
                f"data.name={source.name}: {file} may lose texts, as archives do where"
                " they are damaged; valid: .json, .jsonl, .ndjson, .parquet and .txt,"
                " and these as .gz and .zst; save the texts as JSON lines, and read"
                " them by data=text"
            )
    check_no_file_twice(source.name, splits)
    if builder.name == "text":
        note(f"data.name={source.name}: `datasets` makes each line a document")
    return builder


def check_no_file_twice(name: str, splits: Iterable[Sequence[str]]) -> None:
    """Raise UserError for a file that several patterns of a README.md name."""
    for files in splits:
        repeated = [file for file, count in Counter(files).items() if count > 1]
        if repeated:
            raise UserError(
                f"data.name={name}: its README.md names {repeated[0]} by several"
                " patterns, and it would be read twice; correct it"
            )


def load_hub(source: "HubSource", builder: "DatasetBuilder") -> "IterableDataset":
    """Return the rows of a hub data set."""
    if source.streaming:
        return builder.as_streaming_dataset(split=source.split)
    builder.download_and_prepare()
    check_tables_are_whole(builder)
    # Of the classes of `datasets`, only IterableDataset tells a position.
    return builder.as_dataset(split=source.split).to_iterable_dataset()


def check_tables_are_whole(builder: "DatasetBuilder") -> None:
    """Raise UserError for a table in the cache of `datasets` that lacks rows.

    `datasets` does not sync its tables to disk, and takes zeros for their end.
    """
    for name, split in (builder.info.splits or {}).items():
        rows = builder.as_dataset(split=name).num_rows
        if rows != split.num_examples:
            raise UserError(
                f"the table of split {name} in {builder.cache_dir} has {rows:,} of"
                f" {split.num_examples:,} rows; remove that directory"
            )


def check_column(dataset: "IterableDataset", column: str) -> None:
    """Raise UserError for a missing column."""
    # Streaming may know the columns only from the first row.
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
    # Before its base class DatasetsError.
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
        # `datasets` wraps the error of a file, perhaps one of `check_tables`, which has
        # the advice.
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}, column"
            f" {source.column!r}: {' '.join(str(cause).split())}{DOWNLOADED}"
        ) from error
    except UserError:
        raise
    # `datasets` raises errors of any class for a file that it cannot read.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"data set {source.name!r}, split {source.split!r}: {lines[0]}{DOWNLOADED}"
        ) from error
