"""The source text of the running Python's standard library, which every machine has.

Each file is a document, in the order of the paths within the library, so that the same
installation gives the same tokens everywhere. Installations differ: by version, and
some lack the library's tests. So the manifest records version, number of files, bytes
and a digest.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainer.data.files import stamp_of
from trainer.errors import UserError

# These are not part of the library: installed packages, the bundled pip, caches, and
# the module with the build's paths.
EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "_bundled", "__pycache__")
BUILD_MODULE = "_sysconfigdata"


class Library(NamedTuple):
    """The files of a standard library.

    Attributes:
      paths: the files that hold text, sorted.
      bytes: size of their text, as UTF-8 with line feeds.
      left_out: number of files that are not UTF-8 or hold NUL, such as tests of bad
        encodings.
      digest: a digest of names and texts, hexadecimal.
      stamps: `stamp_of` each file before it was read.
    """

    paths: list[Path]
    bytes: int
    left_out: int
    digest: str
    stamps: list[str]

    def description(self) -> dict[str, str | int]:
        """Return its description for the manifest, the same for equal libraries."""
        return {
            "kind": "python",
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "files": len(self.paths),
            "bytes": self.bytes,
            "left_out": self.left_out,
            "digest": self.digest,
        }


def find_library(folder: Path | None = None) -> Library:
    """Read the library in `folder`; None: the running Python's.

    Raises:
      UserError: the folder has no Python source, or a part of it cannot be read.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    digest = hashlib.blake2b(digest_size=16)
    paths, stamps, size, left_out = [], [], 0, 0
    for path in files_below(folder):
        # Before the text is read, so that a change meanwhile is noticed.
        stamp = stamp_of(path)
        text = text_of_file(path)
        if text is None:
            left_out += 1
            continue
        raw = text.encode()
        for part in (path.relative_to(folder).as_posix().encode(), raw):
            # Without the lengths, text that moves from one file's end to the next one's
            # start would give the same digest.
            digest.update(len(part).to_bytes(8, "little") + part)
        paths.append(path)
        stamps.append(stamp)
        size += len(raw)
    if not size:
        raise UserError(
            f"data=python: Python {platform.python_version()} has no source of its"
            f" standard library in {folder}; choose data=text with data.paths=[...], or"
            " data=embedded"
        )
    return Library(paths, size, left_out, digest.hexdigest(), stamps)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the library's Python files, sorted by their paths within it."""
    files: list[Path] = []
    # By default os.walk passes over a directory that it cannot read.
    for directory, folders, names in os.walk(folder, onerror=cannot_read):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(BUILD_MODULE):
                files.append(Path(directory, name))
    # The order of os.walk is that of the disk, and would give other tokens elsewhere.
    yield from sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def text_of_file(path: Path) -> str | None:
    """Return a file's text with line feeds, or None for a file that is not text, or a
    link that leads nowhere.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, FileNotFoundError):
        return None
    except OSError as error:
        cannot_read(error)
    if "\0" in text:
        return None
    # As Python reads its source, on any platform.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def cannot_read(error: OSError) -> NoReturn:
    """Raise UserError for a file or a directory, which would be left out in silence."""
    raise UserError(
        f"data=python: {error.filename} cannot be read ({error.strerror}); change its"
        " permissions, or repair it"
    ) from error
