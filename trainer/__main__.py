"""`scalify-trainer COMMAND key=value ...`, also `python -m trainer COMMAND ...`.

Without a COMMAND it trains. Each command is a file of `trainer.cli`.
"""

import importlib
import os
import signal
import sys
from types import FrameType

from trainer.errors import complain, leave

COMMANDS = (
    "train",
    "evaluate",
    "generate",
    "export",
    "plan",
    "report",
    "compare",
    "explain",
    "bisect",
    "prepare-data",
    "train-tokenizer",
)


def command() -> None:
    """Run the command that the arguments name, and exit with its code."""
    # Libraries swallow a KeyboardInterrupt that meets their import.
    signal.signal(signal.SIGINT, end_at_once)
    name, *arguments = sys.argv[1:] or ["train"]
    if name not in COMMANDS:
        name, arguments = "train", sys.argv[1:]
    module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        leave(module.command(arguments))
    except KeyboardInterrupt:
        complain("interrupted")
        leave(128 + signal.SIGINT)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at a Ctrl-C before there is anything to clean up."""
    os.write(2, b"error: interrupted; nothing was done\n")
    os._exit(128 + number)


if __name__ == "__main__":
    command()
