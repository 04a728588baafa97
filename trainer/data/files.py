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
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.data.shards import read_json_or_empty
from trainer.errors import UserError
from trainer.files import check_link_target, check_regular, path_of, write_atomically
from trainer.text import note, without_braces

Format = Literal["text", "jsonl", "parquet"]
# By suffix, so that one directory may hold several formats. For other suffixes see
# NOT_PLAIN, else a file is text.
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
# The tags and separators in these files would be trained on like text.
MARKUP = (".html", ".htm", ".xhtml", ".xml", ".svg", ".rtf", ".srt", ".vtt")
NOT_PLAIN = dict.fromkeys(MARKUP, "markup")
NOT_PLAIN |= dict.fromkeys((".warc", ".wet", ".wat"), "an archive of pages")
# Its JSON may hold pictures in base64 beside the text.
NOT_PLAIN[".ipynb"] = "a notebook"
NOT_PLAIN |= dict.fromkeys((".csv", ".tsv", ".arrow"), "a table")
# Git LFS puts a pointer with this start in the place of a file that was not fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
BLOCK = 1 << 22
MAX_NAMED = 8  # files that one message lists; a directory may hold thousands
# A source has one data.column, so files that name theirs differently are prepared
# apart.
OTHER_COLUMNS = (
    "; if files name their columns differently, run `scalify-trainer prepare-data"
    " data=text data.paths=[FILE] data.column=NAME` for each, then train with data=mix"
    " data.sources=[DIRECTORY,...] of the directories that it prints"
)
# Follows "leave it" in messages. No pattern leaves files out, so it takes the rest.
OUT_OF_PATHS = (
    " out of data.paths, by patterns: 'data.paths=[DIRECTORY/**/*.txt]' takes the .txt"
    " files below DIRECTORY"
)
# Files of at least this size are read once and then recognized by size and times.
MIN_REMEMBERED_BYTES = 64 << 20
# A name such as train-00000-of-00002.parquet, perhaps with a hash before the suffix.
# The hash changes when the data set is saved again.
NUMBERED_FILE = re.compile(r"(.*?)(\d{5})-of-(\d{5})(?:-[0-9a-f]{16})?(\..*)?")
ZEROS = "\0" * 4
PARQUET = b"PAR1"  # the first bytes of a Parquet file
# By their first bytes, for messages: compressed files may have any name.
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
      why: the bytes that are not text, after the kind of file if it is recognized.
    """

    def __init__(self, path: Path, why: str, message: str) -> None:
        super().__init__(message)
        self.path, self.why = path, why


class NoColumn(UserError):
    """The error of a file with columns `names`, but not `column`.

    `without_names` is its message without the names of the columns.
    """

    def __init__(self, column: str, names: Iterable[str], where: str = "") -> None:
        missing = f"{where}there is no column {column!r}"
        super().__init__(f"{missing}; valid for data.column: {', '.join(names)}")
        self.without_names = (
            f"{missing}; set data.column (the columns' names are not shown, because a"
            " run's saved settings may name this file)"
        )


@dataclass(frozen=True)
class SourceFile:
    """A file that was read.

    Attributes:
      path: the file.
      size: its bytes.
      chars: characters of its text, with a line end counted as one; 0 if it is not
          text.
      digest: a digest of its bytes, hexadecimal.
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
    """Return the size and times of a file, which any edit changes; "" if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    # A copy may keep the modification time (`cp -p`), but not the time of the change.
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def expand(paths: tuple[str, ...]) -> list[Path]:
    """Return the files of paths, globs and directories, in the given order.

    A directory stands for all files below it. Files and directories whose names start
    with a dot are left out. Files of a glob or a directory are sorted by name. A file
    that several links or patterns reach is listed once, and a line says so: otherwise
    one copy could be trained on, and another validated on.
    """
    files: dict[str, Path] = {}
    repeated: list[tuple[str, Path]] = []
    for path in paths:
        path = os.path.expanduser(path)
        # Before patterns: the name of a file may hold * and [ itself.
        if os.path.isfile(path):
            matches = [path]
        elif os.path.isdir(path):
            matches = walk(path)
        else:
            # glob has the order of the directory, which differs between machines, and
            # passes over directories that it cannot list.
            matches = sorted(glob.glob(path, recursive=True))
            check_searched_directories(path)
        for match in matches:
            check_directory(match)
            # A link to a missing file is no file below, and its text would be left out.
            check_link_target(match)
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            raise no_match(path)
        for match in matches:
            real = os.path.realpath(match)
            if real in files:
                repeated.append((match, files[real]))
            files.setdefault(real, Path(match))
    if repeated:
        (match, listed), *others = repeated
        more = f" (and {len(others):,} more)" if others else ""
        note(
            f"data.paths: {match}{more} is read already, as {listed}, and is read once;"
            " data=mix data.weights=[...] gives a text more weight"
        )
    return list(files.values())


def check_directory(path: str | Path) -> None:
    """Raise UserError for a directory that cannot be listed.

    Its files would be left out in silence. Any other path is accepted.
    """
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                # Without the permission x a directory lists its names, but its files
                # cannot be read.
                entry.stat(follow_symlinks=False)
                break
    except (NotADirectoryError, FileNotFoundError):
        return
    except OSError as error:
        raise UserError(
            f"{path} cannot be listed ({error.strerror}), so that its files would be"
            " left out; change its permissions, or leave it out"
        ) from error


def check_searched_directories(pattern: str) -> None:
    """Call `check_directory` for all directories in which a pattern is looked for."""
    directory = pattern
    while glob.has_magic(directory):
        directory = os.path.dirname(directory)
        for match in glob.glob(os.path.join(directory, ""), recursive=True):
            check_directory(Path(match))


def walk(folder: str) -> list[str]:
    """Return the files and directories below a directory, sorted.

    Names that start with a dot are left out. A link to a directory is followed, unless
    the directory contains the link.
    """
    paths = []
    # os.walk passes over a directory that it cannot list. So directories are returned
    # too, and the caller checks them.
    for parent, directories, files in os.walk(folder, followlinks=True):
        directories[:] = [
            name
            for name in directories
            if name[0] != "." and not _contains_itself(parent, name)
        ]
        names = [*directories, *(name for name in files if name[0] != ".")]
        paths += [os.path.join(parent, name) for name in names]
    return sorted(paths)


def _contains_itself(parent: str, name: str) -> bool:
    """Return whether a directory is a link to one that it lies in."""
    path = os.path.join(parent, name)
    if not os.path.islink(path):
        return False
    # Otherwise os.walk would follow the link until Linux refuses a path of 41 links,
    # and two such links would double the paths each time.
    target, place = os.path.realpath(path), os.path.realpath(parent)
    return os.path.commonpath([target, place]) == target


def check_numbered_files(paths: Iterable[Path]) -> None:
    """Print which sets of numbered files, such as train-00000-of-00002, are incomplete.

    Raises:
      UserError: two sets share a name, so that text in both would be read twice.
    """
    totals: dict[tuple[Path, str, str], tuple[int, Path]] = {}
    sets: dict[tuple[Path, str, str], dict[int, Path]] = {}
    for path in paths:
        if (match := NUMBERED_FILE.fullmatch(path.name)) is None:
            continue
        name, index, total, suffix = match.groups()
        key = (path.parent, name, suffix)
        expected, first_path = totals.setdefault(key, (int(total), path))
        same_index = sets.setdefault(key, {}).setdefault(int(index), path)
        # A second save has another total, or repeats an index with another hash.
        conflicting = same_index if int(total) == expected else first_path
        if conflicting != path:
            raise UserError(
                f"{conflicting} and {path} are shards of two saves of one data set, and"
                " both would be read; move the shards of one elsewhere"
            )
    for key, (expected, first_path) in totals.items():
        if len(sets[key]) < expected:
            note(
                f"{first_path} belongs to {expected:,} shards by its name, but only"
                f" {len(sets[key]):,} of them are read"
            )


def note_equal_files(digests: Mapping[Path, str]) -> None:
    """Print that files have the content of others, by their digests."""
    first_files: dict[str, Path] = {}
    equal = [
        (path, first)
        for path, digest in digests.items()
        if (first := first_files.setdefault(digest, path)) != path
    ]
    if equal:
        more = f" ({len(equal):,} such files)" if len(equal) > 1 else ""
        note(
            f"data.paths: {equal[0][0]} has the content of {equal[0][1]}{more}, which"
            " is read twice"
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
    return UserError(f"{problem} {path} (looked from {Path.cwd()}); correct the path")


def folder_of(path: str, first_file: Path) -> str:
    """Return the name of directory `path`, or of the first file's if it is none."""
    folder = path_of(path)
    return (folder if folder.is_dir() else first_file.parent).absolute().name


def format_of(path: Path, format: Format | None) -> Format:
    """Return the format of a file: by its suffix, else `format`, else text.

    Raises:
      UserError: the suffix contradicts `format`. Without a `format`: the file is no
          plain text by its suffix, or looks like JSON lines or markup.
    """
    by_name = FORMATS.get(path.suffix.lower())
    if by_name is not None and format not in (None, by_name):
        raise UserError(
            f"data.format={format}, but {path} is {by_name} by its name; leave"
            " data.format out (each file is then read by its name), or give the file"
            " another name"
        )
    kind = NOT_PLAIN.get(path.suffix.lower())
    if format is None and kind is not None:
        raise UserError(
            f"{path} is {kind} by its name: extract its text (of a table as JSON lines"
            " or Parquet), leave it out of data.paths, or set data.format=text to train"
            " on it as it stands"
        )
    # A user who sets data.format may want to train on JSON or markup as it stands.
    start = b"" if by_name or format else first_bytes(path)
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
    return by_name or format or "text"


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, without byte order mark and white space.

    b"" if the file cannot be read: `read_through` reports that.
    """
    try:
        with path.open("rb") as file:
            return file.read(BLOCK).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError:
        return b""


def begins_like_json(start: bytes) -> bool:
    """Return whether `start` begins a JSON object, or a list of objects."""
    if re.match(rb'\[\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:', start):
        return True
    line, line_end, _ = start.partition(b"\n")
    is_open = line.strip() == b"{"  # an object over several lines
    # A first row longer than BLOCK has no line end. White space before it was removed,
    # so `start` may be shorter than BLOCK; half of it is enough to decide.
    is_cut_off = not line_end and len(start) > BLOCK // 2
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
) -> list[SourceFile]:
    """Read files, several at a time, and return their sizes and digests.

    Args:
      paths: the files.
      must_be_text: tells whether a file must be UTF-8.
      cache_dir: the directory that holds the digests of large files.

    Raises:
      UserError: a file cannot be read, or is not text.
    """
    digests_file = cache_dir / "files.json"
    remembered = read_json_or_empty(digests_file)
    # Before the files are read: a file that changes meanwhile has another stamp then.
    stamps = {path: stamp_of(path) for path in paths}
    keys = {
        # The characters of a file are only counted if it must be text.
        path: f"{path.resolve()} {stamps[path]} {must_be_text(path)}"
        for path in paths
    }

    def read_one(path: Path) -> SourceFile | NotText:
        stored = remembered.get(keys[path])
        if stored is not None:
            size, chars, digest = stored
            return SourceFile(path, size, chars, digest, stamps[path])
        try:
            return read_through(path, must_be_text(path), stamps[path])
        # Returned, so that one message can name all files that are not text.
        except NotText as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(read_one, paths))
    errors = [result for result in results if isinstance(result, NotText)]
    if errors:
        raise combine_errors(errors)
    files = [result for result in results if isinstance(result, SourceFile)]
    large_files = {
        keys[f.path]: [f.size, f.chars, f.digest]
        for f in files
        if f.size >= MIN_REMEMBERED_BYTES
    }
    if not large_files.keys() <= remembered.keys():
        write_atomically(digests_file, json.dumps(remembered | large_files).encode())
    return files


def read_through(path: Path, must_be_text: bool, stamp: str) -> SourceFile:
    """Return size, digest and, for text, the number of characters of a file."""
    digest = hashlib.blake2b(digest_size=16)
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    # As `open` reads a file: a validation part starts at a character of that text.
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    size = chars = 0
    try:
        # A pipe would be waited for, and a file of holes read to its end.
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                if not size and block.startswith(LFS_POINTER):
                    raise NotText(
                        path,
                        "a pointer of Git LFS",
                        f"{path} is Git LFS's pointer to a file that was not fetched;"
                        " run `git lfs pull` in its repository, or leave"
                        f" it{OUT_OF_PATHS}",
                    )
                if must_be_text:
                    chars += len(decode(path, lines, utf8, block, size))
                size += len(block)
            if must_be_text:
                chars += len(decode(path, lines, utf8, b"", size))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return SourceFile(path, size, chars, digest.hexdigest(), stamp)


def decode(
    path: Path,
    newline_decoder: io.IncrementalNewlineDecoder,
    utf8: codecs.IncrementalDecoder,
    block: bytes,
    offset: int,
) -> str:
    """Return the text of the block at `offset`; an empty block ends the file."""
    # Bytes of a character that began in the previous block.
    pending = len(utf8.getstate()[0])
    # NUL is valid UTF-8, but stands for UTF-16, for a binary file, or for zeros that a
    # failed disk or download left.
    nul = block.find(b"\0")
    try:
        text = newline_decoder.decode(block, final=not block)
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
    """Return the error of a file, which names the kind of file if it is recognized."""
    with path.open("rb") as file:
        head = file.read(512)
    # A tar archive begins with the name of its first member.
    if head[257:262] == b"ustar":
        message = (
            f"{path} is a tar archive; unpack it and give its directory, or leave"
            f" it{OUT_OF_PATHS}"
        )
        return NotText(path, "a tar archive", message)
    if head.startswith(PARQUET):
        message = (
            f"{path} is Parquet, but not by its name; rename it to end in .parquet, or"
            f" set data.format=parquet, or leave it{OUT_OF_PATHS}"
        )
        return NotText(path, "Parquet, not by its name", message)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            message = (
                f"{path} is not text but {kind} ({why}); decompress it first, or"
                f" leave it{OUT_OF_PATHS}"
            )
            return NotText(path, f"{kind}: {why}", message)
    message = (
        f"{path} is not text: {why}; convert it to UTF-8, or leave it{OUT_OF_PATHS}"
    )
    return NotText(path, why, message)


def combine_errors(errors: Sequence[NotText]) -> NotText:
    """Return one error for all files that are not text."""
    first_error = errors[0]
    if len(errors) == 1:
        return first_error
    named_files = ", ".join(f"{e.path} ({e.why})" for e in errors[:MAX_NAMED])
    if len(errors) > MAX_NAMED:
        named_files += ", ..."
    message = (
        f"{len(errors)} files are not text: {named_files}; convert them to UTF-8, or"
        f" leave them{OUT_OF_PATHS}"
    )
    return NotText(first_error.path, first_error.why, message)


def check_no_zeros(texts: Iterable[str], where: str) -> None:
    """Raise UserError for a text with zeros in the place of characters.

    A disk or a download that failed leaves thousands; a single NUL may be meant. The
    message begins with `where`.
    """
    if any(ZEROS in text for text in texts):
        raise UserError(
            f"{where}: a text holds zeros, as where a file was damaged; download or"
            " copy it again"
        )


def with_column_advice[T](rows: Iterator[T], n_sources: int) -> Iterator[T]:
    """Yield the rows, and add advice to the error of a missing column.

    `n_sources` is the number of files, or of a mixture's sources. A single one needs
    no advice.
    """
    try:
        yield from rows
    except NoColumn as error:
        # The corpus of a mixture's source may have added it already.
        if n_sources > 1 and OTHER_COLUMNS not in str(error):
            error.args = (f"{error}{OTHER_COLUMNS}",)
        raise


@contextmanager
def column_names_hidden() -> Iterator[None]:
    """Leave the columns' names out of the error of a missing column.

    For data that a saved configuration names: somebody else may have written it, and
    the names are the content of a file, such as the keys of a JSON file.
    """
    try:
        yield
    except NoColumn as error:
        raise UserError(error.without_names) from None


@contextmanager
def reading_errors(files: Sequence[SourceFile], format: str) -> Iterator[None]:
    """Turn errors of reading local files into a UserError that names them."""
    try:
        yield
    # The built-in bases of most of Arrow's errors; what Arrow lacks is a RuntimeError,
    # too.
    except (ValueError, LookupError, TypeError, OSError, RuntimeError) as error:
        # Arrow's errors do not name the file.
        names = ", ".join(str(file.path) for file in files[:3])
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{names}: cannot be read as {format} ({lines[0]})") from error
