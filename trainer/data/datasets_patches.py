"""Patches of private functions of package `datasets`, and their reasons.

| private name | why it is replaced |
|---|---|
| data_files.resolve_pattern | asks servers of a README.md with the user's login |
| yaml.SafeLoader.construct_document | writes out aliases without a bound |
| builder._cast_table | turns numbers, dates and objects into text |
| utils.json, json.json: ujson_loads, ujson_dumps, pandas_read_json | drop texts |

A version of `datasets` that lacks one of its names is refused.
"""

import functools
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trainer.data.files import NoColumn
from trainer.data.jsonl import load_once
from trainer.data.parquet import is_text, not_text_column
from trainer.errors import UserError
from trainer.text import note

if TYPE_CHECKING:
    import pyarrow
    from datasets import DatasetBuilder

# Builders whose texts are exact. Of others, some read NA as missing (csv, imagefolder),
# cut lines (harbor), write numbers as text (eval), or take damage for the end of the
# data (arrow, webdataset).
EXACT_BUILDERS = ("json", "parquet", "text")
# Settings of a README.md with the values that lose nothing: others leave out damaged
# files, or characters.
LOSSLESS: dict[str, Sequence[Any]] = {
    "encoding_errors": (None, "strict"),
    "on_bad_files": ("error",),
}
MAX_YAML_NODES = 1 << 20  # of a README.md, aliases written out; a large one has 10,000


@contextmanager
def own_files_only(name: str) -> Iterator[None]:
    """Have `datasets` resolve no pattern of a README.md that names files elsewhere.

    It would ask the server that the pattern names, with the user's login of ~/.netrc.

    Raises:
      UserError: a pattern names files elsewhere, or aliases stand for more than
          `MAX_YAML_NODES`; or the function is private to `datasets`, and this version
          lacks it.
    """
    from unittest.mock import patch

    import yaml
    from datasets import data_files

    resolve = getattr(data_files, "resolve_pattern", None)
    if resolve is None:
        raise unknown_version("data files")

    def resolve_own(pattern: str, base_path: str, *args: Any, **settings: Any) -> Any:
        # `datasets` joins other patterns to the path of the data set, and ../ may leave
        # it.
        is_url = "://" in pattern
        check_is_own(name, pattern if is_url else os.path.join(base_path, pattern))
        return resolve(pattern, base_path, *args, **settings)

    construct = yaml.SafeLoader.construct_document

    def construct_bounded(loader: Any, node: Any) -> Any:
        if yaml_nodes(node, {}) > MAX_YAML_NODES:
            raise UserError(
                f"data.name={name}: aliases in its README.md stand for more than"
                f" {MAX_YAML_NODES:,} values; write them out, or download it again"
            )
        return construct(loader, node)

    with (
        patch.object(data_files, "resolve_pattern", resolve_own),
        patch.object(yaml.SafeLoader, "construct_document", construct_bounded),
    ):
        yield


def yaml_nodes(node: Any, known: dict[int, float]) -> float:
    """Return the number of nodes of a YAML tree, aliases written out.

    It is infinite for a node that contains itself. `known` has those of other nodes, by
    their identity.
    """
    if isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        children = node.value
        if children and isinstance(children[0], tuple):  # of a mapping
            children = itertools.chain.from_iterable(children)
        known[id(node)] = 1 + sum(yaml_nodes(child, known) for child in children)
    return known[id(node)]


def check_is_own(name: str, file: str) -> None:
    """Raise UserError for a file, or a pattern of files, outside of the data set."""
    path = os.path.normpath(file)
    inside = path.removeprefix(home_of(name))
    # What follows :: is read first, as in zip://*::FILE.
    if inside == path or "::" in inside:
        raise UserError(
            f"data.name={name} takes {file} for its own data, which is elsewhere;"
            " correct its README.md"
        )


def home_of(name: str) -> str:
    """Return what the path of each file of a data set begins with, normalized."""
    # os.path.normpath turns hf:// into hf:/.
    return f"hf:/datasets/{name}@"


def check_lossless(name: str, builder: "DatasetBuilder") -> None:
    """Raise UserError for a setting of a README.md that loses texts or characters, and
    print one that leaves out rows.
    """
    config = builder.config
    for key, valid in LOSSLESS.items():
        # Not every builder has each of these settings.
        if getattr(config, key, valid[0]) not in valid:
            raise UserError(
                f"data.name={name}: the README.md sets {key}={getattr(config, key)}, by"
                " which texts or characters may be lost; remove it there, and repair"
                " the files"
            )
    filters = getattr(config, "filters", None)
    if filters is not None:
        note(f"data.name={name}: its README.md leaves out rows, by filters={filters}")


def check_tables(builder: "DatasetBuilder", column: str) -> None:
    """Replace a builder's `_cast_table` by one that checks each table first.

    `_cast_table` gets each table after it is read, streaming or not. Without the check
    it would turn numbers, dates and objects of later files into text, if the first file
    has text.

    Raises:
      UserError: another builder than `EXACT_BUILDERS`; or the method is private to
          `datasets`, and this version lacks it.
    """
    if builder.name not in EXACT_BUILDERS:
        raise UserError(
            f"data=hf: `datasets` reads it as {builder.name}, and may change or drop"
            f" texts; valid: {', '.join(EXACT_BUILDERS)}; save the texts as JSON lines,"
            " and read them by data=text"
        )
    cast = getattr(builder, "_cast_table", None)
    if cast is None:
        raise unknown_version(builder.name)

    def checked(table: "pyarrow.Table", **settings: Any) -> "pyarrow.Table":
        # `datasets` writes a column of several types as JSON, its texts in quotes.
        if any(path[0] == column for path in settings.get("json_field_paths", ())):
            raise UserError(not_text_column(column, "a mix of types"))
        if table.column_names:  # A JSON file whose rows are {} has none.
            check_text_column(table, column)
            if builder.name == "text":
                check_no_nul(table, column)
        return cast(table, **settings)

    # In the builder's attributes alone, so that others of its class stay as they are.
    vars(builder)["_cast_table"] = checked


@contextmanager
def exact_json(format: str, column: str) -> Iterator[None]:
    """Have `datasets` read JSON by Python's reader where it would use pandas'.

    `datasets` uses pandas' reader for lists and for columns of several types. That
    reader drops an unpaired surrogate and the first of two texts in a column, which
    Arrow's refuses, and reads texts as numbers and dates.

    Raises:
      UserError: the functions are private to `datasets`, and this version lacks one.
    """
    if format != "json":
        yield
        return
    from unittest.mock import patch

    from pandas import DataFrame

    loads = functools.partial(load_once, column=column)
    readers: Any = {"ujson_loads": loads, "ujson_dumps": json.dumps}
    with ExitStack() as patches:
        try:
            # `patch.multiple` raises AttributeError for a name that a version lacks,
            # where an assignment would be read by nobody.
            patches.enter_context(patch.multiple("datasets.utils.json", **readers))
            readers["pandas_read_json"] = lambda file: DataFrame(loads(file.read()))
            builder = "datasets.packaged_modules.json.json"
            patches.enter_context(patch.multiple(builder, **readers))
        except (AttributeError, ImportError):
            raise unknown_version(format) from None
        yield


def unknown_version(format: str) -> UserError:
    """Return the error of a version of `datasets` that reads a format differently."""
    return UserError(
        f"`datasets` {version('datasets')} reads {format} in a way that is not known"
        " here, and could change texts unnoticed; install datasets==5.2.0"
    )


def check_no_nul(table: "pyarrow.Table", column: str) -> None:
    """Raise UserError for NUL in a text: a disk or a download that failed leaves zeros
    in the place of texts.
    """
    import pyarrow.compute

    found = pyarrow.compute.match_substring(table.column(column), "\0")
    if pyarrow.compute.any(found).as_py():
        raise UserError(
            "a text holds NUL, as where a file was damaged; download or copy it again"
        )


def check_text_column(table: "pyarrow.Table", column: str) -> None:
    """Raise UserError if a column is missing, or does not hold text."""
    from pyarrow import types

    if column not in table.column_names:
        raise NoColumn(column, table.column_names)
    kind = table.schema.field(column).type
    if not is_text(kind):
        message = not_text_column(column, str(kind))
        if types.is_timestamp(kind):
            message += "; data=text data.paths=[FILE,...] reads dates of JSON as text"
        raise UserError(message)
