"""Parquet files: checks before anything long starts, and their text."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer.data.files import File, NoColumn, reading
from trainer.errors import UserError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

ROWS_PER_CHECK = 1024
ROWS_PER_READ = 256
# Text may take up to MAX_EXPANSION times the bytes of its file, or ALWAYS_ALLOWED bytes
# if these are more. Compression gains a factor of 2 to 20; a dictionary of one long
# entry has no bound.
MAX_EXPANSION = 1000
ALWAYS_ALLOWED = 64 << 20
BYTES_PER_ROW = 8  # beside its text


def check_parquet(file: File, column: str) -> None:
    """Check that a file is Parquet with a text column of a plausible size.

    Each file is opened before the first is read, and each may have another type of
    text: strings of any kind, a dictionary of them (pandas' categories), or nulls only.

    Raises:
      UserError: it is not.
    """
    import pyarrow.parquet

    with reading([file], "parquet"):
        schema = pyarrow.parquet.read_schema(file.path)
    if column not in schema.names:
        raise NoColumn(column, schema.names, f"{file.path}: ")
    if schema.names.count(column) > 1:
        raise UserError(f"{file.path}: several columns are named {column!r}")
    kind = schema.field(column).type
    if not is_text(kind):
        raise UserError(f"{file.path}: {not_text_column(column, str(kind))}")
    with reading([file], "parquet"), open_column(file, column) as parquet:
        limit = max(ALWAYS_ALLOWED, MAX_EXPANSION * file.size)
        if claimed_bytes(parquet.metadata, column) > limit:
            raise too_large(file, limit)
        size = 0
        for batch in parquet.iter_batches(ROWS_PER_CHECK, columns=[column]):
            size += text_bytes(batch.column(column))
            if size > limit:
                raise too_large(file, limit)


def open_column(file: File, column: str) -> "pyarrow.parquet.ParquetFile":
    """Open a file with a column dictionary-encoded, where the file has it so.

    Repeated text then takes no memory. Arrow cannot do so for delta-encoded text.
    """
    import pyarrow.parquet

    chunks = chunks_of(pyarrow.parquet.read_metadata(file.path), column)
    is_delta_encoded = any(
        encoding.startswith("DELTA") for chunk in chunks for encoding in chunk.encodings
    )
    columns = [] if is_delta_encoded else [column]
    return pyarrow.parquet.ParquetFile(file.path, read_dictionary=columns)


def is_text(kind: "pyarrow.DataType") -> bool:
    """Return whether a column of Arrow's type `kind` is read as text."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_null(kind)
    )


def read_parquet(
    files: Sequence[File], column: str, max_documents: int | None, position: Any
) -> Iterator[tuple[list[str], Any]]:
    """Yield the texts of a column, and the position after them; null is empty.

    A position is the number of the file, that of the next of its batches of rows, and
    how many documents are left of `max_documents` (None: no limit).
    """
    import pyarrow.parquet

    first, first_batch, left = position or (0, 0, max_documents)
    for number, file in enumerate(files[first:], first):
        if not file.size:
            continue
        start = first_batch if number == first else 0
        with pyarrow.parquet.ParquetFile(file.path) as parquet:
            for i, batch in enumerate(
                parquet.iter_batches(ROWS_PER_READ, columns=[column])
            ):
                if i < start:
                    continue
                texts = [text or "" for text in batch.column(column).to_pylist()][:left]
                left = None if left is None else left - len(texts)
                yield texts, [number, i + 1, left]
                if left == 0:
                    return


def claimed_bytes(metadata: "pyarrow.parquet.FileMetaData", column: str) -> int:
    """Return the bytes that a column takes, according to the file's metadata.

    Text that several rows share counts once.
    """
    chunks = chunks_of(metadata, column)
    sizes = sum(chunk.total_uncompressed_size for chunk in chunks)
    return BYTES_PER_ROW * metadata.num_rows + sizes


def chunks_of(
    metadata: "pyarrow.parquet.FileMetaData", column: str
) -> list["pyarrow.parquet.ColumnChunkMetaData"]:
    """Return the metadata of a column in each group of rows."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema == column]


def text_bytes(rows: "pyarrow.Array") -> int:
    """Return the bytes of all rows of a column, shared text counted for each."""
    import pyarrow
    import pyarrow.compute

    size = BYTES_PER_ROW * len(rows)
    if isinstance(rows, pyarrow.DictionaryArray):
        lengths = pyarrow.compute.binary_length(rows.dictionary).take(rows.indices)
    elif isinstance(rows, pyarrow.NullArray):
        return size
    else:
        texts = rows.cast(pyarrow.large_string())
        lengths = pyarrow.compute.binary_length(texts)
    return size + (pyarrow.compute.sum(lengths).as_py() or 0)


def too_large(file: File, limit: int) -> UserError:
    """Return the error of a file whose text is out of proportion."""
    return UserError(
        f"{file.path}: {file.size:,} bytes hold more than {limit:,} bytes of text;"
        " if this is intended, give the text as jsonl"
    )


def not_text_column(column: str, kind: str) -> str:
    """Return the message for a column of Arrow's type `kind`."""
    return f"column {column!r} holds {kind}, not text; choose another data.column"
