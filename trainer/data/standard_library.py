"""The source text of the installed Python's own standard library: tens of megabytes
that every machine has already.

Each file is a document, in the order of the paths within the library, so that the same
installation gives the same tokens everywhere. Installations differ, by version and by
whether the library's tests are among it: what was read is told by the manifest, with
the version, the number of files, their bytes and a digest of it all.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError

# Installed packages, the bundled pip, and what says how and where this Python was
# built: no part of the library.
LEFT_OUT = ("site-packages", "dist-packages", "_bundled", "__pycache__")
BUILD = "_sysconfigdata"


class Library(NamedTuple):
    """What was found.

    Attributes:
      paths: of the files that hold text, in their order.
      bytes: of their text, as UTF-8 with line feeds.
      left_out: files that are not UTF-8 or hold NUL, such as tests of bad encodings.
      digest: of names and texts, hexadecimal.
    """

    paths: list[Path]
    bytes: int
    left_out: int
    digest: str

    def description(self) -> dict[str, str | int]:
        """What the manifest says of it: nothing that the place of the installation
        decides.
        """
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
    """Read the library through; `folder`: of its files, None: that of the Python that
    runs this.

    Raises:
      UserError: no source is there.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    digest = hashlib.blake2b(digest_size=16)
    paths, size, left_out = [], 0, 0
    for path in files_below(folder):
        text = text_of_file(path)
        if text is None:
            left_out += 1
            continue
        raw = text.encode()
        for part in (path.relative_to(folder).as_posix().encode(), raw):
            digest.update(len(part).to_bytes(8, "little") + part)
        paths.append(path)
        size += len(raw)
    if not size:
        raise UserError(
            f"data=python: Python {platform.python_version()} has no source of its"
            f" standard library in {folder}; choose data=text with data.paths=[...], or"
            " data=embedded"
        )
    return Library(paths, size, left_out, digest.hexdigest())


def files_below(folder: Path) -> Iterator[Path]:
    """The library's Python files, by their paths within it."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [
            Path(place, name)
            for name in names
            if name.endswith(".py") and not name.startswith(BUILD)
        ]
    yield from sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def text_of_file(path: Path) -> str | None:
    """Its text with line feeds; None: it is not UTF-8, or holds NUL, or cannot be
    read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")
