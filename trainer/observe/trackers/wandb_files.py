"""Reader of W&B's local transaction logs, which needs no server."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.files import LOG_BYTES, read_file

BLOCK = 32768
# Checksum, length, and type: 1 whole record, or its 2 first, 3 middle, 4 last part.
HEADER = struct.Struct("<IHB")


def history_records(path: Path) -> Iterator[Any]:
    """Yield the history records of a W&B transaction log (`*.wandb`), in order.

    Reading ends where a kill cut the log, or where it is damaged. After a header of 7
    bytes the file is a LevelDB log
    (https://github.com/google/leveldb/blob/main/doc/log_format.md) whose records are
    `wandb_internal_pb2.Record`.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data = read_file(path, LOG_BYTES)
    position = HEADER.size
    parts: list[bytes] = []  # of a record that has not ended
    while position + HEADER.size <= len(data):
        # A header does not cross a border of blocks: what is left of a block is
        # padding.
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < HEADER.size:
            position += left_in_block
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        chunk = data[position + HEADER.size : position + HEADER.size + length]
        # Zeros were allocated and not written; a short chunk was cut by a kill.
        if kind == 0 or len(chunk) < length:
            return
        position += HEADER.size + length
        if (kind in (1, 2)) == bool(parts):
            return  # a record without its end or its beginning
        parts.append(chunk)
        if kind in (1, 4):
            record_data = b"".join(parts)
            parts = []
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            try:
                record.ParseFromString(record_data)
            except DecodeError:
                return
            if record.WhichOneof("record_type") == "history":
                yield record.history


def wandb_files(run_dir: Path, run_id: str) -> list[Path]:
    """Return the transaction logs of all parts of a run, the oldest first."""
    files = (run_dir / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    # By the time in the name; with the prefix all offline parts would come first.
    return sorted(files, key=lambda path: path.parent.name.removeprefix("offline-"))


def last_local_step(run_dir: Path, run_id: str) -> int:
    """Return the last step in W&B's local files; -1: none."""
    last_step = -1
    for path in wandb_files(run_dir, run_id):
        for row in history_records(path):
            last_step = max(last_step, row.step.num)
    return last_step
