"""Run a command of `scalify-trainer`: a module with `Arguments` and `main`."""

import importlib
import logging
from collections.abc import Sequence

from trainer.cli.arguments import run_command
from trainer.text import note

# Commands that also take keys of training, and the group of these keys; None: all.
KEY_GROUPS = {
    "explain": None,
    "plan": None,
    "prepare-data": "data",
    "train-tokenizer": "data",
}
AFTER_INTERRUPT = {
    "prepare-data": "re-run the same command to continue",
    "train-tokenizer": "nothing was written",
}


def run(name: str, argv: Sequence[str]) -> int:
    """Run any command but `train` with these arguments, and return the exit code."""
    module = importlib.import_module(f"trainer.cli.{name.replace('-', '_')}")
    # The help is the module's docstring, so that both cannot differ.
    program, about = f"scalify-trainer {name}", module.__doc__ or ""
    if name not in KEY_GROUPS:
        return run_command(module.Arguments, program, about, module.main, argv)
    # It imports Hydra, which takes longer than the help of other commands.
    from trainer.cli.training_keys import run_with_training_keys

    if KEY_GROUPS[name] == "data":
        # The log says what a preparation continues, or which process it waits for.
        logger = logging.getLogger("trainer")
        logger.setLevel(logging.INFO)
        logger.addHandler(logging.StreamHandler())
    try:
        return run_with_training_keys(
            module.Arguments, program, about, module.main, argv, KEY_GROUPS[name]
        )
    except KeyboardInterrupt:
        if name not in AFTER_INTERRUPT:
            raise
        note(f"stopped; {AFTER_INTERRUPT[name]}")
        # What was interrupted is whole: prepared shards stay, a tokenizer is written at
        # the end.
        return 130
