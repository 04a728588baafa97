"""`scalify-trainer COMMAND key=value ...`, also `python -m trainer COMMAND ...`.

Without a COMMAND it trains. Each command is a file of `trainer.cli`.
"""

import importlib
import sys

from trainer.errors import leave

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
    name, *arguments = sys.argv[1:] or ["train"]
    if name not in COMMANDS:
        name, arguments = "train", sys.argv[1:]
    module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
    leave(module.command(arguments))


if __name__ == "__main__":
    command()
