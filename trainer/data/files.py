"""Local files of a source: which they are, whether they are text, and a digest of their content."""

import codecs
import glob
import hashlib
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.data.shards import read_json, write_atomically
from trainer.errors import UserError

BLOCK = 1 << 22
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
    """Files and globs to files, in the given order, those of a glob by name."""
    found: list[Path] = []
    for path in paths:
        path = os.path.expanduser(path)
        if os.path.isdir(path):
            raise UserError(f"{path} is a directory; give files, such as data.paths=[{path}/*.txt]")
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
        if not matches:
            kind = "no file matches" if glob.has_magic(path) else "there is no file"
            raise UserError(f"{kind} {path} (looked from {Path.cwd()}); correct data.paths")
        found += [Path(match) for match in matches if os.path.isfile(match)]
    return found


def examine(paths: list[Path], *, text: bool, cache_dir: Path) -> list[File]:
    """Read files through, several at a time.

    Args:
      text: whether they must be UTF-8.
      cache_dir: where what is known of large files is kept.

    Raises:
      UserError: a file cannot be read, or is not text.
    """
    memory = cache_dir / "files.json"
    known = read_json(memory)
    keys: dict[Path, str] = {}
    for path in paths:
        stat = path.stat()
        keys[path] = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {text}"

    def one(path: Path) -> File:
        stored = known.get(keys[path])
        return read_through(path, text) if stored is None else File(path, *stored)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(one, paths))
    new = {keys[f.path]: [f.size, f.chars, f.digest] for f in files if f.size >= REMEMBER}
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
    path: Path, lines: io.IncrementalNewlineDecoder, utf8: codecs.IncrementalDecoder, block: bytes, offset: int
) -> str:
    """The text of the block that starts at `offset`; an empty block ends the file."""
    pending = len(utf8.getstate()[0])
    nul = block.find(b"\0")
    try:
        text = lines.decode(block, final=not block)
    except UnicodeDecodeError as error:
        start = offset - pending + error.start
        raise UserError(
            not_text(path, f"byte {error.object[error.start]:#04x} at offset {start} is not UTF-8")
        ) from None
    if nul >= 0:
        raise UserError(not_text(path, f"NUL at offset {offset + nul}"))
    return text


def not_text(path: Path, why: str) -> str:
    """The message, with what the file is where its first bytes tell."""
    with path.open("rb") as file:
        head = file.read(8)
    for magic, kind in COMPRESSED.items():
        if head.startswith(magic):
            return f"{path} is not text but {kind} ({why}); decompress it first"
    return f"{path} is not text: {why}; convert it to UTF-8 or leave it out of data.paths"
