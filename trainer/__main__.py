"""`scalify-trainer COMMAND key=value ...`, also `python -m trainer COMMAND ...`.

Without a COMMAND it trains. Each command is a file of `trainer.cli`, imported when it
is called: JAX takes longer than most answers.
"""

import importlib
import io
import logging
import os
import re
import signal
import sys
from types import FrameType

from trainer.cli import commands
from trainer.errors import PrintableRecord, UserError, complain, leave
from trainer.text import nearest
from trainer.version import __version__

COMMANDS = {
    "train": "train a model; the default without a COMMAND",
    "evaluate": "a run's loss in other precisions, on other text, on tasks",
    "generate": "sample text from a run's weights",
    "export": "a run's weights as a Hugging Face directory",
    "plan": "memory, kernels and FP8 of a step on GPUs that are not here",
    "report": "report.html of a finished or running run",
    "compare": "runs beside each other, the best first",
    "explain": "the line of code where scale propagation loses numbers",
    "bisect": "the layers whose FP8 casts cost the most",
    "prepare-data": "tokenize text before the training",
    "train-tokenizer": "a byte-level BPE tokenizer from your text",
}
USAGE = """usage: scalify-trainer [COMMAND] [key=value ...]

Train language models with scale propagation. Commands:

{}

Each explains its keys: scalify-trainer train --help
"""


def overview() -> str:
    """Return what `--help` prints without a command."""
    return USAGE.format(
        "\n".join(f"  {name:<17}{about}" for name, about in COMMANDS.items())
    )


def open_streams() -> None:
    """Open standard streams that the caller closed.

    Otherwise the first files that are opened, a lock or a log, would take their
    numbers, and error messages would be written into them.
    """
    # The system gives the lowest number that is free, so this fills 0, 1 and 2.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # As the streams that Python opens are, for the processes that a run starts.
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number, mode in (
        ("stdin", 0, "r"),
        ("stdout", 1, "w"),
        ("stderr", 2, "w"),
    ):
        # Python leaves None for a stream that was closed when it started.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    # A file's name may have bytes that are not UTF-8; they are printed as they are.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")


def command() -> None:
    """Run the command that the arguments name, and exit with its code."""
    open_streams()
    logging.setLogRecordFactory(PrintableRecord)
    # Libraries swallow a KeyboardInterrupt that meets their import.
    signal.signal(signal.SIGINT, end_at_once)
    name, *arguments = sys.argv[1:] or ["train"]
    if name in ("--help", "-h"):
        print(overview(), end="")
        leave(0)
    if name == "--version":
        print(f"scalify-trainer {__version__}")
        leave(0)
    # A first argument that is no word belongs to training: key=value, ~key, or an
    # option.
    if name not in COMMANDS and re.search(r"[=.~]|^-", name):
        name, arguments = "train", sys.argv[1:]
    if name not in COMMANDS:
        error = UserError(
            f"{name}: there is no such command; {nearest(name, list(COMMANDS))}, or"
            " key=value arguments to train"
        )
        complain(error)
        leave(error.exit_code)
    module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
    # The module is imported, so a Ctrl-C may raise again.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if name == "train":
            module.command(arguments)
        leave(commands.run(name, arguments))
    except KeyboardInterrupt:
        complain("interrupted")
        leave(128 + signal.SIGINT)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at a Ctrl-C before there is anything to clean up."""
    # Not `print`: a handler may interrupt a print, whose buffer it would enter twice.
    os.write(2, b"error: interrupted; nothing was done\n")
    os._exit(128 + number)


if __name__ == "__main__":
    command()
