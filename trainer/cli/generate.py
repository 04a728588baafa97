"""Sample text from a run's weights.

    scalify-trainer generate run_dir=runs/mine prompt='And God said'
    scalify-trainer generate run_dir=runs/mine prompts=prompts.txt count=3
    scalify-trainer generate run_dir=runs/mine prompts=-

prompts=FILE has a prompt per line. prompts=- reads prompts as you type them; in a
terminal, an empty line ends them.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.arguments import STEP_HELP, argument, check_at_least
from trainer.errors import UserError
from trainer.files import path_of, read_file
from trainer.text import note, show


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    prompt: str = argument("text to continue; empty: start a new document", "")
    prompts: str = argument(
        "a file with a prompt on each line; -: standard input, one after the other", ""
    )
    count: int = argument("samples of each prompt, with consecutive seeds", 1)
    max_new_tokens: int = argument("tokens to sample", 200)
    temperature: float = argument(
        "divides the logits; 0 takes the likeliest token", 0.8
    )
    top_k: int = argument("keep the k likeliest tokens; 0 keeps all", 0)
    top_p: float = argument(
        "keep the fewest likeliest tokens that reach this probability; 1 keeps all", 1.0
    )
    seed: int = argument("random seed of the samples", 0)
    step: str = argument(STEP_HELP, "newest")


def prompts_of(args: Arguments) -> Iterator[str]:
    """Yield the prompts, those from standard input as they are typed."""
    if not args.prompts:
        yield args.prompt
    elif args.prompts == "-":
        # One by one, so that a program can write a prompt and read its answer.
        yield from typed_lines()
    else:
        file = path_of(args.prompts)
        try:
            # Windows' editors put a byte order mark before the first prompt, and a
            # carriage return before each line end.
            text = read_file(file).decode("utf-8-sig").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"prompts={args.prompts} cannot be read ({reason}); give a text file, a"
                " prompt a line"
            ) from None
        # `splitlines` would split at form feeds too.
        yield from text.removesuffix("\n").split("\n")


def typed_lines() -> Iterator[str]:
    """Yield lines of standard input; in a terminal, an empty line ends them."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            # Standard error, so that the output of a pipe has texts alone.
            print("prompt> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        # In a pipe an empty line is a prompt: a new document.
        if not line or (is_terminal and not line.strip()):
            return
        yield line.rstrip("\n").removeprefix("\ufeff")  # the byte order mark


def main(args: Arguments) -> None:
    """Print each prompt with its continuations, and an empty line between two texts."""
    if args.prompt and args.prompts:
        raise UserError("prompt and prompts: give one of them")
    check_at_least(args, count=1)
    if args.prompts not in ("", "-"):
        # Report a missing file before the model is loaded.
        list(prompts_of(args))
    from trainer.assembly.saved_model import restore_run
    from trainer.data.tokenizer import continuation
    from trainer.models.sampling import Generator
    from trainer.observe.progress import log_first_duration

    model = restore_run(Path(args.run_dir), args.step)
    generator = log_first_duration(
        Generator(model.bind, model.spec).__call__,
        "compiling, and the first text",
        note,
    )
    is_first = True
    for prompt in prompts_of(args):
        # A model needs a first token; after eot begins a new document.
        ids = model.tokenizer.encode(prompt) or [model.tokenizer.eot]
        for i in range(args.count):
            new = generator(
                model.params,
                ids,
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                # So that sample i of a prompt can be repeated alone, by its seed.
                seed=args.seed + i,
            )
            text = prompt + continuation(model.tokenizer, ids, new)
            show(text if is_first else f"\n{text}")
            is_first = False
