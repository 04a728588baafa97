"""A prepared directory: token shards and the manifest that says what they are.

manifest.json          written last, so a directory that has one is complete
train-00000.bin ...    token ids, little-endian uint16 or uint32, without a header; a
split is its shards in order val-00000.bin ...
tokenizer.json, ...    the tokenizer itself, so that training needs no other file
verified.json          which shards were read through and found whole, with their size
and times
"""

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import Tokenizer, load_saved
from trainer.errors import UserError
from trainer.files import well_formed, write_atomically

FORMAT = 1
SPLITS = ("train", "val")
MANIFEST = "manifest.json"
VERIFIED = "verified.json"
JOURNAL = "journal.jsonl"  # of an unfinished preparation
# Below this many bytes all shards are read through at every opening; it costs a tenth
# of a second.
ALWAYS_VERIFY = 256 << 20


@dataclass(frozen=True)
class Shard:
    """A file of token ids: its name, the number of tokens and the CRC-32 of its
    bytes.
    """

    name: str
    tokens: int
    crc32: int


@dataclass(frozen=True)
class Split:
    """One part of a corpus. `bytes` are those of its text as UTF-8; a part of a single
    text counts as one document.
    """

    documents: int
    tokens: int
    bytes: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    Attributes:
      directory: where it is.
      fingerprint: of source, tokenizer and settings; two directories with the same one
          hold the same tokens.
      source: what was read, as JSON.
      tokenizer: its name.
      tokenizer_fingerprint: of all that decides the ids.
      vocab_size: ids are below it.
      eot: the id that follows each document.
      dtype: "uint16" or "uint32".
      val_fraction: share of the validation part that was asked for.
      skipped: documents left out because they were empty.
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

        The size of every shard is checked always; its CRC-32 at every opening while all
        shards together are at most 256 MiB, and above that once per shard and whenever
        its size or times change. `thorough` checks every CRC-32.

        Raises:
          UserError: no manifest, one of another format, or a shard that is missing,
              truncated or altered.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        if not path.is_file():
            hint = (
                "its preparation is unfinished: run it again to continue"
                if (directory / JOURNAL).exists()
                else "make one with `python -m scripts.prepare_data`"
            )
            raise UserError(
                f"{directory} holds no prepared data (no {MANIFEST}); {hint}"
            )
        with well_formed(path, repair(directory)):
            tree = json.loads(path.read_text(encoding="utf-8"))
            found = tree.pop("format")
            if found != FORMAT:
                raise UserError(
                    f"{path} is of format {found}, this version reads {FORMAT};"
                    f" {repair(directory)}"
                )
            tree["splits"] = {
                name: Split(
                    **split
                    | {"shards": tuple(Shard(**shard) for shard in split["shards"])}
                )
                for name, split in tree["splits"].items()
            }
            manifest = cls(directory=directory, **tree)
            manifest._check()
            manifest.verify(thorough=thorough)
        return manifest

    def _check(self) -> None:
        """Raise ValueError for content that could not have been saved."""
        if self.splits.keys() != set(SPLITS) or self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"splits {[*self.splits]}, dtype {self.dtype}")
        if (
            not 0
            <= self.eot
            < self.vocab_size
            <= 2 ** (8 * np.dtype(self.dtype).itemsize)
        ):
            raise ValueError(
                f"vocab_size={self.vocab_size}, eot={self.eot}, dtype {self.dtype}"
            )
        for name, split in self.splits.items():
            if any(
                shard.name != os.path.basename(shard.name) for shard in split.shards
            ):
                raise ValueError(f"a shard of {name} is in another directory")
            if (
                split.tokens != sum(shard.tokens for shard in split.shards)
                or min(split.tokens, split.bytes) < 0
            ):
                raise ValueError(
                    f"{name} has {split.tokens} tokens, its shards"
                    f" {sum(s.tokens for s in split.shards)}"
                )

    def save(self) -> None:
        """Write `manifest.json`, whole or not at all."""
        tree = asdict(self)
        del tree["directory"]
        write_atomically(
            self.directory / MANIFEST,
            (json.dumps({"format": FORMAT} | tree, indent=1) + "\n").encode(),
        )

    def tokens(self, split: str) -> int:
        """Token count of a split, end-of-text included."""
        return self.splits[split].tokens

    def bytes(self, split: str) -> int:
        """Bytes of the text of a split, as UTF-8."""
        return self.splits[split].bytes

    @property
    def shards(self) -> list[Shard]:
        """Those of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, from the directory's own files."""
        tokenizer = load_saved(self.tokenizer, self.directory)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"the tokenizer files of {self.directory} were altered;"
                f" {repair(self.directory)}"
            )
        return tokenizer

    def open(self, split: str) -> list[npt.NDArray[np.unsignedinteger]]:
        """The shards of a split as read-only memory maps [tokens]."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return [
            np.memmap(self.directory / shard.name, dtype, mode="r")
            for shard in self.splits[split].shards
        ]

    def verify(self, *, thorough: bool = False) -> None:
        """Raise UserError for the first shard that is not what the manifest says."""
        stamps = {shard.name: self._checked_stamp(shard) for shard in self.shards}
        small = sum(size for size, *_ in stamps.values()) <= ALWAYS_VERIFY
        known = {} if small or thorough else read_json(self.directory / VERIFIED)
        unknown = [
            shard
            for shard in self.shards
            if known.get(shard.name) != stamps[shard.name]
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(self._check_crc, unknown):
                pass
        if unknown and not small and os.access(self.directory, os.W_OK):
            write_atomically(self.directory / VERIFIED, json.dumps(stamps).encode())

    def stamp(self, shard: Shard) -> list[int] | None:
        """Size, times and inode of a shard's file, which are others once it was
        changed; None: it is gone.
        """
        try:
            stat = (self.directory / shard.name).stat()
        except FileNotFoundError:
            return None
        # The change time too: a copy that keeps the modification time is read again.
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def verify_shard(self, shard: Shard) -> None:
        """Raise UserError for a shard that is not what the manifest says."""
        self._checked_stamp(shard)
        self._check_crc(shard)

    def _checked_stamp(self, shard: Shard) -> list[int]:
        path, stamp = self.directory / shard.name, self.stamp(shard)
        if stamp is None or not path.is_file():
            raise UserError(f"shard {path} is missing; {repair(self.directory)}")
        expected = shard.tokens * np.dtype(self.dtype).itemsize
        if stamp[0] != expected:
            raise UserError(
                f"shard {path} has {stamp[0]} bytes, its manifest says {expected}:"
                f" truncated or altered; {repair(self.directory)}"
            )
        return stamp

    def _check_crc(self, shard: Shard) -> None:
        crc = crc32(self.directory / shard.name)
        if crc != shard.crc32:
            raise UserError(
                f"shard {self.directory / shard.name} has checksum {crc:08x}, its"
                f" manifest says {shard.crc32:08x}: altered; {repair(self.directory)}"
            )


def repair(directory: Path) -> str:
    """What to do about damaged data."""
    return f"remove it (rm -r {directory}) and prepare the data again"


def crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def read_json(path: Path) -> dict[str, Any]:
    """A dictionary kept for speed only: empty when it is missing or torn."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}
