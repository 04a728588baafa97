"""Sample text from a run: its newest checkpoint, its tokenizer.

python -m scripts.generate run_dir=runs/mine prompt='And God said' max_new=300 temperature=0.8 top_k=40
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import argument, run


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    prompt: str = argument("text to continue; empty: start a new document", "")
    max_new: int = argument("tokens to sample", 200)
    temperature: float = argument("divides the logits; 0 takes the likeliest token", 0.8)
    top_k: int = argument("keep the k likeliest tokens; 0 keeps all", 0)
    top_p: float = argument("keep the fewest likeliest tokens that reach this probability; 1 keeps all", 1.0)
    seed: int = argument("another seed, another text", 0)


def main(args: Arguments) -> None:
    """Print the prompt and its continuation."""
    from trainer.build.run import restore_run
    from trainer.generate import Generator

    model = restore_run(Path(args.run_dir))
    prompt = model.tokenizer.encode(args.prompt) or [model.tokenizer.eot]
    new = Generator(model.bind, model.spec)(
        model.params,
        prompt,
        max_new=args.max_new,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    print(args.prompt + model.tokenizer.decode(new))


if __name__ == "__main__":
    sys.exit(run(Arguments, "generate", __doc__ or "", main))
