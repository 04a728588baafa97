"""Evaluate a run's weights in its own and other precisions, or on tasks.

    scalify-trainer evaluate run_dir=runs/mine precisions=fp32,bf16,scalify_fp8
    scalify-trainer evaluate run_dir=runs/mine text=other.txt,more.jsonl
    scalify-trainer evaluate run_dir=runs/mine tasks=last_word,word_order
    scalify-trainer evaluate run_dir=runs/mine tasks=hellaswag,my.yaml limit=500
    scalify-trainer evaluate run_dir=runs/mine step=best

All precisions get the same weights and batches, so they differ in the arithmetic of the
forward pass alone. This is the cost of FP8 at inference, not in training. Weights are
rounded to the other precision's format. last_word and word_order are made of the
validation text; other tasks are lm-evaluation-harness's.
"""

import glob
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.bounds import MAX_SEQUENCES
from trainer.cli.arguments import STEP_HELP, argument, check_at_least, split
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.files import write_json
from trainer.precision.policy import Policy
from trainer.text import show

if TYPE_CHECKING:
    from trainer.assembly.build import Workload
    from trainer.assembly.evaluation import EvalBatches, PrecisionResult
    from trainer.tasks.offline import Score


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("a run directory with a checkpoint")
    precisions: str = argument(
        "precisions to compare, separated by commas; +precision.key=value changes a"
        " key; empty: fp32, or none for tasks",
        "",
    )
    batches: int = argument(
        "maximum number of batches; 0: as many as at the end of the run", 0
    )
    text: str = argument(
        "files or directories of other text, separated by commas; empty: the validation"
        " part",
        "",
    )
    column: str = argument(
        "the key or column of jsonl and parquet files in text= that holds the text",
        "text",
    )
    tasks: str = argument(
        "tasks in place of a loss, separated by commas: last_word, word_order, or"
        " lm-evaluation-harness's (extra lm-eval)",
        "",
    )
    limit: int = argument(
        "maximum number of items of each task; 0: 200 of last_word and word_order, and"
        " all of other tasks",
        0,
    )
    fewshot: int = argument(
        "examples before each item of the harness's tasks; -1: the task's default",
        -1,
    )
    batch: int = argument("sequences that are scored at once, in tasks", 16)
    step: str = argument(STEP_HELP, "newest")


def main(args: Arguments) -> None:
    """Print a line for each precision, and write evaluation.json into the run."""
    check_at_least(args, batches=0)
    names = names_in("precisions", args.precisions, "fp32,bf16")
    tasks = names_in("tasks", args.tasks, "last_word,word_order")
    if not names and not tasks:
        names = ["fp32"]
    # A wrong name is answered before the run is loaded.
    policies = {name: policy_of(name) for name in names}
    if tasks:
        print_tasks(args, policies, tasks)
    else:
        print_losses(args, policies)


def names_in(key: str, text: str, example: str) -> list[str]:
    """Return the names in the value of a key; UserError for commas alone."""
    names = split(text)
    if text and not names:
        raise UserError(f"{key}={text}: expected a name, such as {key}={example}")
    return names


def print_losses(args: Arguments, policies: Mapping[str, Policy]) -> None:
    """Print the loss in each precision, and write evaluation.json into the run."""
    from trainer.assembly.evaluation import evaluate
    from trainer.assembly.saved_model import restore_training

    run_dir = Path(args.run_dir)
    config, workload, restored = restore_training(run_dir, args.step)
    # The mesh and the kernels of the run, so that the precision alone differs.
    train_tasks = {
        name: workload.task.in_precision(policy) for name, policy in policies.items()
    }
    # As many as in the run, so that its last validation loss is reproduced.
    max_batches = args.batches or config.train.final_eval_batches
    batches = batches_of(args, workload, max_batches)
    sequences = batches.n_batches * workload.data.val.batch_size
    tokens = sequences * workload.model.spec.context
    text = f"; {args.text}" if args.text else ""
    show(
        f"{run_dir}: {config.precision.name}, step {restored.step:,}{text};"
        f" {describe_batches(batches, tokens, max_batches)}"
    )
    show(
        f"{'precision':<32} {'loss':>8} {'bits/byte':>12} {'difference, nats':>20}"
        f" {'in %':>8}"
    )
    results = []
    accum = config.train.grad_accum_steps
    for result in evaluate(workload.task, restored.state, train_tasks, batches, accum):
        # Printed one by one: each precision is compiled, which takes a while.
        results.append(result)
        show(table_row(result, results[0].loss))
    for name, train_task in train_tasks.items():
        model = train_task.model
        # Such a row equals wide arithmetic, and would pass for a lossless FP8.
        if model.policy.forward and not model.narrow:
            why = next(iter(model.skipped.values()))
            show(
                f"{name}: none of the model's matmuls is in {model.policy.forward}:"
                f" {why}"
            )
    # The report shows evaluation.json as the run's, so other text has its own file.
    path = run_dir / ("evaluation_of_text.json" if args.text else "evaluation.json")
    rows = [result._asdict() for result in results]
    document: dict[str, Any] = {
        "step": restored.step,
        "tokens": tokens,
        "results": rows,
    }
    if args.text:
        document["text"] = args.text
    # Rounded figures of the table would hide differences between precisions.
    write_json(path, document)
    show(f"all digits: {path}")


def batches_of(
    args: Arguments, workload: "Workload", max_batches: int
) -> "EvalBatches":
    """Return at most `max_batches` batches of `text=`, or of the validation part."""
    from trainer.assembly.evaluation import source_text, validation_text
    from trainer.assembly.saved_model import own_cache
    from trainer.data import TextSource

    if not args.text:
        return validation_text(workload, max_batches)
    # In the user's cache: a run's directory or cache may be read by somebody else.
    source = TextSource(tuple(split(args.text)), None, args.column)
    return source_text(source, own_cache(), workload, max_batches)


def describe_batches(batches: "EvalBatches", tokens: int, max_batches: int) -> str:
    """Describe how much text is read, and why the rest is not."""
    noun = "batch" if batches.n_batches == 1 else "batches"
    if batches.left_out is None:
        unread = f"text after batches={max_batches} is not read"
    else:
        unread = f"{batches.left_out:,} tokens after them, less than a batch, left out"
    return f"{batches.n_batches} {noun}, {tokens:,} tokens; {unread}"


def print_tasks(
    args: Arguments, policies: Mapping[str, Policy], names: Sequence[str]
) -> None:
    """Print a line for each metric of each task, and write tasks.json into the run."""
    # Not in `main`: without tasks these arguments are not read.
    check_at_least(args, limit=0, fewshot=-1, batch=1)
    # More sequences at once are not faster, and would end in XLA's traceback about
    # memory.
    if args.batch > MAX_SEQUENCES:
        raise UserError(f"batch={args.batch}: expected at most {MAX_SEQUENCES}")
    # Other text has no tasks: they are made of what the run did not train on.
    if args.text:
        raise UserError(
            "tasks and text: give one of them; the tasks of this package are made of"
            " the validation text"
        )
    from trainer.assembly.evaluation import evaluate_tasks
    from trainer.assembly.saved_model import restore_training
    from trainer.tasks.choose import choose_tasks
    from trainer.tasks.offline import write_for_harness

    run_dir = Path(args.run_dir)
    config, workload, restored = restore_training(run_dir, args.step)
    # 0 asks for no examples, so another number stands for the default.
    fewshot = None if args.fewshot < 0 else args.fewshot
    tasks = choose_tasks(
        names,
        workload.data.first_documents,
        limit=args.limit or None,
        fewshot=fewshot,
    )
    show(
        f"{run_dir}: {config.precision.name}, step {restored.step:,};"
        f" {', '.join(names)}",
    )
    show(f"{'precision':<32} {'task':<24} {'metric':<20} {'value':>10}")
    results = []
    for name, scores in evaluate_tasks(
        workload, restored.state, policies, tasks, args.batch
    ):
        results.append({"precision": name, "tasks": show_scores(name, scores)})
    folder = run_dir / "tasks"
    # Our own tasks are made of this run's text; as files the harness scores an export
    # on the same items.
    files = [
        write_for_harness(name, items, folder) for name, items in tasks.items.items()
    ]
    path = run_dir / "tasks.json"
    document = {
        "step": restored.step,
        "limit": args.limit,
        "fewshot": fewshot,
        "results": results,
    }
    write_json(path, document)
    show(f"all digits: {path}")
    if files:
        show(harness_command(files))


def show_scores(
    precision: str, scores: "Mapping[str, Mapping[str, Score]]"
) -> dict[str, dict[str, Any]]:
    """Print a line for each metric of each task, and return the scores for JSON."""
    rows: dict[str, dict[str, Any]] = {}
    for task, metrics in scores.items():
        rows[task] = {}
        for metric, score in metrics.items():
            # Too few items have no standard error.
            error = f" ± {score.error:.4f}" if math.isfinite(score.error) else ""
            show(f"{precision:<32} {task:<24} {metric:<20} {score.value:>10.4f}{error}")
            rows[task][metric] = score._asdict()
    return rows


def harness_command(files: Sequence[Path]) -> str:
    """Return a line with the command by which the harness runs these YAML files.

    `--include_path` would load every file of the folder. A run directory that somebody
    else made may hold a task of the harness there, and a task may run Python. So the
    files are named by `--tasks`, which takes globs, separated by commas.
    """
    if any("," in str(file) for file in files):
        return (
            f"lm_eval cannot read {files[0].parent}: it splits its arguments at"
            " commas; rename the directory to run these tasks there"
        )
    # The harness takes globs: a directory's name may hold * or [.
    names = ",".join(glob.escape(str(file)) for file in files)
    return (
        "the same for an export: lm_eval --model hf --model_args pretrained=EXPORT"
        f" --tasks {shlex.quote(names)}"
    )


def policy_of(item: str) -> Policy:
    """Return the policy of a preset with `+precision.key=value` overrides.

    Raises:
      UserError: an override that is not of the precision, or a precision whose scales
          only training has.
    """
    # Commas separate precisions, so changes to one need another sign.
    name, *changes = item.split("+")
    for change in changes:
        if not change.startswith("precision."):
            raise UserError(
                f"{item}: {change} does not belong to the precision; expected"
                " +precision.key=value"
            )
    # A key without + would be read as the name of a preset.
    if "=" in name:
        raise UserError(f"{item}: expected the name of a precision first, such as bf16")
    # By Hydra, so that an evaluated preset means what it means in training.
    precision = compose_config([f"precision={name}", *changes]).precision
    # The checkpoint's history is of the run's method, and is empty for another.
    if precision.method.has_history:
        raise UserError(
            f"{item}: its scales come from a history that only training writes; valid:"
            " any other scaling"
        )
    return precision.policy


def table_row(result: "PrecisionResult", reference: float) -> str:
    """Return a row of the table; `reference` is the loss of the run's precision."""
    from trainer.report.run_records import AS_TRAINED

    text = f"{result.precision:<32} {result.loss:>8.4f} {result.bits_per_byte:>12.4f}"
    if result.precision == AS_TRAINED:
        return text
    # It is infinite for one batch.
    interval = f" ± {result.half_width:.4f}" if math.isfinite(result.half_width) else ""
    return (
        f"{text} {f'{result.difference:+.4f}{interval}':>20}"
        f" {100 * result.difference / reference:>+8.2f}"
    )
