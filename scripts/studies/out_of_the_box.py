"""Compare FP8 training with FP32 on models that nobody prepared, in paired runs.

    python -m scripts.studies.out_of_the_box out=runs/box seeds=4 \\
        models=llama_fan_in:4,llama_fan_in:16,vit:4,encoder_pre_ln:4

Both runs of a pair have the same initial weights and batches. The models are those of
the zoo, `name:depth`: plain JAX and Flax, in which nothing is rescaled by hand. `fp32`
is an ordinary step. `fp8` has FP8 matmuls, FP16 weights with scales and FP16 moments:
`scalify` takes the gradient, and `scaled_state` and `apply_updates` store narrow
values. `amax` is `fp32` with FP8 matmuls at the best scales, those of the largest
magnitudes, without scalify: the error of rounding to FP8 alone. A finished run is a
JSON line in OUT/runs.jsonl; called again, the study continues. OUT/table.md is written
anew after each.
"""

import functools
import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scalify_core as sc
from scripts.studies import rows
from trainer.cli.arguments import argument, run_script, split
from trainer.data.corpus import embedded_corpus
from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.run.environment import code_version
from trainer.tasks.intervals import half_width
from trainer.text import nearest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # where `zoo` is

from zoo import BUILDERS
from zoo.flax_models import TIME
from zoo.llama import VOCAB

WAYS = "fp32", "fp8", "amax"
Batch = Any
LETTERS = "\n !'(),-.:;?abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Arguments:
    """Settings of the study; see `--help`."""

    out: str = argument("where the runs and the table go", "runs/out_of_the_box")
    models: str = argument(
        "name:depth, separated by commas",
        "llama_fan_in:4,llama_fan_in:16,vit:4,encoder_pre_ln:4",
    )
    ways: str = argument(
        f"of {', '.join(WAYS)}; fp32, with which others are compared, is always run",
        "fp32,fp8",
    )
    seeds: int = argument("pairs", 4)
    first_seed: int = argument("the first of the seeds, which follow one another", 0)
    steps: int = argument("steps of each run", 300)
    width: int = argument("of the models", 32)
    batch: int = argument("sequences of 64 letters of a step", 8)
    lr: float = argument("the peak of the learning rate", 3e-3)
    last: int = argument("steps whose losses a final loss is the mean of", 20)
    seconds: int = argument("no run is begun after so many; 0: all are", 0)


class ZooTrial(NamedTuple):
    """One run: a model, a seed and a way."""

    model: str
    seed: int
    way: str


def main(args: Arguments) -> None:
    """Run what is not finished, one seed after the other, so that pairs come early."""
    jobs = jobs_of(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    lines, start = out / "runs.jsonl", time.monotonic()
    settings = {
        key: getattr(args, key) for key in ("steps", "width", "batch", "lr", "last")
    }
    finals = {}
    for row in rows.read(lines):
        if {key: row[key] for key in settings} == settings:
            finals[ZooTrial(row["model"], row["seed"], row["way"])] = (
                math.inf if row["final"] is None else row["final"]
            )
    for number, job in enumerate(jobs, 1):
        if job in finals or (args.seconds and time.monotonic() - start > args.seconds):
            continue
        began = time.monotonic()
        losses = train(job, args)
        final = statistics.fmean(losses[-args.last :])
        finals[job] = final if math.isfinite(final) else math.inf
        row = (
            job._asdict()
            | settings
            | {
                "final": final if math.isfinite(final) else None,
                "code": code_version(),
            }
        )
        curve = [
            round(x, 5) if math.isfinite(x) else None
            for x in losses[:: max(1, args.steps // 30)]
        ]
        rows.append(lines, row | {"curve": curve})
        seconds = time.monotonic() - began
        print(
            f"{number} of {len(jobs)}: {job.model}, seed {job.seed}, {job.way}:"
            f" {final:.4f} ({seconds:.0f} s)",
            flush=True,
        )
        write_atomically(out / "table.md", markdown(args, finals))
    print(markdown(args, finals))


def jobs_of(args: Arguments) -> list[ZooTrial]:
    """Return every run, seeds outermost. UserError for an unknown model."""
    models = split(args.models)
    valid = [name for name in TASKS if name in BUILDERS]
    for model in models:
        name, _, depth = model.partition(":")
        if name not in valid:
            raise UserError(
                f"models={args.models}: unknown {name}; {nearest(name, valid)}"
            )
        if not depth.isdecimal() or not int(depth):
            raise UserError(
                f"models={args.models}: expected name:depth, such as {name}:4"
            )
    ways = dict.fromkeys(("fp32", *split(args.ways)))
    for way in ways:
        if way not in WAYS:
            raise UserError(
                f"ways={args.ways}: unknown {way}; {nearest(way, list(WAYS))}"
            )
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return [
        ZooTrial(model, seed, way) for seed in seeds for model in models for way in ways
    ]


def train(job: ZooTrial, args: Arguments) -> list[float]:
    """Train; return the losses of all steps (nats)."""
    name, _, depth = job.model.partition(":")
    best = sc.ops.matmul.Fp8DotGeneral(current_scaling=True)
    products: dict[str, dict[str, Any]] = {
        "fp8": {"dot_general": sc.fp8_dot_general},
        "amax": {"dot_general": best},
    }
    given = products.get(job.way, {})
    case = BUILDERS[name](depth=int(depth), width=args.width, seed=job.seed, **given)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.lr, args.steps // 10, args.steps, args.lr / 10
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )
    step, params, state = (fp8 if job.way == "fp8" else fp32)(
        case.loss, case.params, tx, job.seed
    )
    losses = []
    with warnings.catch_warnings():
        # what has no rule is said while tracing; here the loss is what counts
        warnings.simplefilter("ignore")
        for number, batch in enumerate(
            itertools.islice(TASKS[name](job.seed, args.batch), args.steps)
        ):
            params, state, loss = step(params, state, jnp.int32(number), batch)
            losses.append(loss)
    return [float(x) for x in losses]


def fp32(
    loss: Callable, params: Any, tx: optax.GradientTransformation, seed: int
) -> tuple[Callable, Any, Any]:
    """Return the step of plain JAX, the weights and the optimizer's state."""

    def step(
        params: Any, state: Any, number: jax.Array, batch: Batch
    ) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step), params, tx.init(params)


def fp8(
    loss: Callable, params: Any, tx: optax.GradientTransformation, seed: int
) -> tuple[Callable, Any, Any]:
    """Return the same with narrow weights and moments; `loss` has FP8 matmuls."""
    tx = sc.optim.scaled_state(tx, mu=jnp.float16, nu=jnp.float16, seed=seed)
    params = sc.weights.scaled_params(params, jnp.float16)
    gradient = sc.scalify(jax.value_and_grad(loss))

    def step(
        params: Any, state: Any, number: jax.Array, batch: Batch
    ) -> tuple[Any, Any, jax.Array]:
        value, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        params = sc.weights.apply_updates(
            params, updates, rounding="stochastic", seed=seed, step=number
        )
        return params, state, sc.asarray(value)

    return jax.jit(step), params, tx.init(params)


@functools.cache
def letters() -> np.ndarray:
    """Return the embedded corpus as int32 ids below 64.

    Small letters and punctuation have ids of their own; all others share one.
    """
    assert len(LETTERS) < VOCAB
    text = next(embedded_corpus().read(None)).texts[0][: 1 << 20].lower()
    ids = np.full(256, len(LETTERS), np.int32)
    ids[np.frombuffer(LETTERS.encode("latin-1"), np.uint8)] = np.arange(len(LETTERS))
    return ids[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def excerpts(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Return excerpts of the corpus at random places, `[count, length]`."""
    ids = letters()
    start = rng.integers(0, len(ids) - length, count)
    return ids[start[:, None] + np.arange(length)]


def next_letters(seed: int, count: int) -> Iterator[Batch]:
    """Yield batches for a decoder: 64 letters, each predicted from those before it."""
    rng = np.random.default_rng(seed)
    while True:
        yield excerpts(rng, count, 65)


def hidden_letters(seed: int, count: int) -> Iterator[Batch]:
    """Yield batches for an encoder: letters that occur twice, a quarter masked in one
    place.
    """
    rng = np.random.default_rng(seed)
    while True:
        ids = np.tile(excerpts(rng, 4 * count, TIME // 2), 2)
        yield {"ids": ids, "mask": (rng.random(ids.shape) < 0.25).astype(np.float32)}


def gratings(seed: int, count: int) -> Iterator[Batch]:
    """Yield images of ten classes: waves of five directions and two lengths, at any
    phase, beneath noise.
    """
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:16, :16] / 16
    while True:
        label = rng.integers(0, 10, 4 * count)
        angle, waves = np.pi * (label % 5) / 5, 2.0 + 2.0 * (label // 5)
        place = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
        wave = np.sin(
            2 * np.pi * waves[:, None, None] * place
            + rng.uniform(0, 6.28, (len(label), 1, 1))
        )
        image = wave[..., None] * rng.uniform(
            0.3, 1, (len(label), 1, 1, 3)
        ) + rng.normal(size=(len(label), 16, 16, 3))
        yield {"image": image.astype(np.float32), "label": label.astype(np.int32)}


TASKS: dict[str, Callable[[int, int], Iterator[Batch]]] = {
    "llama": next_letters,
    "llama_fan_in": next_letters,
    "encoder_pre_ln": hidden_letters,
    "encoder_post_ln": hidden_letters,
    "vit": gratings,
}


def markdown(args: Arguments, finals: dict[ZooTrial, float]) -> str:
    """Format mean paired differences in percent of FP32's loss, with 95% intervals."""
    head = [
        "model",
        "way",
        "pairs",
        "diverged",
        "fp32, nats",
        "its, nats",
        "difference, %",
        "at most, %",
    ]
    body = []
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for model, way in itertools.product(
        split(args.models), dict.fromkeys(split(args.ways))
    ):
        if way == "fp32":
            continue
        pairs = [
            (
                finals.get(ZooTrial(model, s, "fp32")),
                finals.get(ZooTrial(model, s, way)),
            )
            for s in seeds
        ]
        done = [(a, b) for a, b in pairs if a is not None and b is not None]
        finite = [(a, b) for a, b in done if math.isfinite(a) and math.isfinite(b)]
        if not finite:
            body.append([model, way, "0", str(len(done)), *["-"] * 4])
            continue
        base, ours = (statistics.fmean(x) for x in zip(*finite, strict=True))
        apart = [100 * (b - a) / a for a, b in finite]
        mean, half = statistics.fmean(apart), half_width(apart)
        interval = (
            [f"{mean:+.2f} ± {half:.2f}", f"{mean + half:+.2f}"]
            if len(apart) > 1
            else [f"{mean:+.2f}", "-"]
        )
        cells = [
            model,
            way,
            str(len(finite)),
            str(len(done) - len(finite)),
            f"{base:.4f}",
            f"{ours:.4f}",
            *interval,
        ]
        body.append(cells)
    return (
        rows.table(head, body)
        + f"\n{args.steps} steps, width {args.width}; a final loss is the mean of the"
        f" last {args.last} training losses; differences are of pairs with the same"
        " seed, with the 95% interval of their mean.\n"
    )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.out_of_the_box", __doc__ or "", main))
