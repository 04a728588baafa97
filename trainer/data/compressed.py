"""Compressed files, which are decompressed once, into the cache of the data.

All readers resume at a position in a file, and compressed bytes have no positions.
"""

import gzip
import hashlib
import os
import shlex
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.data.files import BLOCK, PARQUET, NoColumn, stamp_of
from trainer.errors import UserError
from trainer.files import (
    TEXT_BYTES,
    check_regular,
    replaced_atomically,
    write_atomically,
)

CODECS = {".gz": "gzip", ".zst": "zstd"}
SUFFIXES = (*CODECS, ".zip")  # of files that hold another file
# A file may hold up to this many times its bytes, or TEXT_BYTES if these are more. Text
# is compressed by a factor of 2 to 20; a bomb by 1,000 (gzip) or more.
MAX_DECOMPRESSION = 100


def decompressed(path: Path, cache_dir: Path) -> Path:
    """Return the decompressed file in the cache; `path` if it is not compressed.

    Its name is that of the compressed file without .gz or .zst, so that the rest of the
    name gives its format.

    Raises:
      UserError: the file is damaged or holds too much text for its size, or the cache
          cannot be written.
    """
    codec = CODECS.get(path.suffix.lower())
    if codec is None:
        return path
    # A pipe would be waited for, and stat gives no size of its text.
    check_regular(path)
    size_on_disk = path.stat().st_size
    if not size_on_disk:  # which readers take for an empty text
        raise UserError(f"{path} is no {codec} file: it has no bytes; copy it again")
    identity = f"{path.resolve()} {stamp_of(path)}"
    key = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    # The stem of `..gz` is a directory's name, and `.digest` is that of the record
    # below.
    name = path.stem.lstrip(".") or "text"
    # Names that begin with a dot are not read, so the cache may lie inside a directory
    # of texts.
    target = cache_dir / ".decompressed" / key / name
    record = target.with_name(".digest")
    # A cached file that lost its end, or was changed, would be another text, trained on
    # under the name of the first.
    if is_intact(target, record, key):
        return target
    limit = max(TEXT_BYTES, MAX_DECOMPRESSION * size_on_disk)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced_atomically(target) as file:
            size = 0
            for block in blocks(path, codec):
                size += len(block)
                if size > limit:
                    raise UserError(
                        f"{path}: {size_on_disk:,} bytes decompress to more than"
                        f" {limit:,}; if this is intended, decompress it yourself"
                    )
                file.write(block)
        # Written last: a file without its record is decompressed again.
        write_atomically(record, record_of(target, key))
    except OSError as error:
        raise UserError(
            f"cannot decompress {path} into {target.parent} ({error.strerror}); make"
            " room, or set data.cache_dir"
        ) from error
    return target


def record_of(target: Path, key: str) -> str:
    """Return the record of a file in the cache: the key of the compressed file, and a
    digest of the content.
    """
    with target.open("rb") as file:
        return f"{key} {hashlib.file_digest(file, hashlib.blake2b).hexdigest()}"


def is_intact(target: Path, record: Path, key: str) -> bool:
    """Return whether a file in the cache is that of its record and key."""
    return (
        target.is_file()
        and record.is_file()
        and record.read_bytes() == record_of(target, key).encode()
    )


def open_stream(path: Path, codec: str) -> Any:
    """Return a stream of the content of a compressed file."""
    if codec == "gzip":
        # Unlike Arrow's reader, Python's takes the zeros that tapes and block devices
        # add behind the data.
        return gzip.open(path)
    import pyarrow

    return pyarrow.input_stream(str(path), compression=codec)


def blocks(path: Path, codec: str) -> Iterator[bytes]:
    """Yield the content of a compressed file."""
    try:
        with open_stream(path, codec) as stream:
            while block := stream.read(BLOCK):
                yield block
    # gzip raises EOFError for a file that was cut, and zlib.error for damaged data.
    except (OSError, ValueError, EOFError, zlib.error) as error:
        # Arrow raises the class of other damage for it, with zstd's text.
        if "too much memory" in str(error):
            raise UserError(
                f"{path} needs more memory to decompress than is allowed, as written"
                " with `zstd --long`; decompress it yourself: `zstd -d --long=31"
                f" {shlex.quote(str(path))}`"
            ) from error
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET)) == PARQUET
        if is_parquet:
            raise UserError(
                f"{path} is Parquet, and no {codec} file; rename it to end in .parquet"
            ) from None
        raise UserError(
            f"{path} is no {codec} file, or a damaged one"
            f" ({str(error).splitlines()[0]}); copy or compress it again"
        ) from error


@contextmanager
def original_names(origins: Mapping[Path, Path]) -> Iterator[None]:
    """Replace the paths of the cache in an error by those of the user's files.

    Args:
      origins: the compressed file of each file in the cache.
    """

    def original(message: str) -> str:
        for cached, path in origins.items():
            message = message.replace(str(cached), str(path))
            message = message.replace(str(cached.parent), str(path.parent))
        return message

    try:
        yield
    except UserError as error:
        # The error keeps its class: callers add to a missing column's, or hide names.
        error.args = (original(str(error)),)
        if isinstance(error, NoColumn):
            error.without_names = original(error.without_names)
        raise


def check_no_compressed_duplicates(paths: Collection[Path]) -> None:
    """Raise UserError for a.txt.gz beside a.txt or a.txt.zst: by their names they hold
    one text.

    One file could be validated on while the other is trained on.
    """
    # Paths may spell one directory in several ways.
    places = {path: Path(os.path.realpath(path.parent), path.name) for path in paths}
    compressed = [path for path in paths if path.suffix.lower() in SUFFIXES]
    files = {places[path]: path for path in paths if path not in compressed}
    for path in compressed:
        other = files.setdefault(places[path].with_suffix(""), path)
        if other != path:
            raise UserError(
                f"{path} has the content of {other} by its name, which would be read"
                " twice; leave one of them out"
            )
