"""Evaluate a run's newest checkpoint in its own and other precisions, or on tasks.

    scalify-trainer evaluate run_dir=runs/mine precisions=fp32,bf16,scalify_fp8
    scalify-trainer evaluate run_dir=runs/mine text=other.txt,more.jsonl
    scalify-trainer evaluate run_dir=runs/mine tasks=last_word,word_order
    scalify-trainer evaluate run_dir=runs/mine tasks=hellaswag,my.yaml limit=500

All precisions get the same weights and batches, so they differ in the arithmetic of the
forward pass alone: the cost of FP8 in use, not in training. Weights are rounded to the
other precision's format. last_word and word_order are made of the validation text;
other tasks are lm-evaluation-harness's.
"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalify_core import weights
from trainer.assembly.saved_model import restore_training
from trainer.cli.arguments import argument, note, run, split
from trainer.config.composition import compose_config
from trainer.data import Batch, TextSource
from trainer.data.corpus import open_corpus
from trainer.data.loader import segments
from trainer.errors import UserError
from trainer.files import finite, write_text
from trainer.observe.progress import log_first_duration
from trainer.parallel.mesh import place_batch
from trainer.precision.arrays import store_weights
from trainer.precision.policy import Policy
from trainer.report.history import AS_TRAINED
from trainer.step.state import TrainState
from trainer.tasks.choose import BATCH, choose
from trainer.tasks.eval_model import EvalModel
from trainer.tasks.intervals import half_width
from trainer.tasks.offline import ITEMS, write_for_harness
from trainer.tasks.offline import TASKS as OFFLINE
from trainer.workload import TrainTask, Workload, jitted_eval_step


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("a run directory with a checkpoint")
    precisions: str = argument(
        "other precisions, with +key=value; empty: fp32, or none for tasks", ""
    )
    batches: int = argument("batches at most; 0: as many as at the end of the run", 0)
    text: str = argument(
        "files or directories of other text, separated by commas; empty: the validation"
        " part",
        "",
    )
    column: str = argument(
        "the key or column of their jsonl and parquet rows that holds the text",
        TextSource.column,
    )
    tasks: str = argument(
        f"tasks in place of a loss: {', '.join(OFFLINE)}, or lm-evaluation-harness's",
        "",
    )
    limit: int = argument(
        f"items of each task at most; 0: {ITEMS} of the first two, all of the others", 0
    )
    fewshot: int = argument(
        "examples before each item of the harness's tasks; -1: as many as the task"
        " says",
        -1,
    )
    batch: int = argument("sequences at once, in tasks", BATCH)


class Text(NamedTuple):
    """The text of an evaluation.

    Attributes:
      batch: returns the batch of a number below `batches`.
      batches: their number.
      bytes_per_token: of the text.
    """

    batch: Callable[[int], Batch]
    batches: int
    bytes_per_token: float


class Result(NamedTuple):
    """The result of a precision.

    Attributes:
      precision: its name, or AS_TRAINED.
      loss: nats per token, the mean over the batches.
      bits_per_byte: of the text.
      difference: to AS_TRAINED, nats; negative is better.
      half_width: of the 95% interval of the difference over batches; infinite for one
          batch.
    """

    precision: str
    loss: float
    bits_per_byte: float
    difference: float
    half_width: float


def main(args: Arguments) -> None:
    """Print a line for each precision, and write evaluation.json into the run."""
    if args.batches < 0:
        raise UserError(f"batches={args.batches}: expected 0 or more")
    run_dir = Path(args.run_dir)
    names = split(args.precisions) if args.precisions else ["fp32"] * (not args.tasks)
    if args.precisions and not names:
        raise UserError(
            "precisions=: expected at least one, such as precisions=fp32,bf16"
        )
    policies = {name: policy_of(name) for name in names}
    if args.tasks and not split(args.tasks):
        raise UserError(
            "tasks=: expected at least one, such as tasks=last_word,word_order"
        )
    if args.tasks:
        return evaluate_tasks(args, policies)
    c, w, restored = restore_training(run_dir)
    others = {name: w.task.in_precision(policy) for name, policy in policies.items()}
    most = args.batches or c.train.final_eval_batches
    if args.text:
        source = TextSource(tuple(split(args.text)), None, args.column)
        text = other_text(source, Path(c.data.cache_dir or run_dir), w, most)
    else:
        text = Text(
            w.data.val.batch,
            min(most, w.data.val.steps_per_epoch),
            w.data.bytes_per_token,
        )
    size = text.batches * w.data.val.batch_size * w.model.spec.context
    where = f"; {args.text}" if args.text else ""
    print(
        f"{run_dir}: {c.precision.name}, step {restored.step:,}{where}; {text.batches}"
        f" batches, {size:,} tokens",
        flush=True,
    )
    print(
        f"{'precision':<32} {'loss':>8} {'bits a byte':>12} {'difference, nats':>20}"
        f" {'in %':>8}"
    )
    results = []
    accum = c.train.grad_accum_steps
    for result in evaluate(w.task, restored.state, others, text, accum):
        results.append(result)
        print(table_row(result, results[0].loss), flush=True)
    for name, other in others.items():
        if other.model.policy.forward and not other.model.narrow:
            why = next(iter(other.model.skipped.values()))
            print(
                f"{name}: none of the model's matmuls is in"
                f" {other.model.policy.forward}: {why}"
            )
    # The report only reads evaluation.json.
    path = run_dir / ("evaluation_of_text.json" if args.text else "evaluation.json")
    rows = [finite(result._asdict()) for result in results]
    document: dict[str, Any] = {"step": restored.step, "tokens": size, "results": rows}
    if args.text:
        document["text"] = args.text
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    print(f"all digits: {path}")


def evaluate_tasks(args: Arguments, policies: Mapping[str, Policy]) -> None:
    """Print a line for each metric of each task, and write tasks.json into the run."""
    for name, least in (("limit", 0), ("fewshot", -1), ("batch", 1)):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)}: expected {least} or more")
    if args.text:
        raise UserError(
            "tasks and text: give one of them; the tasks of this package are made of"
            " the validation text"
        )
    c, w, restored = restore_training(Path(args.run_dir))
    fewshot = None if args.fewshot < 0 else args.fewshot
    tasks = choose(
        split(args.tasks), w.data.beginning, limit=args.limit or None, fewshot=fewshot
    )
    print(
        f"{args.run_dir}: {c.precision.name}, step {restored.step:,};"
        f" {', '.join(split(args.tasks))}",
        flush=True,
    )
    print(f"{'precision':<32} {'task':<24} {'metric':<20} {'value':>10}")
    results = []
    for name, policy in {AS_TRAINED: w.model.policy, **policies}.items():
        task, state = w.task, restored.state
        if name != AS_TRAINED:
            task = task.in_precision(policy)
            state = replace(
                state,
                params=store_weights(weights.wide(state.params), policy),
                scaling=(),
            )
        eval_model = EvalModel(task, w.data.tokenizer, args.batch).at(
            state.params, state.scaling
        )
        scores = tasks.scores(eval_model)
        rows: dict[str, dict[str, Any]] = {}
        for task_name, metrics in scores.items():
            rows[task_name] = {}
            for metric, score in metrics.items():
                error = f" ± {score.error:.4f}" if math.isfinite(score.error) else ""
                print(
                    f"{name:<32} {task_name:<24} {metric:<20} {score.value:>10.4f}"
                    f"{error}",
                    flush=True,
                )
                rows[task_name][metric] = finite(score._asdict())
        results.append({"precision": name, "tasks": rows})
    folder = Path(args.run_dir) / "tasks"
    files = [
        write_for_harness(name, items, folder) for name, items in tasks.items.items()
    ]
    path = Path(args.run_dir) / "tasks.json"
    document = {
        "step": restored.step,
        "limit": args.limit,
        "fewshot": fewshot,
        "results": results,
    }
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    print(f"all digits: {path}")
    if files:
        same = f"--include_path {folder} --tasks {','.join(tasks.items)}"
        print(
            "the same for an export: lm_eval --model hf --model_args pretrained=EXPORT"
            f" {same}"
        )


def policy_of(item: str) -> Policy:
    """Return the policy of a preset with `+precision.key=value` overrides.

    Raises:
      UserError: an override of something else, or scales that only training has.
    """
    name, *changes = item.split("+")
    for change in changes:
        if not change.startswith("precision."):
            raise UserError(
                f"{item}: {change} does not belong to the precision; expected"
                " +precision.key=value"
            )
    if "=" in name:
        raise UserError(f"{item}: expected the name of a precision first, such as bf16")
    c = compose_config([f"precision={name}", *changes]).precision
    if c.method.has_history:
        raise UserError(
            f"{item}: its scales come from a history that only training writes; valid:"
            " any other scaling"
        )
    return c.policy


def other_text(source: TextSource, cache_dir: Path, w: Workload, most: int) -> Text:
    """Return at most `most` batches of consecutive windows of a text.

    Raises:
      UserError: files that cannot be read, or too little text for one batch.
    """
    tokenizer, loader, context = w.data.tokenizer, w.data.val, w.model.spec.context
    wanted = most * loader.batch_size * context + 1
    corpus = open_corpus(source, cache_dir)
    arrays: list[Any] = []
    tokens = size = 0
    for text in itertools.chain.from_iterable(rows.texts for rows in corpus.read(None)):
        ids = tokenizer.encode_array(text)
        ends = np.full(int(corpus.length is None), tokenizer.eot, ids.dtype)
        arrays += [ids, ends]
        tokens, size = tokens + len(ids) + len(ends), size + len(text.encode())
        if tokens >= wanted:
            break
    count = min(most, (tokens - 1) // (loader.batch_size * context))
    if count < 1:
        raise UserError(
            f"text: {tokens:,} tokens, one batch needs"
            f" {loader.batch_size * context + 1:,} (train.batch_tokens + 1); give more"
            " text"
        )
    stream = np.concatenate(arrays).astype(np.int32)
    starts = context * np.arange(count * loader.batch_size)
    starts_NxBx1 = starts.reshape(count, loader.batch_size, 1)
    windows = stream[starts_NxBx1 + np.arange(context + 1)]

    def batch(i: int) -> Batch:
        if not loader.document_mask:
            return Batch(windows[i], None)
        return Batch(windows[i], segments(windows[i], tokenizer.eot))

    return Text(batch, count, size / tokens)


def evaluate(
    task: TrainTask,
    state: TrainState,
    others: Mapping[str, TrainTask],
    text: Text,
    accum: int,
) -> Iterator[Result]:
    """Yield the result of the run's own precision, then those of the others.

    Each batch has `accum` micro-batches.
    """
    reference = losses(task, state, text, accum)
    yield result_of(text, AS_TRAINED, reference, reference)
    for name, other in others.items():
        params = store_weights(weights.wide(state.params), other.model.policy)
        stored = replace(state, params=params, scaling=())
        yield result_of(text, name, losses(other, stored, text, accum), reference)


def losses(task: TrainTask, state: TrainState, text: Text, accum: int) -> list[float]:
    """Return the mean loss of each batch."""
    place = functools.partial(place_batch, accum=accum, mesh=task.mesh)
    step = log_first_duration(jitted_eval_step(task), "compiling the evaluation", note)
    return [float(step(state, place(text.batch(i)))) for i in range(text.batches)]


def result_of(
    text: Text, name: str, losses: Sequence[float], reference: Sequence[float]
) -> Result:
    """Return the result of a precision by its losses and those of the run's own."""
    loss = statistics.fmean(losses)
    differences = [loss - base for loss, base in zip(losses, reference, strict=True)]
    bits = loss / math.log(2) / text.bytes_per_token
    mean = statistics.fmean(differences)
    return Result(name, loss, bits, mean, half_width(differences))


def table_row(result: Result, reference: float) -> str:
    """Return a row of the table; `reference` is the loss of the run's precision."""
    text = f"{result.precision:<32} {result.loss:>8.4f} {result.bits_per_byte:>12.4f}"
    if result.precision == AS_TRAINED:
        return text
    interval = f" ± {result.half_width:.4f}" if math.isfinite(result.half_width) else ""
    return (
        f"{text} {f'{result.difference:+.4f}{interval}':>20}"
        f" {100 * result.difference / reference:>+8.2f}"
    )


def command(argv: Sequence[str]) -> int:
    """Run with the arguments, and return the exit code."""
    return run(Arguments, "scalify-trainer evaluate", __doc__ or "", main, argv)
