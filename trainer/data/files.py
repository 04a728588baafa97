"""Local files of a source: their list, checks that they are text, and digests."""

import codecs
import glob
import hashlib
import io
import json
import os
import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import path_of, write_atomically
from trainer.text import note, override, without_braces

Format = Literal["text", "jsonl", "parquet"]
# formats by suffix; all other files are text
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
# The marks and separators of these files would be trained on like text.
MARKUP = (".html", ".htm", ".xhtml", ".xml", ".svg", ".rtf", ".srt", ".vtt")
NOT_PLAIN = dict.fromkeys(MARKUP, "markup")
NOT_PLAIN |= dict.fromkeys((".warc", ".wet", ".wat"), "an archive of pages")
NOT_PLAIN[".ipynb"] = "a notebook"
NOT_PLAIN |= dict.fromkeys((".csv", ".tsv"), "a table")
# the first bytes of what git leaves in the place of a file that it did not fetch
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
BLOCK = 1 << 22
MAX_NAMED = 8  # files that a message names one by one
# advice for files whose text columns have different names
OTHER_COLUMNS = (
    "; if files name their columns differently, run `scalify-trainer prepare-data"
    " data=text data.paths=[FILE] data.column=NAME` for each, then train with data=mix"
    " data.sources=[DIRECTORY,...] of the directories that it prints"
)
BY_PATTERNS = (
    ", by patterns: 'data.paths=[DIRECTORY/**/*.txt]' takes the .txt files below one"
)
# Files of at least this size are read once and then recognized by size and times.
REMEMBER = 64 << 20
# train-00000-of-00002.parquet, perhaps with a hash, which changes when the data set is
# saved again
NUMBERED_FILE = re.compile(r"(.*?)(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?(\..*)?")
# the first bytes of compressed files
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}


class NotText(UserError):
    """The error of a file that should be text and is not.

    Attributes:
      path: the file.
      why: the bytes that are not text, with the kind of file where it is recognized.
    """

    def __init__(self, path: Path, why: str, message: str) -> None:
        super().__init__(f"{message} out of data.paths{BY_PATTERNS}")
        self.path, self.why = path, why


class NoColumn(UserError):
    """The error of a file with columns `names`, but not `column`."""

    def __init__(self, column: str, names: Iterable[str], where: str = "") -> None:
        super().__init__(
            f"{where}there is no column {column!r}; valid for data.column:"
            f" {', '.join(names)}"
        )


@dataclass(frozen=True)
class File:
    """A file that was read.

    Attributes:
      path: the file.
      size: bytes.
      chars: of its text, with line ends counted as one; 0 where it is not text.
      digest: of its bytes, hexadecimal.
      stamp: its size and times before it was read.
    """

    path: Path
    size: int
    chars: int
    digest: str
    stamp: str

    def check_unchanged(self) -> None:
        """Raise UserError if the file may have changed since its digest was taken."""
        if stamp_of(self.path) != self.stamp:
            raise UserError(f"{self.path} changed while it was read; run again")


def stamp_of(path: Path) -> str:
    """Return size and times of a file, which every change of it changes; "" if it is
    gone.
    """
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def expand(paths: tuple[str, ...]) -> list[Path]:
    """Return the files of paths, globs and directories, in the given order.

    A directory stands for all files below it. Names of files and directories that start
    with a dot are left out. Files of a glob or a directory are sorted by name. A file
    that several links or patterns reach is read once, and a line says so: otherwise one
    copy could be trained on, and another validated on.
    """
    files: dict[str, Path] = {}
    repeated: list[tuple[str, Path]] = []
    for path in paths:
        path = os.path.expanduser(path)
        if os.path.isfile(path):
            matches = [path]
        elif os.path.isdir(path):
            pattern = os.path.join(glob.escape(path), "**", "*")
            matches = sorted(glob.glob(pattern, recursive=True))
        else:
            matches = sorted(glob.glob(path, recursive=True))
        for match in matches:
            if os.path.isdir(match) and not os.access(match, os.R_OK | os.X_OK):
                raise UserError(
                    f"{match} is a directory that you may not read; change its"
                    " permissions, or list the others in data.paths"
                )
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            raise no_match(path)
        for match in matches:
            real = os.path.realpath(match)
            if real in files:
                repeated.append((match, files[real]))
            files.setdefault(real, Path(match))
    if repeated:
        (match, first), *others = repeated
        more = f" (and {len(others):,} more)" if others else ""
        note(
            f"data.paths: {match}{more} is read already, as {first}, and is read once;"
            " data=mix data.weights=[...] gives a text more weight"
        )
    return list(files.values())


def check_numbered_files(paths: Iterable[Path]) -> None:
    """Print which sets of numbered files, such as train-00000-of-00002, are incomplete.

    Raises:
      UserError: files of two sets have one name: text that is in both would be read
          twice.
    """
    totals: dict[tuple[Path, str, str], tuple[int, Path]] = {}
    sets: dict[tuple[Path, str, str], dict[int, Path]] = {}
    for path in paths:
        if (match := NUMBERED_FILE.fullmatch(path.name)) is None:
            continue
        name, index, total, suffix = match.groups()
        key = (path.parent, name, suffix)
        expected, first = totals.setdefault(key, (int(total), path))
        same_index = sets.setdefault(key, {}).setdefault(int(index), path)
        # Another total, or one index twice (with another hash), means two sets.
        conflicting = same_index if int(total) == expected else first
        if conflicting != path:
            raise UserError(
                f"{conflicting} and {path} are shards of two sets, the earlier of which"
                " would be read beside the later; move one set elsewhere"
            )
    for key, (expected, first) in totals.items():
        if len(sets[key]) < expected:
            note(
                f"{first} is one of {len(sets[key]):,} shards that are read, of"
                f" {expected:,} by its name"
            )


def no_match(path: str) -> UserError:
    """Return the error of a path or pattern without files."""
    listed = without_braces(path)
    if listed != path:
        return UserError(
            f"{path}: braces are not understood in a pattern; list the"
            f" patterns: [{listed}]"
        )
    problem = "there is no file"
    if os.path.isdir(path):
        problem = "no file is in directory"
    elif glob.has_magic(path):
        problem = "no file matches"
    return UserError(f"{problem} {path} (looked from {Path.cwd()}); correct data.paths")


def folder_of(given: str, first: Path) -> str:
    """Return the name of the given directory, or else that of the first file's."""
    folder = path_of(given)
    return (folder if folder.is_dir() else first.parent).absolute().name


def format_of(path: Path, given: Format | None) -> Format:
    """Return the format of a file: by its suffix, or else the given one.

    Raises:
      UserError: the suffix contradicts the given format, or is that of Arrow; without a
          format it is that of markup, or none and the file looks like JSON lines.
    """
    if path.suffix.lower() == ".arrow":
        folder = path.parent
        if (folder.parent / "dataset_dict.json").is_file():  # It has several splits.
            folder = folder.parent
        raise UserError(
            f"{path} is an Arrow table, such as `datasets.save_to_disk` writes; read"
            f" its directory by data=hf {override('data.name', folder)}, or leave"
            " it out of data.paths"
        )
    named = FORMATS.get(path.suffix.lower())
    if named is not None and given not in (None, named):
        raise UserError(
            f"data.format={given}, but {path} is {named} by its name; leave data.format"
            " out (each file is then read by its name), or give the file another name"
        )
    not_plain = NOT_PLAIN.get(path.suffix.lower())
    if given is None and not_plain is not None:
        raise UserError(
            f"{path} is {not_plain} by its name: extract its text, leave it out of"
            " data.paths, or set data.format=text to train on it as it stands"
        )
    start = b"" if named or given else beginning(path)
    if begins_like_json(start):
        raise UserError(
            f"{path} looks like JSON lines, but not by its name: set data.format=jsonl"
            " to train on one column of it, or data.format=text to train on it as it"
            " stands"
        )
    if re.match(rb"(?i)<(!doctype html|html|\?xml)\b", start):
        raise UserError(
            f"{path} looks like markup, but not by its name: extract its text, leave it"
            " out of data.paths, or set data.format=text to train on it as it stands"
        )
    return named or given or "text"


def beginning(path: Path) -> bytes:
    """Return the first bytes of a file, without byte order mark and white space.

    They are empty if it cannot be read, which `read_through` reports.
    """
    try:
        with path.open("rb") as file:
            return file.read(BLOCK).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError:
        return b""


def begins_like_json(start: bytes) -> bool:
    """Return whether a file that starts so begins with a JSON object, or with a list of
    objects.
    """
    if re.match(rb'\[\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:', start):
        return True
    line, end, _ = start.partition(b"\n")
    is_open = line.strip() == b"{"  # an object over several lines
    is_cut_off = not end and len(start) > BLOCK // 2  # a row longer than `start`
    if is_open or is_cut_off:
        return bool(re.match(rb'\{\s*"(?:[^"\\\n]|\\.)*"\s*:', start))
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def examine(
    paths: list[Path],
    *,
    must_be_text: Callable[[Path], bool],
    cache_dir: Path,
) -> list[File]:
    """Read files and return their digests, several at a time.

    Args:
      paths: the files.
      must_be_text: whether a file must be UTF-8.
      cache_dir: directory of the remembered digests of large files.

    Raises:
      UserError: a file cannot be read, or is not text.
    """
    memory = cache_dir / "files.json"
    known = read_json_or_empty(memory)
    stamps = {path: stamp_of(path) for path in paths}
    keys = {
        path: f"{path.resolve()} {stamps[path]} {must_be_text(path)}" for path in paths
    }

    def read_one(path: Path) -> File | NotText:
        stored = known.get(keys[path])
        if stored is not None:
            size, chars, digest = stored
            return File(path, size, chars, digest, stamps[path])
        try:
            return read_through(path, must_be_text(path), stamps[path])
        except NotText as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(read_one, paths))
    errors = [result for result in results if isinstance(result, NotText)]
    if errors:
        raise combined(errors)
    files = [result for result in results if isinstance(result, File)]
    new = {
        keys[f.path]: [f.size, f.chars, f.digest] for f in files if f.size >= REMEMBER
    }
    if not new.keys() <= known.keys():
        write_atomically(memory, json.dumps(known | new).encode())
    return files


def read_through(path: Path, must_be_text: bool, stamp: str) -> File:
    """Return size, digest and, for text, the number of characters of a file."""
    digest = hashlib.blake2b(digest_size=16)
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    size = chars = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if not size and block.startswith(LFS_POINTER):
                    raise NotText(
                        path,
                        "a pointer of Git LFS",
                        f"{path} is Git LFS's pointer to a file that was not fetched;"
                        " run `git lfs pull` in its repository, or leave it",
                    )
                if must_be_text:
                    chars += len(decode(path, lines, utf8, block, size))
                size += len(block)
            if must_be_text:
                chars += len(decode(path, lines, utf8, b"", size))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return File(path, size, chars, digest.hexdigest(), stamp)


def decode(
    path: Path,
    lines: io.IncrementalNewlineDecoder,
    utf8: codecs.IncrementalDecoder,
    block: bytes,
    offset: int,
) -> str:
    """Return the text of the block at `offset`; an empty block ends the file."""
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
    """Return the error of a file, which names its kind where it is recognized."""
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


def combined(errors: Sequence[NotText]) -> NotText:
    """Return one error for all files that are not text."""
    first = errors[0]
    if len(errors) == 1:
        return first
    named = ", ".join(f"{error.path} ({error.why})" for error in errors[:MAX_NAMED])
    if len(errors) > MAX_NAMED:
        named += ", ..."
    message = (
        f"{len(errors)} files are not text: {named}; convert them to UTF-8, or leave"
        " them"
    )
    return NotText(first.path, first.why, message)


def with_column_advice[T](rows: Iterator[T], sources: int) -> Iterator[T]:
    """Yield the rows; with several sources, add advice to the error of a column."""
    try:
        yield from rows
    except NoColumn as error:
        if sources == 1:
            raise
        raise UserError(f"{error}{OTHER_COLUMNS}") from None


@contextmanager
def reading(files: Sequence[File], format: str) -> Iterator[None]:
    """Turn errors of reading local files into a UserError that names them."""
    try:
        yield
    except (
        ValueError,
        KeyError,
        TypeError,
        OSError,
        RuntimeError,
        StopIteration,
    ) as error:
        names = ", ".join(str(file.path) for file in files[:3])
        lines = str(error).strip().splitlines() or ["no rows"]
        raise UserError(f"{names}: cannot be read as {format} ({lines[0]})") from error
