"""Read and write files of directories that somebody else may have made.

Data is read with bounds, and malformed data raises `UserError`. A written file is
replaced completely or not at all. Writing never follows a symbolic link, never changes
a file that has other names, and uses temporary names that nobody can guess.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from trainer.errors import DISK_FULL, UserError

PARTIAL = ".partial"  # ends the name of a file that is being written
MAX_BRACKETS = 2000  # of a configuration: nested ones take seconds to parse
# Nested values of a file. Functions that call themselves for each level fail at about
# a thousand: Python's parsers, json.dumps, copy.deepcopy.
MAX_DEPTH = 100
# Values of a JSON text. One takes up to 200 bytes of memory, so a text of values alone
# takes 40 times its size. Above this number there may be one for 32 characters.
MAX_VALUES = 1 << 22
CHARS_PER_VALUE = 32
MAX_INT_BITS = 4096  # of a YAML number: Python writes no number of 4,300 digits
YAML_BYTES = 1 << 18  # a run's config.yaml has about 4 KB
TEXT_BYTES = 1 << 26  # of a file that people read, or a picture
MAX_DIGITS = 18  # of a number that fits into 64 bits; `int` raises from 4,301 on
LOG_BYTES = 1 << 31  # of a file that grows with a run
# A file of holes, or compressed zeros, stands for gigabytes that nobody stored. Above
# TEXT_BYTES data may be this many times as long as what is stored of it.
MAX_EXPANSION = 1000


def directory_of(path: Path) -> Path:
    """Return `path`, or for a file its directory."""
    return path if path.is_dir() else path.parent


def path_of(text: str | os.PathLike[str]) -> Path:
    """Return a path that a user or a file gave, `~` and `~user` expanded.

    An unknown user stays as it is, where `Path.expanduser` raises.
    """
    return Path(os.path.expanduser(text))


def read_file(path: Path, most: int = TEXT_BYTES) -> bytes:
    """Return the bytes of a file.

    Raises:
      UserError: it has more than `most` bytes, or see `check_regular`.
      OSError: it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        # One byte more than allowed tells a longer file, whatever its size claimed.
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path} has more than {most:,} bytes; choose another file")
    return data


def read_object(path: Path, most: int = TEXT_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; otherwise as `read_file`.

    Raises:
      UserError: it holds anything else.
    """
    try:
        tree = parse_json(read_file(path, most))
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON ({error}); download or copy it again"
        ) from error
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} is not a JSON object, but {type(tree).__name__}; download or copy"
            " it again"
        )
    return tree


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that somebody else may have written.

    Raises:
      ValueError: it is not JSON, nested deeper than `MAX_DEPTH`, or has too many
        values.
    """
    if isinstance(text, bytes):
        # `json` takes bytes of half of a surrogate pair for text; nothing encodes it.
        text = text.decode("utf-8-sig")
    try:
        # Counted before it is parsed: 98 KB of .gz were 2.3 GB of objects.
        tree = json.loads(bounded_json(text))
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check_depth(tree)
    return tree


# A string, which ends with the text if nothing else ends it, and some thousand of them
# with the text before each.
STRING = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
STRINGS = re.compile(rf'(?:[^"]*+{STRING.pattern}){{1,4096}}+|[^"]++', re.DOTALL)


def bounded_json(text: str | bytes, most: int = MAX_VALUES) -> str | bytes:
    """Return JSON once its values have been counted, before they take memory.

    Args:
      text: the JSON, not parsed.
      most: number of values that any text may have.

    Raises:
      ValueError: it has more values, and more than one for 32 characters.
    """
    most = max(most, len(text) // CHARS_PER_VALUE)
    if len(text) <= most:
        return text
    if isinstance(text, bytes):
        # As `json.loads` decodes it, so that both read the same characters.
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    # The exact count is slower, so it is for texts that fail this one.
    if _count_values(text) > most:
        # Brackets and commas inside of strings begin no values.
        count, end = 0, 0
        while match := STRINGS.match(text, end):
            count, end = count + _count_values(STRING.sub("", match[0])), match.end()
            if count > most:
                raise ValueError(
                    f"more than {most:,} values in {len(text):,} characters"
                )
    return text


def _count_values(text: str) -> int:
    return text.count("[") + text.count("{") + text.count(",")


def _check_depth(tree: Any) -> None:
    # Level by level: a function that calls itself would end in a RecursionError.
    level: list[Any] = [[tree]]
    for _ in range(MAX_DEPTH + 1):
        level_below: list[Any] = []
        for node in level:
            values = node.values() if isinstance(node, dict) else node
            level_below += [v for v in values if isinstance(v, dict | list)]
        if not level_below:
            return
        level = level_below
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def check_regular(path: Path) -> None:
    """Raise UserError for what only looks like a file of data.

    Raises:
      UserError: a pipe, a device or a socket, which would be waited for, or a file that
        consists of holes.
      OSError: it is missing, a directory, or a large file that cannot be opened.
    """
    status = path.stat()
    # The error that `open` would raise, so that callers handle one.
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is no regular file; replace it by one, or remove it")
    if status.st_size <= TEXT_BYTES:
        return
    with path.open("rb") as file:
        stored = end = 0
        # Not all parts are asked for: enough stored bytes end the search.
        while stored < status.st_size // MAX_EXPANSION:
            try:
                start = file.seek(end, os.SEEK_DATA)
            except OSError:  # no data behind `end`
                raise UserError(
                    f"{path} has {status.st_size:,} bytes, but only {stored:,} of them"
                    " are stored, the rest is holes; download or copy it again"
                ) from None
            end = file.seek(start, os.SEEK_HOLE)
            stored += end - start


MERGE_TAG = "tag:yaml.org,2002:merge"  # of the key <<


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader of plain values without aliases, nine lines of which can stand for
    a billion values, and without a key twice, whose first value PyYAML drops, also
    below a merge key.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.tag == MERGE_TAG:
                raise yaml.MarkedYAMLError(
                    problem="merge keys are not supported", problem_mark=key.start_mark
                )
            if key.value in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} twice",
                    problem_mark=key.start_mark,
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads a number that begins with 0 in base 8, and one with colons in base 60.
OTHER_BASE = re.compile(r"[+-]?0[0-7_]+|.*:.*")


def _in_base_10(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a constructor of numbers that refuses those of another base."""

    def number_of(loader: Any, node: Any) -> Any:
        number = construct(loader, node)
        if OTHER_BASE.fullmatch(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} is {number} in YAML; write it so, or in"
                " quotes",
                problem_mark=node.start_mark,
            )
        return number

    return number_of


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _construct = yaml.SafeLoader.yaml_constructors[_tag]
    _PlainLoader.add_constructor(_tag, _in_base_10(_construct))


def parse_yaml(text: str) -> Any:
    """Parse YAML of a saved configuration into plain values.

    Raises:
      ValueError: not YAML, more than `YAML_BYTES`, nested deeper than `MAX_DEPTH`, an
        alias, or a value that its tag does not allow or that is out of range.
    """
    if len(text) > YAML_BYTES:
        raise ValueError(f"more than {YAML_BYTES} characters")
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"more than {MAX_BRACKETS} brackets")
    try:
        tree = yaml.load(text, _PlainLoader)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    except yaml.MarkedYAMLError as error:
        # Not the line itself: the file may be a link to a secret.
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{error.problem}{line}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())[:100]) from error
    except Exception as error:  # PyYAML indexes `!!int ""`, and looks `!!bool x` up
        raise ValueError(
            f"a value that its type does not allow ({type(error).__name__})"
        ) from error
    _check_depth(tree)
    return tree


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file as `parse_mapping` parses it.

    Raises:
      ValueError: it holds anything else (`UnicodeDecodeError` is one).
      UserError: see `read_file`.
      OSError: it cannot be read.
    """
    return parse_mapping(read_file(path, YAML_BYTES).decode("utf-8"))


def parse_mapping(text: str) -> dict[str, Any]:
    """Parse YAML that is a mapping with text as keys.

    Raises:
      ValueError: it is anything else, or see `parse_yaml`.
    """
    tree = parse_yaml(text)
    if not isinstance(tree, dict):
        raise ValueError("not a mapping of keys to values")
    _check_keys(tree)
    return tree


def _check_keys(tree: dict[Any, Any]) -> None:
    for key, value in tree.items():
        # YAML reads `1:` and `true:` as keys of other types.
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not text")
        _check_values(value)


def _check_values(value: Any) -> None:
    if isinstance(value, dict):
        _check_keys(value)
    elif isinstance(value, list):
        for item in value:
            _check_values(item)
    # YAML's dates and bytes have no place in a configuration, and JSON cannot write
    # them.
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"a value is of type {type(value).__name__}")
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file as `replaced_atomically` does; text as UTF-8."""
    with replaced_atomically(path) as file:
        file.write(data.encode(errors="replace") if isinstance(data, str) else data)


@contextlib.contextmanager
def replaced_atomically(path: Path) -> Iterator[BinaryIO]:
    """Replace the content of a file completely or not at all; at the end of the block
    it is on disk.

    A symbolic link called `path` is replaced, and its target is left alone.

    Raises:
      OSError: the directory is missing or read-only, or the disk is full; it names
        the file. The old content stays.
    """
    # In the same directory, because a rename is atomic within a file system only.
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
    descriptor = no_follow(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            # Before the rename: a machine that loses power could have the new name
            # without the bytes.
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        # Also after a Ctrl-C; a kill leaves it for `remove_partial`.
        partial.unlink(missing_ok=True)
        # Errors of an open file do not name it.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            error.filename = str(path)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to disk.

    Otherwise a machine that loses power may forget a rename.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def remove_partial(directory: Path) -> None:
    """Remove what a killed `replaced_atomically` left in a directory, and nothing else
    with the same suffix.

    Only the holder of the directory's lock may call it.
    """
    for partial in directory.glob(f".{'[0-9a-f]' * 16}{PARTIAL}"):
        partial.unlink(missing_ok=True)


def no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file for writing, not a symbolic link; also the `opener` of
    `open`.

    Example:
      with open(path, "ab", opener=no_follow) as file: ...

    Raises:
      OSError: it cannot be opened; `errno.ELOOP` for a symbolic link.
    """
    # O_NONBLOCK: opening a pipe would wait for a reader.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return descriptor


def own_copy(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file to change its content, as `no_follow` does; also an `opener`.

    A file with several names (hard links, as `cp -al` makes them) is first replaced by
    a copy of its own. The other names keep the old content.

    Raises:
      OSError: it cannot be copied or opened.
    """
    path = Path(path)
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        # `lstat`, because a link is refused by `no_follow` and not copied.
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            with path.open("rb") as file, replaced_atomically(path) as copy:
                shutil.copyfileobj(file, copy)
    return no_follow(path, flags)


# Folders of a run directory that a run writes.
ORIGIN = "init_from"  # of the tokenizer's files beside the given weights
FOLDERS = (
    "checkpoints",
    ORIGIN,
    "numerics",
    "profile",
    "skipped",
    "tasks",
    "tensorboard",
    "wandb",
    ".wandb",  # W&B writes there if it exists
)
# Links that W&B makes, below a run directory; the last is into its own cache.
WANDB_LINKS = tuple(
    f"/{folder}/{name}"
    for folder in ("wandb", ".wandb")
    for name in (
        "latest-run", "debug.log", "debug-internal.log", "*/logs/debug-core.log",
    )
)  # fmt: skip


def saved_steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints, ascending, by their directories'
    names.
    """
    return sorted(
        int(path.name)
        for path in run_dir.glob("checkpoints/*")
        # Orbax's unfinished directories have other names.
        if path.name.isdecimal()
    )


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Call `check_regular` for files, some of which a run at work may remove."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            check_regular(folder / name)


def check_no_links(run_dir: Path) -> None:
    """Raise UserError for a symbolic link in a run directory, or in its `FOLDERS`.

    A run would write through a link into another directory, and a fork or an export
    would publish a copy of the file behind it. See `check_regular`, too.
    """
    for folder, folders, files in os.walk(run_dir):
        for name in sorted([*folders, *files]):
            path = os.path.join(folder, name)
            inside = Path("/", os.path.relpath(path, run_dir))
            is_of_wandb = any(map(inside.match, WANDB_LINKS))
            if not is_of_wandb:
                check_not_link(path)
        # A run neither reads nor writes other folders.
        if Path(folder) == run_dir:
            folders[:] = [name for name in folders if name in FOLDERS]
        check_files(Path(folder), files)


def check_not_link(path: str | os.PathLike[str]) -> None:
    """Raise UserError for a symbolic link in a run directory."""
    if os.path.islink(path):
        raise UserError(
            f"{path} is a symbolic link; a run only reads and"
            " writes inside its own directory: replace the link by what it points to,"
            " or choose another run"
        )


def check_link_target(path: str | Path) -> None:
    """Raise UserError for a link to a file that is missing or cannot be reached.

    Otherwise a part of an unfinished download would be left out in silence.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, where no file can be read;"
            " restore that file, or remove the link"
        )


def has_file(path: Path) -> bool:
    """Return whether a file exists; UserError for a link that leads nowhere."""
    check_link_target(path)
    return path.is_file()


OTHER_RUN_DIR = "choose another run_dir"


@contextlib.contextmanager
def explain_unwritable(what: object, advice: str) -> Iterator[None]:
    """Turn an OSError of writing `what` into a UserError with this advice."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what}: {error.strerror}; {advice}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically at a place that the user chose. Raises UserError if that
    fails.
    """
    with explain_unwritable(path, f"make room, or {OTHER_RUN_DIR}"):
        write_atomically(path, text)


@contextlib.contextmanager
def well_formed(what: object, advice: str) -> Iterator[None]:
    """Turn the errors of malformed data into a UserError.

    For the outermost function of a reader: a file can hold anything, so each access of
    it may fail in its own way.

    Args:
      what: the file, or where the data comes from.
      advice: what to do about it.

    Raises:
      UserError: for every error that malformed data can cause, also panics of libraries
        in Rust; and for a missing package, which says nothing about the data.
    """
    try:
        yield
    # They say themselves what happened, and are no damage.
    except (UserError, OSError, MemoryError):
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(
            f"a package is missing or broken ({error}); install it: pip install"
            f" --upgrade {package or 'scalify-trainer'}"
        ) from error
    except Exception as error:
        raise _malformed(what, error, advice) from error
    except BaseException as error:
        # PyO3 derives a Rust panic from BaseException.
        if type(error).__name__ != "PanicException":
            raise
        raise _malformed(what, error, advice) from error


def _malformed(what: object, error: BaseException, advice: str) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{what} is damaged ({type(error).__name__}: {reason}); {advice}")


def finite(value: Any) -> Any:
    """Replace NaN and infinities in JSON values, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_text` does, with null for NaN and infinities."""
    document = json.dumps(finite(value), indent=1, allow_nan=False)
    write_text(path, f"{document}\n")
