"""Write a run's newest checkpoint as a Hugging Face GPT-2: model.safetensors and config.json.

python -m scripts.export run_dir=runs/mine out=exported
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.arguments import argument, run


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    out: str = argument("directory to write to; made if absent")


def main(args: Arguments) -> None:
    """Export, and say how to read the result."""
    from trainer.build.run import restore_run
    from trainer.huggingface import save_gpt2

    model = restore_run(Path(args.run_dir))
    file = save_gpt2(args.out, model.spec, model.params, model.tokenizer.eot)
    print(f"wrote {file}; read it with transformers.GPT2LMHeadModel.from_pretrained({args.out!r})")


if __name__ == "__main__":
    sys.exit(run(Arguments, "export", __doc__ or "", main))
