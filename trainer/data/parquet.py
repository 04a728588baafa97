"""Parquet files: checks before anything long starts, and their text."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer.data.files import NoColumn, SourceFile, check_no_zeros, reading_errors
from trainer.errors import UserError
from trainer.files import MAX_EXPANSION, TEXT_BYTES

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

ROWS_PER_CHECK = 1024
ROWS_PER_READ = 256
BYTES_PER_ROW = 8  # memory of a row beside its text


def check_parquet(file: SourceFile, column: str) -> None:
    """Check that a file is Parquet with a text column of a plausible size.

    Files may differ in the type of their text: strings of any kind, a dictionary of
    strings (pandas' categories), or nulls only.

    Raises:
      UserError: the file is no such Parquet file.
    """
    import pyarrow.parquet

    with reading_errors([file], "parquet"):
        schema = pyarrow.parquet.read_schema(file.path)
    if column not in schema.names:
        raise NoColumn(column, schema.names, f"{file.path}: ")
    # Arrow's own error below is a KeyError, that the column does not exist.
    if schema.names.count(column) > 1:
        raise UserError(f"{file.path}: several columns are named {column!r}")
    kind = schema.field(column).type
    if not is_text(kind):
        raise UserError(f"{file.path}: {not_text_column(column, str(kind))}")
    with reading_errors([file], "parquet"), open_column(file, column) as parquet_file:
        # Compression gains a factor of 2 to 20; a dictionary of one long entry has no
        # bound.
        limit = max(TEXT_BYTES, MAX_EXPANSION * file.size)
        # First by the metadata, before a page takes memory. But shared texts count once
        # there, so the rows are counted, too.
        if claimed_bytes(parquet_file.metadata, column) > limit:
            raise too_large(file, limit)
        size = 0
        for batch in parquet_file.iter_batches(ROWS_PER_CHECK, columns=[column]):
            size += text_bytes(batch.column(column))
            if size > limit:
                raise too_large(file, limit)


def open_column(file: SourceFile, column: str) -> "pyarrow.parquet.ParquetFile":
    """Open a file, and leave a dictionary-encoded column encoded.

    Repeated text then takes no memory. Arrow cannot open delta-encoded text that way.
    """
    import pyarrow.parquet

    chunks = chunks_of(pyarrow.parquet.read_metadata(file.path), column)
    is_delta_encoded = any(
        encoding.startswith("DELTA") for chunk in chunks for encoding in chunk.encodings
    )
    columns = [] if is_delta_encoded else [column]
    return pyarrow.parquet.ParquetFile(
        file.path, read_dictionary=columns, page_checksum_verification=True
    )


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
    files: Sequence[SourceFile], column: str, max_documents: int | None, position: Any
) -> Iterator[tuple[list[str], Any]]:
    """Yield the texts of a column, and the position after them; null is an empty text.

    A position is the number of a file, the number of its next batch of rows, and the
    number of documents left of `max_documents` (None: no limit).
    """
    import pyarrow.parquet

    first_file, first_batch, remaining = position or (0, 0, max_documents)
    for number, file in enumerate(files[first_file:], first_file):
        start = first_batch if number == first_file else 0
        with pyarrow.parquet.ParquetFile(
            file.path, page_checksum_verification=True
        ) as parquet_file:
            for i, batch in enumerate(
                parquet_file.iter_batches(ROWS_PER_READ, columns=[column])
            ):
                # Arrow's iterator has no start, so the rows before a position are read
                # again.
                if i < start:
                    continue
                values = batch.column(column).to_pylist()
                texts = [text or "" for text in values[:remaining]]
                check_no_zeros(texts, str(file.path))
                remaining = None if remaining is None else remaining - len(texts)
                yield texts, [number, i + 1, remaining]
                if remaining == 0:
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
    """Return the bytes of a column's rows; text that rows share counts for each row."""
    import pyarrow
    import pyarrow.compute

    # A few bytes may claim any number of nulls or empty texts.
    size = BYTES_PER_ROW * len(rows)
    if isinstance(rows, pyarrow.DictionaryArray):
        # A text that a million rows share takes no memory for each of them.
        lengths = pyarrow.compute.binary_length(rows.dictionary).take(rows.indices)
    # `binary_length` has no kernel for nulls, nor for views of strings.
    elif isinstance(rows, pyarrow.NullArray):
        return size
    else:
        texts = rows.cast(pyarrow.large_string())
        lengths = pyarrow.compute.binary_length(texts)
    return size + (pyarrow.compute.sum(lengths).as_py() or 0)


def too_large(file: SourceFile, limit: int) -> UserError:
    """Return the error of a file with too much text for its size."""
    return UserError(
        f"{file.path}: {file.size:,} bytes hold more than {limit:,} bytes of text;"
        " if this is intended, give the text as jsonl"
    )


def not_text_column(column: str, kind: str) -> str:
    """Return the message for a column of Arrow's type `kind`.

    Not the names in a nested type: a run's saved settings may name a private file.
    """
    kind = kind.partition("<")[0]
    if "binary" in kind:
        return (
            f"column {column!r} holds {kind}, bytes that its writer did not mark as"
            " UTF-8; write it as strings, such as by pandas' .str.decode('utf-8'), or"
            " choose another data.column"
        )
    return f"column {column!r} holds {kind}, not text; choose another data.column"
