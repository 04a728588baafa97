"""Write a run's newest checkpoint in the form of Hugging Face: weights, configuration
and tokenizer.

python -m scripts.export run_dir=runs/mine out=exported
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.arguments import argument, run
from trainer.errors import UserError
from trainer.files import read_mapping

if TYPE_CHECKING:
    from trainer.data import Tokenizer


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    out: str = argument("directory to write to; made if absent")


def tokenizer_of_origin(run_dir: Path, ours: "Tokenizer", out: Path) -> list[Path]:
    """Copy the tokenizer's files of the Hugging Face directory that the run began with;
    the paths of the copies.

    None are copied where the run began otherwise, the directory is gone, or its
    tokenizer is another than the run's.
    """
    from trainer.data.hf_tokenizer import first_difference, ids_beside
    from trainer.models.weight_files import carry_tokenizer

    try:
        init_from = read_mapping(run_dir / "config.yaml").get("init_from")
    except ValueError as error:
        raise UserError(
            f"{run_dir / 'config.yaml'} is damaged ({error}); bring it back, then"
            " export again"
        ) from error
    origin = Path(init_from if isinstance(init_from, str) else "")
    theirs = ids_beside(origin) if (origin / "config.json").is_file() else None
    same = theirs is not None and first_difference(theirs, ours) is None
    return carry_tokenizer(origin, out) if same else []


def main(args: Arguments) -> None:
    """Export, and say how to read the result."""
    from trainer.assembly.saved_model import restore_run
    from trainer.data.hf_tokenizer import save_hf
    from trainer.models.huggingface import save

    model = restore_run(Path(args.run_dir))
    weights = save(args.out, model.spec, model.params, model.tokenizer.eot)
    others = tokenizer_of_origin(Path(args.run_dir), model.tokenizer, Path(args.out))
    others = others or save_hf(Path(args.out), model.tokenizer, model.spec.context)
    files = [
        *(path.name for path in weights),
        "config.json",
        *(path.name for path in others),
    ]
    print(f"wrote {args.out}: {', '.join(files)}")
    print(
        f"read it: transformers.AutoModelForCausalLM.from_pretrained({args.out!r}),"
        " transformers.AutoTokenizer likewise"
    )


if __name__ == "__main__":
    sys.exit(run(Arguments, "export", __doc__ or "", main))
