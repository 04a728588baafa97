"""A prepared directory: token shards and their manifest.

manifest.json          written last, so a directory that has one is complete
train-00000.bin ...    little-endian uint16 or uint32 token ids, without a header; a
val-00000.bin ...      split is its shards in order
tokenizer.json, ...    the tokenizer itself, so that training needs no other file
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import typing
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import Tokenizer, load_saved
from trainer.errors import UserError
from trainer.files import (
    check_regular,
    parse_json,
    path_of,
    read_file,
    well_formed,
    write_atomically,
)

# Version 1 has no digest of the manifest, and version 2 no digests of the shards.
MANIFEST_VERSION = 3
READABLE_VERSIONS = (1, 2, MANIFEST_VERSION)
# Part of every fingerprint. Increase it when this code starts to give a text other ids.
SHARD_VERSION = 1
SPLITS = ("train", "val")
MANIFEST = "manifest.json"
# Records of verified shards, in the user's cache: whoever made a data directory could
# forge records inside it.
VERIFIED = "~/.cache/scalify-trainer/verified"
JOURNAL = "journal.jsonl"  # progress of an unfinished preparation
# Reports read these fields of Manifest.source, whoever wrote them. Lists hold strings.
SOURCE_TYPES = {
    "kind": str,
    "name": str,
    "paths": list,
    "digests": list,
    "sources": list,
    "formats": dict,
    "implementation": str,
    "version": str,
    "digest": str,
    "files": int,
    "bytes": int,
}
REQUIRED_SOURCE_FIELDS = {
    "mix": ("sources",),
    "python": ("implementation", "version", "digest", "files", "bytes"),
}
# If all shards together have at most this many bytes, they are verified at every
# opening, which takes a quarter of a second of one core.
ALWAYS_VERIFY = 256 << 20
DIGEST_BYTES = 32  # of a shard: no two texts have the same


@dataclass(frozen=True)
class Shard:
    """A file of token ids.

    Attributes:
      name: its name in the prepared directory.
      tokens: number of ids.
      crc32: the CRC-32 of its bytes, for which anybody can make other bytes.
      digest: `digest_of_bytes` of its bytes; empty in data of earlier versions.
    """

    name: str
    tokens: int
    crc32: int
    digest: str = ""


@dataclass(frozen=True)
class Split:
    """A split of a corpus; `bytes` is the size of its text as UTF-8.

    A split of a single text counts as one document.
    """

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
      directory: the prepared directory.
      fingerprint: a digest of source, tokenizer and settings; directories with equal
          fingerprints hold equal tokens.
      source: the description of the source, JSON values.
      tokenizer: the tokenizer's name.
      tokenizer_fingerprint: a digest of all that decides its ids.
      vocab_size: ids are below it.
      eot: the id that follows each document.
      dtype: "uint16" or "uint32".
      val_fraction: the requested share of the validation part.
      skipped: empty documents, which were left out.
      splits: "train" and "val".
    """

    directory: Path
    fingerprint: str
    source: dict[str, Any]
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eot: int
    dtype: str
    val_fraction: float
    skipped: int
    splits: dict[str, Split]

    @classmethod
    def load(cls, directory: Path, *, thorough: bool = False) -> "Manifest":
        """Read the manifest and check its shards.

        The size of every shard is always checked. Digests and ids are checked at every
        opening while all shards together are at most 256 MiB. Above that they are
        checked once, and again when size, times or digest of the shard change.

        Args:
          directory: the prepared directory.
          thorough: check every digest and every id.

        Raises:
          UserError: no manifest, one of another format, or a missing, truncated or
              altered shard, or one with an id beyond the vocabulary.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        if not path.is_file():
            hint = "make one with `scalify-trainer prepare-data`"
            if (directory / JOURNAL).exists():
                hint = "its preparation is unfinished: run it again to continue"
            raise UserError(
                f"{directory} holds no prepared data (no {MANIFEST}); {hint}"
            )
        with well_formed(path, repair(directory)):
            tree = parse_json(read_file(path))
            version = tree["format"]
            if version not in READABLE_VERSIONS:
                raise UserError(
                    f"{path} is of format {version}, this version reads"
                    f" {' and '.join(map(str, READABLE_VERSIONS))}; {repair(directory)}"
                )
            if version > 1 and tree.pop("digest") != digest(tree):
                raise UserError(
                    f"{path} was altered since it was written; {repair(directory)}"
                )
            del tree["format"]
            for name, split in tree["splits"].items():
                shards = tuple(Shard(**shard) for shard in split["shards"])
                tree["splits"][name] = Split(**split | {"shards": shards})
            manifest = cls(directory=directory, **tree)
            # Whoever made the directory can compute the digest of any values.
            manifest._check()
            manifest.verify(thorough=thorough)
        return manifest

    def _check(self) -> None:
        """Raise ValueError for content that `save` cannot have written."""
        for record in (self, *self.splits.values(), *self.shards):
            _check_field_types(record)
        _check_source_fields(self.source)
        if self.splits.keys() != set(SPLITS) or self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"splits {[*self.splits]}, dtype {self.dtype}")
        limit = 2 ** (8 * self.file_dtype.itemsize)
        if (
            not 0 <= self.eot < self.vocab_size <= limit
            or not 0 <= self.val_fraction < 1
        ):
            raise ValueError(
                f"vocab_size={self.vocab_size}, eot={self.eot}, dtype {self.dtype},"
                f" val_fraction={self.val_fraction}"
            )
        for name, split in self.splits.items():
            for shard in split.shards:
                # A manifest may name no file outside of its directory.
                if shard.name != os.path.basename(shard.name):
                    raise ValueError(f"a shard of {name} is in another directory")
            tokens = sum(shard.tokens for shard in split.shards)
            # NumPy cannot map an empty file.
            is_empty = any(shard.tokens < 1 for shard in split.shards)
            # Bits per byte divide by the bytes.
            has_no_text = tokens > 0 and split.bytes < 1
            if split.tokens != tokens or is_empty or has_no_text:
                raise ValueError(
                    f"{name} has {split.tokens} tokens of {split.bytes} bytes, its"
                    f" shards {tokens}"
                )

    def save(self) -> None:
        """Write `manifest.json` atomically."""
        tree = {"format": MANIFEST_VERSION} | asdict(self)
        # The directory may be moved.
        del tree["directory"]
        tree["digest"] = digest(tree)
        write_atomically(self.directory / MANIFEST, json.dumps(tree, indent=1) + "\n")

    def token_count(self, split: str) -> int:
        """Return the token count of a split, end-of-text included."""
        return self.splits[split].tokens

    def byte_count(self, split: str) -> int:
        """Return the bytes of a split's text as UTF-8."""
        return self.splits[split].bytes

    @property
    def validation_bytes_per_token(self) -> float:
        """Mean bytes of text per token of the validation part."""
        return self.byte_count("val") / self.token_count("val")

    @property
    def file_dtype(self) -> np.dtype[Any]:
        """The dtype of ids in shards: little-endian, whatever machine reads them."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    @property
    def byte_counts(self) -> list[int]:
        """The bytes of each split's text."""
        return [self.byte_count(split) for split in SPLITS]

    @property
    def content(self) -> str:
        """A digest of all tokens, and of the bytes of text that they stand for.

        A hub data set may change while its name stays. Bits per byte depend on the
        bytes, which the tokens of some tokenizers do not tell.
        """
        return digest([content_of(self.shards), self.byte_counts])

    @property
    def earlier_contents(self) -> tuple[str, str]:
        """`content` as checkpoints of earlier versions have it: of the tokens alone, by
        digests or by CRC-32s.
        """
        by_crc32 = [dataclasses.replace(shard, digest="") for shard in self.shards]
        return content_of(self.shards), content_of(by_crc32)

    @property
    def validation_content(self) -> str:
        """A digest of the validation tokens. They may change and keep their number."""
        return content_of(self.splits["val"].shards)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer from its files in the directory."""
        tokenizer = load_saved(self.tokenizer, self.directory)
        # The tokens are those of the tokenizer that encoded them. With another, samples
        # and bits per byte would be of other text.
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"the tokenizer files of {self.directory} were altered;"
                f" {repair(self.directory)}"
            )
        # Anybody can compute the digest of a manifest with another vocabulary size, and
        # so let a model have too few rows.
        sizes, expected = (
            f"{made.vocab_size} ids and {made.eot} after each document"
            for made in (self, tokenizer)
        )
        if sizes != expected:
            raise UserError(
                f"{self.directory / MANIFEST} says {sizes}, its tokenizer has"
                f" {expected}; {repair(self.directory)}"
            )
        return tokenizer

    def open(self, split: str) -> list[npt.NDArray[np.unsignedinteger]]:
        """Return the shards of a split as read-only memory maps, each [tokens]."""
        return [self.open_shard(shard) for shard in self.splits[split].shards]

    def open_shard(self, shard: Shard) -> npt.NDArray[np.unsignedinteger]:
        """Return a shard as a read-only memory map [tokens]."""
        return np.memmap(self.directory / shard.name, self.file_dtype, mode="r")

    def verify(self, *, thorough: bool = False) -> None:
        """Raise UserError for the first shard that differs from the manifest."""
        # A manifest may be replaced while its shards stay: they are verified again
        # under another vocabulary size, CRC-32 or digest.
        stamps = {
            shard.name: [
                *self._checked_stamp(shard),
                self.vocab_size,
                shard.crc32,
                shard.digest,
            ]
            for shard in self.shards
        }
        tokens = sum(shard.tokens for shard in self.shards)
        is_small = tokens * self.file_dtype.itemsize <= ALWAYS_VERIFY
        name = hashlib.blake2b(bytes(self.directory.resolve()), digest_size=16)
        record = path_of(VERIFIED) / f"{name.hexdigest()}.json"
        verified = {} if is_small or thorough else read_json_or_empty(record)
        unverified = [
            shard
            for shard in self.shards
            if verified.get(shard.name) != stamps[shard.name]
        ]
        # zlib and hashlib release the interpreter's lock for large blocks.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # An error of a worker is only raised when its result is read.
            for _ in pool.map(self._check_content, unverified):
                pass
        if unverified and not is_small:
            # Shards that cannot be recorded are verified again at the next start.
            with contextlib.suppress(OSError):
                record.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(record, json.dumps(stamps))

    def stamp(self, shard: Shard) -> list[int] | None:
        """Return the `stamp_of` a shard's file."""
        return stamp_of(self.directory / shard.name)

    def verify_shard(self, shard: Shard) -> None:
        """Raise UserError for a shard that differs from the manifest."""
        self._checked_stamp(shard)
        self._check_content(shard)

    def _checked_stamp(self, shard: Shard) -> list[int]:
        path, stamp = self.directory / shard.name, self.stamp(shard)
        if stamp is None or not path.is_file():
            raise UserError(f"shard {path} is missing; {repair(self.directory)}")
        if path.is_symlink():
            # An error would print the checksum of a file outside the directory.
            raise UserError(
                f"shard {path} is a symbolic link; put the file itself there"
            )
        check_regular(path)
        expected = shard.tokens * self.file_dtype.itemsize
        if stamp[0] != expected:
            raise UserError(
                f"shard {path} has {stamp[0]} bytes, its manifest says {expected}:"
                f" truncated or altered; {repair(self.directory)}"
            )
        return stamp

    def _check_content(self, shard: Shard) -> None:
        path = self.directory / shard.name
        crc32, content_digest, largest = checksums_and_largest(path, self.file_dtype)
        # Data and checkpoints of earlier versions have this checksum alone.
        if crc32 != shard.crc32:
            raise UserError(
                f"shard {path} has checksum {crc32:08x}, its"
                f" manifest says {shard.crc32:08x}: altered; {repair(self.directory)}"
            )
        if shard.digest and content_digest != shard.digest:
            raise UserError(
                f"shard {path} has digest {content_digest}, its manifest says"
                f" {shard.digest}: altered; {repair(self.directory)}"
            )
        # The models' `embedding` gives NaN for such an id, and no error.
        if largest >= self.vocab_size:
            raise UserError(
                f"shard {path} has the id {largest}, but its tokenizer's ids are below"
                f" {self.vocab_size}; {repair(self.directory)}"
            )


def stamp_of(path: Path) -> list[int] | None:
    """Return size, times and inode of a file; None: it is gone.

    They change whenever the file changes.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    # A copy may keep the modification time, so take the change time too.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _check_field_types(record: Any) -> None:
    """Raise ValueError for a field of another type than its annotation."""
    # A dataclass takes values of any type.
    for name, hint in typing.get_type_hints(type(record)).items():
        kind, value = typing.get_origin(hint) or hint, getattr(record, name)
        # JSON may spell 0.0 as 0. And bool is an int in Python.
        is_number = kind is float and type(value) is int
        if not is_number and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{name}={value!r} is no {kind.__name__}")


def _check_source_fields(source: dict[str, Any]) -> None:
    """Raise ValueError for a description with missing fields or wrong types."""
    required = {"kind", *REQUIRED_SOURCE_FIELDS.get(str(source.get("kind")), ())}
    if missing := required - source.keys():
        raise ValueError(f"source has no {', '.join(sorted(missing))}")
    for name, kind in SOURCE_TYPES.items():
        value = source.get(name, kind())
        texts = value if isinstance(value, list) else []
        # Reports join and format these values.
        if not isinstance(value, kind) or not all(isinstance(x, str) for x in texts):
            raise ValueError(f"source.{name}={value!r}")


def digest(tree: Any) -> str:
    """Return a digest of JSON values."""
    text = json.dumps(tree, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def repair(directory: Path) -> str:
    """Return the advice for a damaged directory, as the end of a message."""
    return f"remove it (rm -r {shlex.quote(str(directory))}) and prepare the data again"


def digest_of_bytes(data: bytes = b"") -> "hashlib.blake2b":
    """Return the running digest of a shard, of which nobody can make another text."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


def content_of(shards: Iterable[Shard]) -> str:
    """Return a digest of the tokens of shards, by what their manifest says of them."""
    trees = [asdict(shard) for shard in shards]
    for tree in trees:
        if not tree["digest"]:
            del tree["digest"]  # so that data of earlier versions keep their digest
    return digest(trees)


def checksums_and_largest(path: Path, dtype: np.dtype[Any]) -> tuple[int, str, int]:
    """Return CRC-32 and digest of a file's bytes, and the largest of its numbers."""
    crc = largest = 0
    running = digest_of_bytes()
    with path.open("rb") as file:
        # A multiple of both sizes of ids, so that no id is cut.
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
            running.update(chunk)
            numbers = np.frombuffer(chunk, dtype, len(chunk) // dtype.itemsize)
            largest = max(largest, int(numbers.max(initial=0)))
    return crc, running.hexdigest(), largest


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is none."""
    try:
        tree = parse_json(read_file(path))
    # A lost record of what was verified only costs a second reading.
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}
