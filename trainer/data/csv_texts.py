"""One column of CSV files, read strictly, for the CSV builder of package `datasets`.

The builder's own reader, pandas, gives a row other fields than its line has: it takes
the first of too many for an index, adds fields to a short row, and ends a row at a
carriage return. It also reads texts such as NA and null as missing, and 007 as 7.
"""

import csv
import io
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.data.files import NoColumn
from trainer.errors import UserError
from trainer.text import note

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_TABLE = 1000
ADVICE = (
    "; put a field that holds the separator, quotes or line ends in double quotes and"
    " double the quotes in it, or save the texts as JSON lines"
)
# Settings of a README.md that leave out rows or lines. A header may be one line.
UNREAD_SETTINGS = (
    "comment", "dialect", "lineterminator", "nrows", "skipfooter", "skiprows"
)  # fmt: skip
HEADERS = ("infer", None, 0)  # the header is the first row, or absent


def csv_tables(
    config: Any, column: str, files_of_shards: Iterable[Iterable[str]]
) -> Iterator[tuple[Any, "pyarrow.Table"]]:
    """Yield tables of one column, each with its key.

    Args:
      config: the builder's settings, a `CsvConfig`.
      column: the column of the text.
      files_of_shards: the files of each shard, as the builder has them.

    Raises:
      UserError: a row with another number of fields than the header; see `read_texts`.
    """
    import pyarrow
    from datasets.builder import Key

    for shard, files in enumerate(files_of_shards):
        texts_of_files = (read_texts(file, config, column) for file in files)
        texts = itertools.chain.from_iterable(texts_of_files)
        for number, batch in enumerate(itertools.batched(texts, ROWS_PER_TABLE)):
            array = pyarrow.array(batch, pyarrow.string())
            yield Key(shard, number), pyarrow.table({column: array})


def read_texts(file: str, config: Any, column: str) -> Iterator[str]:
    """Yield the texts of a column.

    Raises:
      UserError: a file without the column or with two of its name; a row that is no
          strict CSV, or may be several; a setting that is not followed here.
    """
    from datasets.utils.file_utils import xopen

    defaults = type(config)
    unread = [
        key for key in UNREAD_SETTINGS if getattr(config, key) != getattr(defaults, key)
    ]
    if config.header not in HEADERS:
        unread.append("header")
    if unread:
        raise UserError(
            f"{file}: the README.md sets {', '.join(unread)}, which data=hf does not"
            " follow; save the texts as JSON lines"
        )
    names = config.names
    # A quoted table is legal text: note it once per file, do not refuse it.
    is_noted = False
    has_header = config.header == 0 or (config.header == "infer" and names is None)
    encoding = config.encoding or "utf-8"
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        encoding = "utf-8-sig"  # without a byte order mark
    # A carriage return ends no line here, so that csv.reader refuses it outside quotes.
    with io.TextIOWrapper(xopen(file, "rb"), encoding, newline="\n") as lines:
        for place, row, row_lines in rows_of(file, lines, config):
            if has_header:
                names = names or row
                has_header = False
                check_names(file, names, column)
                continue
            if names is None:
                names = [str(i) for i in range(len(row))]
            if len(row) != len(names):
                raise UserError(
                    f"{place}: the number of fields is {len(row)}, of columns"
                    f" {len(names)}{ADVICE}"
                )
            check_names(file, names, column)
            if may_be_rows(row_lines, config.sep, len(names)):
                problem = (
                    f"{place}: quotes join {len(row_lines)} lines, most of which may be"
                    " rows; remove the quotes, set quoting: 3 in a README.md, or save"
                    " the texts as JSON lines"
                )
                if config.sep == "\t":
                    raise UserError(problem)
                if not is_noted:
                    note(problem)
                is_noted = True
            yield row[names.index(column)]


def rows_of(
    file: str, lines: Iterable[str], config: Any
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each row's place in words, its fields and its lines."""
    row_lines: list[str] = []

    def recorded() -> Iterator[str]:
        for line in lines:
            row_lines.append(line)
            if "\0" in line:  # zeros in the place of rows
                raise UserError(
                    f"{file}: a line holds NUL, as where a file was damaged; download"
                    " or copy it again"
                )
            yield line

    csv.field_size_limit(sys.maxsize)  # a field is a document
    # YAML may have the number as a text.
    has_quotes = str(config.quoting) != str(csv.QUOTE_NONE)
    reader = csv.reader(
        recorded(),
        delimiter=config.sep,
        quotechar=config.quotechar,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
        escapechar=config.escapechar,
        doublequote=config.doublequote,
        skipinitialspace=config.skipinitialspace,
        strict=True,
    )
    while True:
        place = f"{file}, line {reader.line_num + 1}"
        row_lines.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            problem = str(error).partition(" - ")[0]
            raise UserError(f"{place}: {problem}{ADVICE}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: {error}; convert it to UTF-8") from None
        if row is None:
            return
        if row:  # A blank line has no fields.
            yield place, row, row_lines


def check_names(file: str, names: list[str], column: str) -> None:
    """Raise UserError unless one column has the name."""
    if column not in names:
        raise NoColumn(column, names, f"{file}: ")
    if names.count(column) > 1:
        raise UserError(f"{file}: several columns are named {column!r}; rename them")


def may_be_rows(lines: list[str], separator: str, fields: int) -> bool:
    """Return whether most lines of a row are rows without its quotes.

    Many tab-separated files have no quotes around fields: a quote is part of a text.
    """
    rows = sum(line.count(separator) + 1 == fields for line in lines)
    return fields > 1 and 2 * rows > len(lines) > 1
