"""Measure what a new tokenizer and FOCUS are worth when a model changes language.

A model is trained on the source of the Python standard library with a tokenizer of that
text. It then goes on with messages that Python packages have in another language, which
are fetched for it (or with `text=`), three times for each seed: with a tokenizer of the
new text and FOCUS's rows for it, with the same tokenizer and random rows, and with the
old tokenizer, for as many steps more as it needs to see the same bytes. All three have
the same settings, at constant learning rates, so that a curve at a step is what a run
of so many steps would come to. The tokenizers know nothing of the validation parts.

Each run is `python -m trainer` in OUT/LR/ARM/SEED. Called again, with more rates or
seeds too, the study continues; after every run OUT/adaptation.json and adaptation.md
are written anew.

Reference: Dobler and de Melo 2023, FOCUS, https://arxiv.org/abs/2305.14481.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from scripts.studies import runs
from scripts.studies.adaptation_table import (
    ARMS,
    OLD,
    Curve,
    Sizes,
    markdown,
    shorter,
    table,
)
from scripts.studies.catalogues import write_texts
from scripts.studies.runs import (
    Trial,
    carry_out,
    claim,
    last_line,
    remove_checkpoints,
    write_study,
)
from trainer.cli.arguments import argument, run_script, split
from trainer.data.corpus import Corpus, TextSource, open_corpus
from trainer.data.tokenizer import get_tokenizer
from trainer.errors import UserError
from trainer.files import finite, write_atomically
from trainer.observe.records import read_rows
from trainer.run.rundir import code_version

PACKAGES = "Django==5.2.19,Weblate==5.14.3,plone.app.locales==7.0.4,pretix==2026.8.0"


@dataclass(frozen=True)
class Arguments:
    """Settings of the study; see `--help`."""

    fixed: ClassVar[tuple[str, ...]] = (
        "packages",
        "language",
        "vocab_size",
        "model",
        "base_steps",
        "base_lr",
        "steps",
        "batch_tokens",
        "evaluations",
    )

    text: str = argument(
        "files of the new text, separated by commas; empty: fetch packages", ""
    )
    packages: str = argument(
        "packages whose catalogues are the new text, as pip takes them", PACKAGES
    )
    language: str = argument("of the catalogues, as their folders are called", "de")
    vocab_size: int = argument("of both tokenizers", 2048)
    model: str = argument(
        "the model, as arguments of the trainer", "model=gpt2_nano model.n_layer=3"
    )
    base_steps: int = argument("steps of the model that is adapted", 1500)
    base_lr: float = argument("its learning rate", 4e-3)
    steps: int = argument("steps of an adaptation with the new tokenizer", 150)
    lr: str = argument(
        "learning rates of the adaptations, separated by commas", "1e-3,3e-3"
    )
    batch_tokens: int = argument("tokens per step, of all runs", 2048)
    evaluations: int = argument("validations during an adaptation, evenly spaced", 15)
    seeds: int = argument("adaptations of each kind", 4)
    first_seed: int = argument("the first of their seeds", 1)
    jobs: int = argument(
        "runs at a time; 0: only write the table of those that are finished", 1
    )
    out: str = argument("where the texts, the runs and the table go", "runs/adaptation")


VAL_FRACTION = 0.1  # of the new text and of the old one


def main(args: Arguments) -> None:
    """Make the missing texts, tokenizers, base model and adaptations."""
    rates = check(args)
    out = Path(args.out)
    claim(out, args)
    texts = args.text or str(out / "text.jsonl")
    if not args.text and not (out / "text.jsonl").exists():
        print(f"fetching {args.packages}", flush=True)
        write_texts(out / "text.jsonl", split(args.packages), args.language)
    corpus = open_corpus(TextSource(tuple(split(texts))), out / "data")
    claim_text(out, args, corpus)
    make_tokenizer(args, "old", "data=python", "max_chars=12000000")
    paths = f"data.paths=[{','.join(split(texts))}]"
    make_tokenizer(args, "new", "data=text", paths)
    sizes = sizes_of(out, corpus)
    base = out / "base"
    if not (base / "checkpoints" / str(args.base_steps)).exists():
        print(
            f"training {base}, the model that is adapted, {args.base_steps} steps",
            flush=True,
        )
        one = Trial(1.0, "base", 0)
        list(runs.in_turn({one: base_command(args)}, {one: base}, 1))
    jobs = [
        Trial(lr, arm, args.first_seed + seed)
        for lr in rates
        for seed in range(args.seeds)
        for arm in ARMS
    ]
    folders = {job: out / f"{job.lr:g}" / job.item / str(job.seed) for job in jobs}
    carry_out(
        folders,
        args.jobs,
        command=lambda job: command(args, sizes, job, texts, folders[job]),
        read=lambda job: ended(args, sizes, job, folders[job]),
        conclude=lambda job: remove_checkpoints(folders[job]),
        report=lambda curves: report(args, sizes, curves),
        describe=lambda curve: f"{curve.final:.4f} bits per byte",
    )


def check(args: Arguments) -> list[float]:
    """Return the learning rates. Raises UserError for settings out of range."""
    for name, least in (
        ("seeds", 1),
        ("evaluations", 1),
        ("jobs", 0),
        ("vocab_size", 257),
        ("base_steps", 1),
    ):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)}: expected at least {least}")
    if args.steps < 1 or args.steps % args.evaluations:
        raise UserError(
            f"steps={args.steps}: expected a multiple of evaluations={args.evaluations}"
        )
    try:
        rates = [float(text) for text in split(args.lr)]
    except ValueError:
        rates = []
    if (
        not rates
        or len(set(rates)) < len(rates)
        or not all(0 < rate < math.inf for rate in rates)
    ):
        raise UserError(
            f"lr={args.lr}: expected positive learning rates, each once, such as"
            " lr=1e-3,3e-3"
        )
    return rates


def claim_text(out: Path, args: Arguments, corpus: Corpus) -> None:
    """Check that the text is that of the directory's runs, else UserError."""
    path = out / "study.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved.setdefault("content", corpus.fingerprint) != corpus.fingerprint:
        raise UserError(
            f"text={args.text or out / 'text.jsonl'} is not the text that the runs in"
            f" out={out} are of; put that back, or choose another out"
        )
    write_atomically(path, json.dumps(saved, indent=2) + "\n")


def make_tokenizer(args: Arguments, name: str, *source: str) -> None:
    """Train a tokenizer in OUT/tokenizers, unless it is there.

    Raises:
      UserError: the training failed; the message is the script's last line.
    """
    folder = Path(args.out) / "tokenizers" / name
    if (folder / "tokenizer.json").exists():
        return
    words = [
        *source,
        f"vocab_size={args.vocab_size}",
        f"out={folder}",
        f"data.cache_dir={args.out}/data",
        f"data.val_fraction={VAL_FRACTION}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train-tokenizer", *words],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(f"the {name} tokenizer: {last_line(done.stderr)}")


def sizes_of(out: Path, corpus: Corpus) -> Sizes:
    """Count the new text's bytes, and its tokens with either tokenizer."""
    old, new = (
        get_tokenizer(str(out / "tokenizers" / name)) for name in ("old", "new")
    )
    size = old_tokens = new_tokens = 0
    for rows in corpus.read(None):
        for text in rows.texts:
            size += len(text.encode())
            old_tokens += len(old.encode(text))
            new_tokens += len(new.encode(text))
    return Sizes(size, old_tokens, new_tokens)


def common(args: Arguments, tokenizer: str, run_dir: Path) -> list[str]:
    """Return the trainer's arguments that all runs share."""
    return [
        f"data.tokenizer={args.out}/tokenizers/{tokenizer}",
        f"data.cache_dir={args.out}/data",
        f"data.val_fraction={VAL_FRACTION}",
        f"train.batch_tokens={args.batch_tokens}",
        "train.log_every=10",
        "checkpoint.every=0",
        "metrics.numerics_every=0",
        "sample.max_new_tokens=0",
        "tracker=jsonl",
        f"run_dir={run_dir}",
    ]


def base_command(args: Arguments) -> list[str]:
    """Return the command of the run whose weights are adapted."""
    words = [
        *shlex.split(args.model),
        "data=python",
        f"train.steps={args.base_steps}",
        "train.eval_every=0",
        "train.eval_batches=50",
        "train.final_eval_batches=50",
        f"optimizer.lr={args.base_lr:.9g}",
        *common(args, "old", Path(args.out) / "base"),
    ]
    return [sys.executable, "-m", "trainer", *words]


def command(
    args: Arguments, sizes: Sizes, job: Trial, texts: str, run_dir: Path
) -> list[str]:
    """Return the command of an adaptation."""
    steps = sizes.steps(job.item, args.steps, args.evaluations)
    words = [
        "model=from_init",
        f"init_from={args.out}/base",
        *([] if job.item == OLD else [f"init.embeddings={job.item}"]),
        "data=text",
        f"data.paths=[{texts}]",
        "schedule=constant",
        f"train.steps={steps}",
        f"train.eval_every={steps // args.evaluations}",
        "train.eval_batches=1000",  # the whole validation part, as at the end
        f"optimizer.lr={job.lr:.9g}",
        f"seed={job.seed}",
        *common(args, "old" if job.item == OLD else "new", run_dir),
    ]
    return [sys.executable, "-m", "trainer", *words]


def val_bits(run_dir: Path) -> dict[int, float]:
    """Return a run's validation losses (bits per byte) by step."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return {
        row["step"]: float(row["val/bits_per_byte"])
        for row in rows
        if "val/bits_per_byte" in row
    }


def ended(args: Arguments, sizes: Sizes, job: Trial, run_dir: Path) -> Curve | None:
    """Return an adaptation's curve, or None where it has not ended."""
    bits = val_bits(run_dir)
    return (
        Curve(bits)
        if sizes.steps(job.item, args.steps, args.evaluations) in bits
        else None
    )


def in_json(value: Any) -> Any:
    """Turn a figure with its interval into a list; infinities become null."""
    return (
        list(finite(dict(enumerate(value))).values())
        if isinstance(value, tuple)
        else value
    )


def report(args: Arguments, sizes: Sizes, curves: Mapping[Trial, Curve]) -> None:
    """Write the table, and what it was made from."""
    rows, sooner = table(curves), shorter(curves)
    figures = {
        "code": code_version(),
        "text": sizes._asdict(),
        "table": [{k: in_json(v) for k, v in row._asdict().items()} for row in rows],
        "shorter": {
            f"{lr:g}": {n: in_json(v) for n, v in shares.items()}
            for lr, shares in sooner.items()
        },
        "runs": [
            job._asdict() | {"bits_per_byte": curve.bits}
            for job, curve in sorted(curves.items())
        ],
    }
    about = (
        f"`{args.model}`, {args.base_steps} steps on data=python, then text of"
        f" {sizes.bytes:,} bytes; {args.batch_tokens} tokens a step; tokenizers of"
        f" {args.vocab_size} tokens."
    )
    text = markdown(about, sizes, rows, sooner)
    write_study(Path(args.out), "adaptation", args, figures, text)


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.adaptation", __doc__ or "", main))
