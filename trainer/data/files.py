"""Local files of a source: which they are, whether they are text, and a digest of their
content.
"""

import codecs
import glob
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.data.shards import read_json
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.text import without_braces

Format = Literal["text", "jsonl", "parquet"]
# Of files with these ends of names; any other is text.
NAMED: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
BLOCK = 1 << 22
MANY = 8  # files that are named one by one in a message
# What to do about files whose columns have several names.
APART = (
    "; where files name it otherwise, prepare each kind apart (python -m"
    " scripts.prepare_data files FILE --column NAME --tokenizer NAME), then data=mix"
    " data.sources=[DIRECTORY,...] of the directories it names"
)
# Files from this size on are read through once and then known by size and times.
REMEMBER = 64 << 20
# How compressed files start.
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}


class NotText(UserError):
    """A file that should be text is not.

    Attributes:
      path: which.
      why: what was found in it, with the kind of file that it is where its first bytes
          tell.
      instead: paths and patterns that take all other files that were given; empty: none
          are short.
    """

    def __init__(
        self, path: Path, why: str, message: str, instead: Sequence[str] = ()
    ) -> None:
        listed = f", by patterns: 'data.paths=[{','.join(instead)}]'" if instead else ""
        super().__init__(f"{message} out of data.paths{listed}")
        self.path, self.why, self.instead, self._message = path, why, instead, message

    def in_arguments(self) -> str:
        """The message for who gives files as arguments, and no data.paths."""
        listed = (
            f", by patterns: {' '.join(map(repr, self.instead))}"
            if self.instead
            else ""
        )
        return f"{self._message} out{listed}"


class NoColumn(UserError):
    """A file does not have the column, but `names`; `where` begins the message."""

    def __init__(self, column: str, names: Iterable[str], where: str = "") -> None:
        super().__init__(
            f"{where}there is no column {column!r}; valid for data.column:"
            f" {', '.join(names)}"
        )


@dataclass(frozen=True)
class File:
    """A file that was read through.

    Attributes:
      chars: of its text, line ends counted as one; 0 where it is not text.
      digest: of its bytes, hexadecimal.
    """

    path: Path
    size: int
    chars: int
    digest: str


def expand(paths: tuple[str, ...]) -> list[Path]:
    """Files, globs and directories to files, in the given order, those of a glob or a
    directory by name.

    A directory stands for all files below it whose names, and whose directories' names,
    do not begin with a dot.
    """
    found: list[Path] = []
    for path in paths:
        path = os.path.expanduser(path)
        inside = (
            os.path.join(glob.escape(path), "**", "*") if os.path.isdir(path) else path
        )
        matches = (
            [path]
            if os.path.isfile(path)
            else sorted(glob.glob(inside, recursive=True))
        )
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            if (listed := without_braces(path)) != path:
                raise UserError(
                    f"{path}: braces are not understood in a pattern; list the"
                    f" patterns: [{listed}]"
                )
            nothing = (
                "there is no file" if not glob.has_magic(path) else "no file matches"
            )
            what = "no file is in directory" if os.path.isdir(path) else nothing
            raise UserError(
                f"{what} {path} (looked from {Path.cwd()}); correct data.paths"
            )
        found += [Path(match) for match in matches]
    return found


def folder_of(given: str, first: Path) -> str:
    """The name of the directory that was given, or else that the first file is in."""
    folder = Path(given).expanduser()
    return (folder if folder.is_dir() else first.parent).absolute().name


def format_of(path: Path, given: Format | None) -> Format:
    """The format of a file: by the end of its name, or the given one where the name
    says nothing.

    Raises:
      UserError: the name says another format than the given one, or nothing while the
          file begins like JSON lines.
    """
    named = NAMED.get(path.suffix.lower())
    if named is not None and given not in (None, named):
        raise UserError(
            f"data.format={given}, but {path} is {named} by its name; leave data.format"
            " out (each file is then read by its name), or give the file another name"
        )
    if named is None and given is None and begins_like_json_lines(path):
        raise UserError(
            f"{path} looks like JSON lines, but not by its name: set data.format=jsonl"
            " to train on one column of it, or data.format=text to train on it as it"
            " stands"
        )
    return named or given or "text"


def begins_like_json_lines(path: Path) -> bool:
    """Return whether the first line is a JSON object; not known of one that is longer
    than a block.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(BLOCK)
    except OSError:
        return False  # said when it is read through
    if not line.startswith(b"{") or not line.endswith((b"}", b"}\n", b"}\r\n")):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def examine(
    paths: list[Path],
    *,
    text: Callable[[Path], bool],
    cache_dir: Path,
    given: Sequence[str] = (),
) -> list[File]:
    """Read files through, several at a time.

    Args:
      given: what the user named them by, which a message may propose to narrow.
      text: whether a file must be UTF-8.
      cache_dir: where what is known of large files is kept.

    Raises:
      UserError: a file cannot be read, or is not text.
    """
    memory = cache_dir / "files.json"
    known = read_json(memory)
    keys: dict[Path, str] = {}
    for path in paths:
        stat = path.stat()
        keys[path] = (
            f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
            f" {text(path)}"
        )

    def one(path: Path) -> File | NotText:
        stored = known.get(keys[path])
        try:
            return (
                read_through(path, text(path))
                if stored is None
                else File(path, *stored)
            )
        except NotText as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(one, paths))
    if wrong := [error for error in found if isinstance(error, NotText)]:
        raise all_of(wrong, paths, given)
    files = [file for file in found if isinstance(file, File)]
    new = {
        keys[f.path]: [f.size, f.chars, f.digest] for f in files if f.size >= REMEMBER
    }
    if not new.keys() <= known.keys():
        write_atomically(memory, json.dumps(known | new).encode())
    return files


def read_through(path: Path, text: bool) -> File:
    """Digest of a file and, for text, its characters."""
    digest = hashlib.blake2b(digest_size=16)
    utf8 = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    size = chars = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if text:
                    chars += len(decode(path, lines, utf8, block, size))
                size += len(block)
            if text:
                chars += len(decode(path, lines, utf8, b"", size))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return File(path, size, chars, digest.hexdigest())


def decode(
    path: Path,
    lines: io.IncrementalNewlineDecoder,
    utf8: codecs.IncrementalDecoder,
    block: bytes,
    offset: int,
) -> str:
    """The text of the block that starts at `offset`; an empty block ends the file."""
    pending = len(utf8.getstate()[0])
    nul = block.find(b"\0")
    try:
        text = lines.decode(block, final=not block)
    except UnicodeDecodeError as error:
        start = offset - pending + error.start
        raise not_text(
            path,
            f"byte {error.object[error.start]:#04x} at offset {start} is not UTF-8",
        ) from None
    if nul >= 0:
        raise not_text(path, f"NUL at offset {offset + nul}")
    return text


def not_text(path: Path, why: str) -> NotText:
    """The error of a file, with what the file is where its first bytes tell."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            message = (
                f"{path} is not text but {kind} ({why}); decompress it first, or"
                " leave it"
            )
            return NotText(path, f"{kind}: {why}", message)
    return NotText(
        path, why, f"{path} is not text: {why}; convert it to UTF-8, or leave it"
    )


def all_of(
    wrong: Sequence[NotText], paths: Sequence[Path], given: Sequence[str]
) -> NotText:
    """The error of all files that are not text, with what takes the rest of those that
    were given.
    """
    first, instead = wrong[0], others({error.path for error in wrong}, paths, given)
    if len(wrong) == 1:
        return NotText(first.path, first.why, first._message, instead)
    named = ", ".join(
        f"{error.path} ({error.why})" for error in wrong[:MANY]
    ) + ", ..." * (len(wrong) > MANY)
    message = (
        f"{len(wrong)} files are not text: {named}; convert them to UTF-8, or leave"
        " them"
    )
    return NotText(first.path, first.why, message, instead)


def others(
    wrong: Collection[Path], paths: Sequence[Path], given: Sequence[str]
) -> list[str]:
    """Patterns of the ends of names, and files by name, that take what was given
    without these files.

    It is empty where that would be many files by name, and where what was given is a
    pattern itself.
    """
    entries: list[str] = []
    if any(glob.has_magic(old) for old in given):
        return []
    for old in given:
        inside = (
            [path for path in paths if below(old, path)]
            if os.path.isdir(os.path.expanduser(old))
            else []
        )
        bad_ends = {path.suffix for path in inside if path in wrong}
        if not inside:
            entries += [] if Path(os.path.expanduser(old)) in wrong else [old]
        elif not bad_ends:
            entries.append(old)
        else:
            kept = [path for path in inside if path not in wrong]
            ends = sorted({path.suffix for path in kept} - bad_ends - {""})
            entries += [os.path.join(old, "**", f"*{end}") for end in ends]
            alone = [str(path) for path in kept if path.suffix not in ends]
            if len(alone) > MANY:
                return []
            entries += alone
    # of which Hydra would not make a list
    odd = any(set(entry) & set("(){},:=\"'") for entry in entries)
    return [] if odd else entries


def below(root: str, path: Path) -> bool:
    """Return whether a path was found in this directory."""
    return path.is_relative_to(os.path.expanduser(root))


def apart[T](rows: Iterator[T], count: int) -> Iterator[T]:
    """The rows of so many sources; a UserError for a missing column says what to do
    where there are several.
    """
    try:
        yield from rows
    except NoColumn as error:
        if count == 1:
            raise
        raise UserError(f"{error}{APART}") from None
