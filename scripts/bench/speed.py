"""Measure the speed of the training step against others, interleaved.

By default our step (FP32) and, with an interpreter with torch, the same GPT-2 step in
compiled PyTorch take turns, a few steps each, so that other load affects both alike.
Figures are medians over the rounds, with extremes. With `scalify=float32,float16` the
step under scalify, with data of these dtypes, is compared with the plain one, also in
its times of tracing and compiling.

With `cases=gpu`, on a machine with a GPU, the trainer's steps in several precisions and
Hugging Face's GPT-2 take turns at 124M, 774M and 1558M; see
`scripts/bench/compare.py`. `platform=cpu` rehearses; `compile_only=true` only fills the
compilation cache.
"""

import contextlib
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from scripts.bench.compare import Settings, run_cases
from scripts.bench.interleave import (
    TakeSteps,
    Worker,
    figures,
    interleave,
    make_take,
    torch_interpreter,
    torch_worker,
)
from trainer.cli.arguments import argument
from trainer.errors import UserError
from trainer.run.allocator import keep_freed_memory
from trainer.run.libraries import hide_missing_gpu

PEERS = ("scalify_fp8_fp16", "bf16", "torch", "fp8_delayed", "fp8_current")
ON_A_GPU = ",".join(
    f"gpt2_{size}:{peer}" for size in ("124m", "774m", "1558m") for peer in PEERS
)
FORMATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    vocab: str = argument("vocabulary sizes, separated by commas", "50257,512")
    n_layer: int = argument("layers", 4)
    n_head: int = argument("heads", 4)
    d_model: int = argument("width", 256)
    context: int = argument("tokens per sequence", 256)
    batch: int = argument("sequences per step", 8)
    rounds: int = argument("turns of each contestant", 7)
    steps: int = argument("steps in a turn; 0: 3, and with cases= 20", 0)
    threads: int = argument("threads given to PyTorch", 2)
    scalify: str = argument(
        "dtypes of the scaled step's data, separated by commas; empty: PyTorch instead",
        "",
    )
    compiles: int = argument("compilations of each step, with scalify=", 3)
    torch_python: str = argument(
        "an interpreter that has torch; empty: this one, if it has", ""
    )
    out: str = argument("also write the figures to this JSON file", "")
    cases: str = argument(
        "whole steps on a GPU instead:"
        " model:precision[:batch=8][:remat=none][:scan=false][:deterministic=auto]"
        "[:logits=fp32],"
        " separated by commas, or gpu: all peers at three sizes",
        "",
    )
    platform: Literal["gpu", "cpu"] = argument(
        "with cases=, what JAX must run on; cpu: to rehearse", "gpu"
    )
    compile_only: bool = argument(
        "with cases=, only compile them, into the compilation cache", False
    )
    compile_cache: str = argument(
        "with cases=, the directory of compiled programs; empty: none",
        "~/.cache/scalify-trainer/xla",
    )
    sequence: int = argument("with cases=, tokens per sequence; 0: the model's", 0)
    minutes: float = argument("with cases=, no further case starts after these", 8.0)


def our_step(args: Arguments, vocab: int) -> TakeSteps:
    """Return our training step, FP32, compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from scalify_core.optim import scaled_state
    from trainer.models.gpt2.model import functional
    from trainer.models.gpt2.spec import GPT2Spec
    from trainer.precision.gradients import plain
    from trainer.step.clip_and_decay import make_optimizer
    from trainer.step.state import init_state
    from trainer.step.step import Hyper, Tokens, Update, make_train_step

    spec = GPT2Spec(vocab, args.context, args.n_layer, args.n_head, args.d_model)
    init, bind, _, roles = functional(spec)
    adamw = make_optimizer(
        "adamw", b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0
    )(roles)
    optimizer = scaled_state(adamw, seed=0)

    def loss_fn(
        params: Any,
        tokens: jax.Array,
        segments: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        return bind(params).loss(tokens[:, :-1], tokens[:, 1:], segments, key)

    step = jax.jit(
        make_train_step(plain(loss_fn), Update(lambda seed: optimizer)),
        donate_argnums=0,
    )
    state = jax.jit(lambda key: init_state(init(key), optimizer, key))(
        jax.random.key(0)
    )
    tokens = np.random.default_rng(0).integers(
        0, vocab, (1, args.batch, args.context + 1), dtype=np.int32
    )
    batch = Tokens(jnp.asarray(tokens), None)
    hyper = Hyper(jnp.float32(1e-4), jnp.int32(0), jnp.uint32(0))

    take = make_take(step, state, batch, hyper)
    take(2)  # compiles
    return take


def torch_step(args: Arguments, vocab: int, worker: Worker) -> TakeSteps:
    """Return the same step in PyTorch, in a process of its own."""
    # PyTorch's vocabulary is not padded, which is a choice of ours. `vocab=50304`
    # compares at a size that suits both.
    sizes = {
        name: getattr(args, name)
        for name in ("context", "n_layer", "n_head", "d_model", "batch", "threads")
    }
    worker.ask({"prepare": sizes | {"vocab": vocab}})
    return lambda steps: float(worker.ask({"take": steps})["seconds"])


def main(args: Arguments) -> None:
    """Compare the steps; print a table and write the JSON file."""
    if args.cases:
        compare_cases(args)
        return
    hide_missing_gpu()
    keep_freed_memory()  # as `python -m trainer` does
    args = replace(args, steps=args.steps or 3)
    results = against_plain(args) if args.scalify else against_torch(args)
    if args.out:
        Path(args.out).write_text(
            json.dumps({"arguments": vars(args), "results": results}, indent=2) + "\n"
        )


def compare_cases(args: Arguments) -> None:
    """Compare full steps in worker processes; UserError names those that failed."""
    results = run_cases(
        ON_A_GPU if args.cases == "gpu" else args.cases,
        Settings(args.rounds, args.steps or 20, args.sequence or None, args.platform),
        minutes=args.minutes,
        python=torch_interpreter(args.torch_python),
        out=args.out,
        cache=args.compile_cache or None,
        compile_only=args.compile_only,
    )
    if results.failed:
        listed = "; ".join(f"{name}: {why}" for name, why in results.failed.items())
        raise UserError(
            f"{len(results.failed)} of the cases failed, the others are as above:"
            f" {listed}"
        )


def against_plain(args: Arguments) -> list[dict[str, Any]]:
    """Compare the scaled step with the plain one."""
    from scripts.bench.scalify import compare, report
    from trainer.models.gpt2.spec import GPT2Spec

    formats = tuple(args.scalify.split(","))
    if unknown := set(formats) - set(FORMATS):
        raise UserError(
            f"scalify={args.scalify}: {', '.join(unknown)} is no choice; valid:"
            f" {', '.join(FORMATS)}"
        )
    results = []
    for vocab in (int(v) for v in args.vocab.split(",")):
        spec = GPT2Spec(vocab, args.context, args.n_layer, args.n_head, args.d_model)
        row = compare(
            spec,
            args.batch,
            formats,
            rounds=args.rounds,
            compiles=args.compiles,
            steps=args.steps,
        )
        print(f"vocab {vocab}\n{report(row)}")
        results.append({"vocab": vocab, **row})
    return results


def against_torch(args: Arguments) -> list[dict[str, Any]]:
    """Compare our step with PyTorch's, or time it alone."""
    python = torch_interpreter(args.torch_python)
    if python is None:
        print(
            "no torch here: ours alone (torch_python=PATH names an interpreter that"
            " has it)"
        )
    results = []
    for vocab in (int(v) for v in args.vocab.split(",")):
        takes = {"ours": our_step(args, vocab)}
        with contextlib.ExitStack() as stack:
            if python is not None:
                takes["torch"] = torch_step(
                    args, vocab, stack.enter_context(torch_worker(python))
                )
            seconds = interleave(takes, args.rounds, args.steps)
        row: dict[str, Any] = {"vocab": vocab}
        row |= {
            name: figures(s, args.batch * args.context) for name, s in seconds.items()
        }
        for name in takes:
            f = row[name]
            spread = f"{f['tokens_per_s_min']:,.0f} to {f['tokens_per_s_max']:,.0f}"
            print(
                f"vocab {vocab:>6}  {name:<6} {f['tokens_per_s']:>9,.0f} tokens/s"
                f" ({spread}), {f['step_ms']:,.1f} ms"
            )
        if python is not None:
            # Ratios of each round, so that other load affects both sides.
            ratios = [
                t / o for o, t in zip(seconds["ours"], seconds["torch"], strict=True)
            ]
            row["ours_over_torch"] = statistics.median(ratios)
            print(
                f"vocab {vocab:>6}  ours / torch {row['ours_over_torch']:.2f}"
                f" ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        results.append(row)
    return results
