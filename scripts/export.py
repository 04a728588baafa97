"""Write a run's newest checkpoint in the form of Hugging Face: weights, configuration and tokenizer.

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
    from trainer.assembly.run import restore_run
    from trainer.data.hf_tokenizer import save_hf
    from trainer.models.huggingface import save

    model = restore_run(Path(args.run_dir))
    weights = save(args.out, model.spec, model.params, model.tokenizer.eot)
    others = save_hf(Path(args.out), model.tokenizer, model.spec.context)
    files = [*(path.name for path in weights), "config.json", *(path.name for path in others)]
    print(f"wrote {args.out}: {', '.join(files)}")
    print(
        f"read it: transformers.AutoModelForCausalLM.from_pretrained({args.out!r}), transformers.AutoTokenizer likewise"
    )


if __name__ == "__main__":
    sys.exit(run(Arguments, "export", __doc__ or "", main))
