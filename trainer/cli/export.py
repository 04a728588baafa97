"""Export a run's newest checkpoint to Hugging Face's format, with its tokenizer.

scalify-trainer export run_dir=runs/mine out=exported
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.arguments import argument, run
from trainer.errors import UserError
from trainer.files import read_mapping

if TYPE_CHECKING:
    from trainer.data import Tokenizer


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    out: str = argument("directory to write to; made if absent")


def copy_original_tokenizer(run_dir: Path, ours: "Tokenizer", out: Path) -> list[Path]:
    """Copy the tokenizer of the Hugging Face directory that the run started from.

    Nothing is copied where the run started otherwise, the directory is gone, or its
    tokenizer differs from the run's.

    Returns:
      the paths of the copies.
    """
    from trainer.data.hf_tokenizer import first_difference, ids_beside
    from trainer.models.weight_files import carry_tokenizer

    try:
        init_from = read_mapping(run_dir / "config.yaml").get("init_from")
    except ValueError as error:
        raise UserError(
            f"{run_dir / 'config.yaml'} is damaged ({error}); restore it, then export"
            " again"
        ) from error
    origin = Path(init_from if isinstance(init_from, str) else "")
    theirs = ids_beside(origin) if (origin / "config.json").is_file() else None
    same = theirs is not None and first_difference(theirs, ours) is None
    return carry_tokenizer(origin, out) if same else []


def main(args: Arguments) -> None:
    """Export, and show how to load the result."""
    from trainer.assembly.saved_model import restore_run
    from trainer.data.hf_tokenizer import save_hf
    from trainer.models.huggingface import save

    model = restore_run(Path(args.run_dir))
    weights = save(args.out, model.spec, model.params, model.tokenizer.eot)
    run_dir, out = Path(args.run_dir), Path(args.out)
    others = copy_original_tokenizer(run_dir, model.tokenizer, out)
    others = others or save_hf(out, model.tokenizer, model.spec.context)
    files = [
        *(path.name for path in weights),
        "config.json",
        *(path.name for path in others),
    ]
    print(f"wrote {args.out}: {', '.join(files)}")
    print(
        f"load it: transformers.AutoModelForCausalLM.from_pretrained({args.out!r}),"
        " transformers.AutoTokenizer likewise"
    )


def command(argv: Sequence[str]) -> int:
    """Run with the arguments, and return the exit code."""
    return run(Arguments, "scalify-trainer export", __doc__ or "", main, argv)
