"""What DiLoCo costs in loss: replicas that exchange outer gradients now and then,
against one data-parallel run.

python -m scripts.studies.diloco out=runs/diloco seeds=3 steps=600 \\
    ways="outer_grad=fp8,outer_grad=fp32,outer_grad=fp8+error_feedback=false"

A way is keys of the trainer's group `diloco` with their values, joined by +, or of
another group by their whole names (`optimizer.lr=8e-3`); what it does not give is of
`parallel=diloco`. `data` is the run without replicas, and so is
`data+optimizer.lr=8e-3`. All are compared with `base`: same first weights, same
batches, same schedule, same random bits. With `warm` the first steps are those of
`data`, and each way goes on from there, as published runs do. With `sources=apart`
replicas have data of their own, consecutive parts of two texts, as the clients of
federated learning do: half of them English, half of them Python.

All replicas are computed on the first device, where they have the bits that they have
anywhere; the inner step is compiled once for all ways. A finished run is a JSON line in
OUT/runs.jsonl; called again, the study continues. OUT/table.md is written anew after
each.
"""

import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.arguments import argument, run, split
from scripts.studies import rows
from scripts.studies.pairs import half_width
from trainer.assembly.build import (
    build_batch,
    build_learning_rates,
    build_state,
    build_workload,
)
from trainer.compiled.exchange import exchanges_of
from trainer.config.composition import compose_config
from trainer.config.schema import Config
from trainer.data.corpus import EmbeddedSource, PythonSource, open_corpus
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.parallel.mesh import make_mesh, place_batch
from trainer.parallel.replicas import DiLoCoStep
from trainer.run.rundir import code_version
from trainer.step.state import TrainState, from_stored, to_stored
from trainer.step.step import Hyper, StepFn
from trainer.workload import (
    Workload,
    abstract_state,
    compile_step,
    jitted_eval_step,
    lower_exchange,
)

DATA = "data"
SOURCES = ("none", "apart")
MOST = 4_000_000  # characters of a text that is cut into parts: about the Bible
SIZES = "model.n_layer=2 model.d_model=64 model.n_head=2 model.context=64"


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    out: str = argument("where the runs and the table go", "runs/diloco")
    ways: str = argument(
        "what is compared with the base, separated by commas", "outer_grad=fp8"
    )
    base: str = argument("the way that the others are compared with", DATA)
    warm: int = argument("steps of each run that are data parallel, before all else", 0)
    sources: str = argument(
        "none, or apart: each replica has a text of its own, of the Bible or of Python",
        "none",
    )
    overrides: str = argument(
        "further arguments of the trainer for all runs, separated by spaces", SIZES
    )
    precision: str = argument("of all runs", "fp32")
    replicas: int = argument("how many train apart", 4)
    seeds: int = argument("pairs", 3)
    steps: int = argument("steps of each run", 600)
    batch_tokens: int = argument("tokens per step, of all replicas together", 2048)
    eval_batches: int = argument("batches of the validation of the last weights", 64)


class DiLoCoTrial(NamedTuple):
    """One run."""

    way: str
    seed: int


class Warm(NamedTuple):
    """What runs of a seed go on from: a stored state after so many steps; None:
    begin.
    """

    steps: int
    state: TrainState | None


class Compiled:
    """What was compiled for one way and serves others: inner steps by what they follow
    from, and the validation.
    """

    def __init__(self) -> None:
        self._steps: dict[Any, Any] = {}
        self._validations: dict[int, Any] = {}
        self._warm: tuple[int, Warm] = -1, Warm(0, None)

    def step(self, c: Config, w: Workload, state: TrainState) -> StepFn:
        """The step of a way, for the scales of a state."""
        diloco = w.task.diloco
        key = (
            diloco
            and (
                diloco.replicas,
                diloco.participants,
                diloco.participants < diloco.replicas and diloco.steps,
            ),
            jax.tree.structure(state.params),
        )
        if key not in self._steps:
            self._steps[key] = compile_step(w.task, build_batch(c, w.mesh), state)
        found = self._steps[key]
        if diloco is None or found.diloco == diloco:
            return found
        programs = [lower_exchange(w.task, i, state) for i in range(diloco.fragments)]
        return DiLoCoStep(
            found.inner, [program.compile() for program in programs], diloco
        )

    def warm(self, c: Config, seed: int, steps: int) -> Warm:
        """What the runs of a seed have in common."""
        if steps and self._warm[0] != seed:
            c = dataclasses.replace(c, seed=seed)
            w = on_first_device(c, build_workload(c))
            state = to_stored(
                steps_of(c, w, from_stored(build_state(c, w)), 0, steps, self)
            )
            self._warm = seed, Warm(steps, state)
        return self._warm[1]

    def validation(self, w: Workload) -> Any:
        """The validation on a mesh of a way."""
        key = len(w.mesh.shape)
        if key not in self._validations:
            self._validations[key] = jitted_eval_step(w.task)
        return self._validations[key]


def main(args: Arguments) -> None:
    """Run what is not finished, one seed after the other, so that pairs come early."""
    if args.sources not in SOURCES:
        raise UserError(f"sources={args.sources}; valid: {', '.join(SOURCES)}")
    jobs = [
        DiLoCoTrial(way, seed)
        for seed in range(args.seeds)
        for way in dict.fromkeys((args.base, *split(args.ways)))
    ]
    # refused now
    configs = {
        way: configuration(args, way)
        for way in (DATA, *dict.fromkeys(job.way for job in jobs))
    }
    out, compiled = Path(args.out), Compiled()
    out.mkdir(parents=True, exist_ok=True)
    keys = (
        "overrides",
        "precision",
        "replicas",
        "steps",
        "batch_tokens",
        "eval_batches",
        "warm",
        "sources",
    )
    settings = {key: getattr(args, key) for key in keys}
    # of rows that were written before a key was
    found, defaults = {}, {key: getattr(Arguments, key) for key in keys}
    for row in rows.read(out / "runs.jsonl"):
        if {
            key: row.get(key, default) for key, default in defaults.items()
        } == settings:
            found[DiLoCoTrial(row["way"], row["seed"])] = row["loss"]
    for number, job in enumerate(jobs, 1):
        if job in found:
            continue
        start = time.monotonic()
        warm = compiled.warm(configs[DATA], job.seed, args.warm)
        found[job], fewer = train(configs[job.way], job.seed, compiled, warm)
        row = (
            job._asdict()
            | settings
            | {
                "loss": found[job],
                "fewer": fewer,
                "code": code_version(),
            }
        )
        rows.append(out / "runs.jsonl", row)
        sent = "" if fewer is None else f", {fewer:.1f} times fewer bytes"
        seconds = time.monotonic() - start
        print(
            f"{number} of {len(jobs)}: {job.way}, seed {job.seed}: {found[job]:.4f}"
            f" nats{sent} ({seconds:.0f} s)",
            flush=True,
        )
        write_atomically(out / "table.md", table(args, found))
    print(table(args, found))


def configuration(args: Arguments, way: str) -> Config:
    """The trainer's configuration of a way; UserError in its words."""
    words = [
        f"precision={args.precision}",
        f"train.steps={args.steps}",
        f"train.batch_tokens={args.batch_tokens}",
    ]
    words.append(f"train.final_eval_batches={args.eval_batches}")
    own, (first, *others) = ["parallel.data=1"], way.split("+")
    if args.sources == "apart":
        paths = ",".join(
            map(str, texts_apart(Path(args.out) / "sources", args.replicas))
        )
        own += ["data=mix", f"data.sources=[{paths}]", "data.tokenizer=byte"]
        own += [] if first == DATA else ["diloco.data=sources"]
    if first == DATA:
        own += others
    else:
        own += [
            "parallel=diloco",
            f"diloco.replicas={args.replicas}",
            *map(whole_key, (first, *others)),
        ]
    return compose_config([*words, *shlex.split(args.overrides), *own])


def texts_apart(folder: Path, count: int) -> list[Path]:
    """Files of as many consecutive parts of two texts, those of the Bible before those
    of Python's library.
    """
    sources: tuple[EmbeddedSource | PythonSource, ...] = (
        EmbeddedSource(),
        PythonSource(),
    )
    paths = [
        folder / f"{['bible', 'python'][i * 2 // count]}{i}.txt" for i in range(count)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    if not all(path.exists() for path in paths):
        for kind, source in enumerate(sources):
            text = "\n".join(
                text
                for rows in open_corpus(source, folder).read(None)
                for text in rows.texts
            )[:MOST]
            mine = [path for i, path in enumerate(paths) if i * 2 // count == kind]
            for part, path in enumerate(mine):
                span = slice(
                    len(text) * part // len(mine), len(text) * (part + 1) // len(mine)
                )
                write_atomically(path, text[span])
    return paths


def whole_key(word: str) -> str:
    """A word of a way as an argument of the trainer."""
    return word if "." in word.partition("=")[0] else f"diloco.{word}"


def train(
    c: Config, seed: int, compiled: Compiled, warm: Warm
) -> tuple[float, float | None]:
    """The validation loss of the last weights (nats), and how many times fewer bytes
    were sent; None: one replica.
    """
    c = dataclasses.replace(c, seed=seed)
    w = on_first_device(c, build_workload(c))
    # Copied, as steps take over what they are given.
    stored = (
        build_state(c, w)
        if warm.state is None
        else w.task.with_replicas(jax.tree.map(jnp.copy, warm.state))
    )
    places = jax.tree.map(lambda x: x.sharding, abstract_state(w.task))
    state = steps_of(
        c,
        w,
        from_stored(jax.device_put(stored, places)),
        warm.steps,
        c.train.steps,
        compiled,
    )
    validation = compiled.validation(w)
    losses = [float(validation(state, tokens)) for tokens in batches(c, w)]
    return statistics.fmean(losses), (
        exchanges_of(w.task).fewer
        if w.task.diloco and w.task.diloco.replicas > 1
        else None
    )


def steps_of(
    c: Config, w: Workload, state: TrainState, start: int, end: int, compiled: Compiled
) -> TrainState:
    """The state after the steps from `start` on, before `end`."""
    step, rates = compiled.step(c, w, state), build_learning_rates(c)
    for i in range(start, end):
        tokens = place_batch(
            w.data.train.batch(i), accum=c.train.grad_accum_steps, mesh=w.mesh
        )
        state, metrics = step(
            state, tokens, Hyper(rates[i], np.int32(i), np.uint32(c.seed))
        )
        if i % 8 == 0:  # not all batches at once in flight
            jax.block_until_ready(metrics)
    return state


def on_first_device(c: Config, w: Workload) -> Workload:
    """The workload with all its replicas on one device."""
    mesh = make_mesh(1, replicas=c.diloco.replicas, devices=jax.devices()[:1])
    return w._replace(task=w.task._replace(mesh=mesh))


def batches(c: Config, w: Workload) -> Iterator[Any]:
    """The batches of the validation."""
    for i in range(min(w.data.val.steps_per_epoch, c.train.final_eval_batches)):
        yield place_batch(
            w.data.val.batch(i), accum=c.train.grad_accum_steps, mesh=w.mesh
        )


def table(args: Arguments, found: dict[DiLoCoTrial, float]) -> str:
    """A row for each way: the mean of its losses and of its differences to the base,
    with 95% intervals.
    """
    lines = [
        (
            f"{args.replicas} replicas, {args.precision}, {args.overrides};"
            f" {args.steps} steps of {args.batch_tokens} tokens, {args.warm} of them"
            f" data parallel; validation loss in nats, differences to `{args.base}` of"
            " the same seed with 95% intervals."
        ),
        "",
        "| way | seeds | loss | difference, % |",
        "|---|---|---|---|",
    ]
    for way in dict.fromkeys(job.way for job in found):
        losses = {job.seed: loss for job, loss in found.items() if job.way == way}
        pairs = [
            100 * (loss / found[DiLoCoTrial(args.base, s)] - 1)
            for s, loss in losses.items()
            if DiLoCoTrial(args.base, s) in found
        ]
        shown = (
            "-"
            if way == args.base or not pairs
            else f"{statistics.fmean(pairs):+.2f} ± {half_width(pairs):.2f}"
        )
        lines.append(
            f"| {way} | {len(losses)} | {statistics.fmean(losses.values()):.4f} |"
            f" {shown} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(run(Arguments, "studies.diloco", __doc__ or "", main))
