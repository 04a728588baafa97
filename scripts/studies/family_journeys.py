"""Take tiny weights of families through a tokenizer and training, and back out.

    python -m scripts.studies.family_journeys out=tests/data/journeys \\
        python=ENVIRONMENT/bin/python

For each family: weights of tests/data/families get another tokenizer
(`init.embeddings=mean`), are trained in the flagship until they know a rhyme, and are
exported. The other interpreter, which has PyTorch and transformers, reads the export,
tokenizer included, and continues prompts greedily. Written are the export, and the
texts with the least margin of the likeliest token over the next, for the tests.
"""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli import commands
from trainer.cli.arguments import argument, run_script
from trainer.cli.train import main as train
from trainer.errors import UserError

DATA = Path(__file__).parents[2] / "tests" / "data"
# families, by the weights that they begin with
WEIGHTS = {"mistral": "mistral_window", "qwen3": "qwen3", "smollm3": "smollm3"}
RHYME = (
    "the fat cat sat on the red mat\nold dogs ran to the wet log\n"
    "a wise hen slept in her pen\n"
)
PROMPTS = ("the fat cat", "old dogs", "a wise hen")
NEW_TOKENS = 12
END = "<|endoftext|>"
TOKENIZER = ["vocab_size=280", "out=swapped"]
TRAINING = [
    "model=from_init", "init_from=given", "init.embeddings=mean",
    "data.tokenizer=swapped", "precision=scalify_fp8_fp16", "train.steps=200",
    "train.batch_tokens=256", "optimizer.lr=1e-2", "train.eval_every=0",
    "train.eval_batches=1", "train.final_eval_batches=1", "checkpoint.every=0",
    "sample.max_new_tokens=0", "metrics.numerics_every=0", "tracker=none",
    "parallel.data=1", "run_dir=run",
]  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Settings of the journeys; see `--help`."""

    out: str = argument("directory to write to, a directory for each family")
    python: str = argument(
        "an interpreter that has torch and transformers", sys.executable
    )


def main(args: Arguments) -> None:
    """Make all journeys, and write what the tests compare."""
    out = Path(args.out).absolute()
    for family in WEIGHTS:
        with tempfile.TemporaryDirectory() as scratch:
            ours = journey(Path(scratch), family)
            document = in_transformers(args.python, Path(scratch, "exported"))
            texts, margin = document["texts"], document["margin"]
            print(f"{family}: margin {margin:.3f}, {ours == texts=}: {texts}")
            target = out / family
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for name in ("config.json", "model.safetensors"):
                shutil.copy(Path(scratch, "exported", name), target)
        (target / "greedy.json").write_text(json.dumps(document, indent=1) + "\n")


def in_transformers(python: str, exported: Path) -> dict[str, Any]:
    """Return what transformers makes of an export; see `in_transformers.py`."""
    script = Path(__file__).with_name("in_transformers.py")
    done = subprocess.run(
        [python, script, exported, str(NEW_TOKENS), *PROMPTS],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise UserError(f"python={python} needs torch and transformers, see above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def journey(folder: Path, family: str) -> list[str]:
    """Train a family's weights in `folder`, export them to its directory `exported`.

    Returns:
      the run's greedy texts, of each of `PROMPTS`.
    """
    given = folder / "given"
    shutil.copytree(DATA / "families" / WEIGHTS[family], given)
    (given / "tokenizer.json").write_text(json.dumps(letters(given)))
    (folder / "rhyme.txt").write_text(RHYME * 200)
    data = ["data=text", "data.paths=[rhyme.txt]"]
    with contextlib.chdir(folder):
        tokenizer = ("train-tokenizer", [*TOKENIZER, *data])
        if (
            commands.run(*tokenizer)
            or train([*TRAINING, *data])
            or commands.run("export", ["run_dir=run", "out=exported"])
        ):
            raise RuntimeError(f"{family}: a command ended with an error")
        return [greedy(prompt) for prompt in PROMPTS]


def letters(weights: Path) -> dict[str, object]:
    """Return a tokenizer.json of single characters, one for each row of weights."""
    rows = json.loads((weights / "config.json").read_text())["vocab_size"]
    characters = ["Ġ", *map(chr, range(ord("."), ord(".") + rows - 2))]
    ids = {token: i for i, token in enumerate([*characters, END])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    end = {"id": rows - 1, "content": END, "special": True, "single_word": False}
    end |= {"lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    }


def greedy(prompt: str) -> str:
    """Return the run's likeliest text after a prompt, prompt included."""
    printed = io.StringIO()
    arguments = [f"prompt={prompt}", f"max_new_tokens={NEW_TOKENS}", "temperature=0"]
    with contextlib.redirect_stdout(printed):
        commands.run("generate", ["run_dir=run", *arguments])
    return printed.getvalue().removesuffix("\n")


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.family_journeys", __doc__ or "", main))
