"""Checks of a Parquet file before `datasets` reads it."""

from typing import TYPE_CHECKING

from trainer.data.files import File, NoColumn, reading
from trainer.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet

TEXT_TYPES = ("string", "large_string", "null")  # of Arrow
ROWS = 1024  # examined at a time
# Text may take so many times the bytes of its file, and at least the second number.
# Compression gains a factor of 2 to 20; a dictionary of one long entry has no bound.
EXPANSION = 1000
SMALL = 64 << 20
OFFSET = 8  # bytes that a row takes beside its text


def check_parquet(file: File, column: str) -> None:
    """Check that a file is Parquet with a text column of a plausible size.

    Each file is opened here, because `datasets` only checks the first one at the start,
    and its message for a later one does not name the file.

    Raises:
      UserError: it is not.
    """
    import pyarrow.parquet

    with reading([file], "parquet"):
        schema = pyarrow.parquet.read_schema(file.path)
    if column not in schema.names:
        raise NoColumn(column, schema.names, f"{file.path}: ")
    kind = str(schema.field(column).type)
    if kind not in TEXT_TYPES:
        raise UserError(f"{file.path}: {not_text_column(column, kind)}")
    with (
        reading([file], "parquet"),
        # Rows then refer to a dictionary, and repeated text takes no memory.
        pyarrow.parquet.ParquetFile(file.path, read_dictionary=[column]) as parquet,
    ):
        limit = max(SMALL, EXPANSION * file.size)
        if claimed_bytes(parquet.metadata, column) > limit:
            raise too_large(file, limit)
        size = 0
        for batch in parquet.iter_batches(ROWS, columns=[column]):
            size += text_bytes(batch.column(0))
            if size > limit:
                raise too_large(file, limit)


def claimed_bytes(metadata: "pyarrow.parquet.FileMetaData", column: str) -> int:
    """Return the bytes of a column by the file's metadata.

    Text that several rows share counts once.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return OFFSET * metadata.num_rows + sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema == column
    )


def text_bytes(rows: "pyarrow.Array") -> int:
    """Return the bytes of all rows of a column, shared text counted for each."""
    import pyarrow
    import pyarrow.compute

    size = OFFSET * len(rows)
    if isinstance(rows, pyarrow.DictionaryArray):
        lengths = pyarrow.compute.binary_length(rows.dictionary)
        size += pyarrow.compute.sum(lengths.take(rows.indices)).as_py() or 0
    return size


def too_large(file: File, limit: int) -> UserError:
    """Return the error of a file whose text is out of proportion."""
    return UserError(
        f"{file.path}: {file.size:,} bytes hold more than {limit:,} bytes of text;"
        " if that is meant, give the text as jsonl"
    )


def not_text_column(column: str, kind: str) -> str:
    """Return the message for a column of Arrow's type `kind`."""
    return f"column {column!r} holds {kind}, not text; choose another data.column"
