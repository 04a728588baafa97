"""Tabulate what was checked of each family of models, on tiny models of this machine.

    python -m scripts.studies.families out=families.md families=qwen3 precisions=bf16

Three tables. Logits: their largest difference from those of transformers, relative to
the largest logit, over the models of tests/data/families; and what the plan of the
family's preset in the flagship counts. Precisions: the training loss after three steps.
Layouts: how far that loss is from the plain run's, in FP32 and in the flagship.

Each check is a JSON line beside the tables; called again, the rest is made.
"""

import dataclasses
import datetime
import functools
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.studies import rows
from trainer.assembly.build import (
    build_batch,
    build_learning_rates,
    build_workload,
    train_batches,
)
from trainer.assembly.planning import vocab_size
from trainer.cli.arguments import argument, run_script, split
from trainer.cli.plan import plan_of
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.files import read_object, write_atomically
from trainer.models import huggingface
from trainer.models.blocks import stack_layers
from trainer.models.family import Spec
from trainer.models.flops import flops_per_token, linear_sizes, param_count
from trainer.models.registry import family_of
from trainer.models.weight_files import config_beside
from trainer.parallel.mesh import place_batch
from trainer.step.step import StepInputs
from trainer.workload import compile_step, first_state

DATA = Path(__file__).parents[2] / "tests" / "data" / "families"
PRESETS = {
    "gpt2": "gpt2_124m",
    "llama": "llama31_8b",
    "mistral": "mistral_7b",
    "qwen2": "qwen25_0_5b",
    "qwen3": "qwen3_0_6b",
    "smollm3": "smollm3_3b",
    "olmo2": "olmo2_1b",
}
PRECISIONS = (
    "fp32", "bf16", "bf16_pure", "fp16_loss_scaled", "scalify_fp16", "scalify_fp8",
    "scalify_fp8_fp16", "scalify_fp8_fp8", "fp8_current", "fp8_delayed",
)  # fmt: skip
FLAGSHIP = "scalify_fp8_fp16"
LAYOUTS = {
    "scan": ["model.scan_layers=true", "parallel.data=1"],
    "remat": ["model.remat=block", "parallel.data=1"],
    "fsdp": ["parallel=fsdp"],
    "tensor": ["parallel.tensor=2", "parallel.data=2"],
}
LOGITS = ("unrolled", "scanned", "cache", "written")
# Joined products (queries, keys and values; both of a gated MLP) have sizes of their
# own, so that `trainer.compiled.fp8` tells them apart.
SIZES = [
    "model.n_layer=2", "model.d_model=64", "model.n_head=4", "model.d_mlp=192",
    "model.context=64", "model.vocab_size=null", "data.tokenizer=byte",
]  # fmt: skip
FAMILY_KEYS = {
    "gpt2": [],
    "mistral": ["model.window=16"],
    "smollm3": ["model.unrotated_every=2"],
}
# The preset with its own vocabulary, which the tokenizer sets otherwise.
WHOLE = {"gpt2": ["model.vocab_size=50257"]}
ROTARY = ["model.n_kv_head=2", "model.head_dim=32"]
RUN = [
    "data=embedded", "train.steps=3", "train.batch_tokens=512", "compile_cache=null",
]  # fmt: skip
PLAN = ["gpus=1", "micro_batch=8", "search=no", "compare=no", "exact=yes"]
# Compiled quickly, for four devices.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
)
type Row = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """Settings of the tables; see `--help`."""

    out: str = argument("the tables, Markdown; the checks are beside them as .jsonl")
    families: str = argument(f"of {', '.join(PRESETS)}", ",".join(PRESETS))
    precisions: str = argument(f"of {', '.join(PRECISIONS)}", ",".join(PRECISIONS))
    layouts: str = argument(f"of {', '.join(LAYOUTS)}", ",".join(LAYOUTS))


def main(args: Arguments) -> None:
    """Make the missing checks, and write the tables after each."""
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    jax.config.update("jax_platforms", "cpu")
    out = Path(args.out)
    lines = out.with_suffix(".jsonl")
    done = {row["name"]: row for row in rows.read(lines)}
    precisions, layouts = split(args.precisions), split(args.layouts)
    for family in split(args.families):
        for check, make in checks(family, precisions, layouts):
            name = f"{family} {check}"
            if name in done:
                continue
            done[name] = {"name": name, **make()}
            rows.append(lines, done[name])
            print(name, done[name], flush=True)
            jax.clear_caches()
            write_atomically(out, tables(done, precisions, layouts))
    write_atomically(out, tables(done, precisions, layouts))
    print(out.read_text())


def checks(
    family: str, precisions: Iterable[str], layouts: Iterable[str]
) -> Iterable[tuple[str, Callable[[], Row]]]:
    """Yield the checks of a family, each with a function that makes it."""
    yield "logits", functools.partial(beside_transformers, family)
    yield "sizes", functools.partial(sizes, family)
    yield "FP8", functools.partial(fp8_products, family)
    for name in precisions:
        overrides = [f"precision={name}", "parallel.data=1"]
        yield name, functools.partial(train, family, overrides)
    for name in layouts:
        for precision in ("fp32", FLAGSHIP):
            overrides = [f"precision={precision}", *LAYOUTS[name]]
            yield f"{precision} {name}", functools.partial(train, family, overrides)


def tiny(family: str) -> list[str]:
    """Return the arguments of a tiny model of a family."""
    rotary = [] if family == "gpt2" else ROTARY
    return [f"model={PRESETS[family]}", *SIZES, *rotary, *FAMILY_KEYS.get(family, [])]


def train(family: str, overrides: list[str]) -> Row:
    """Train a tiny model; return its loss, or the message of a refusal."""
    try:
        config = compose_config([*tiny(family), *RUN, *overrides])
        workload = build_workload(config)
    except UserError as error:
        return {"refused": str(error)}
    task, batches = workload.task, train_batches(config, workload, config.train.steps)
    state = first_state(task, config.seed)
    step = compile_step(task, build_batch(config, task.mesh), state)
    rates = build_learning_rates(config)
    for n, batch in batches(0):
        step_inputs = StepInputs(
            np.float32(rates[n]), np.int32(n), np.uint32(config.seed)
        )
        state, metrics = step(
            state, place_batch(batch, accum=1, mesh=task.mesh), step_inputs
        )
    return {"loss": float(metrics["loss"])}


def sizes(family: str) -> Row:
    """Return the parameters and the FLOPs of the preset."""
    batch = "train.batch_tokens=${model.context}"
    preset = f"model={PRESETS[family]}"
    config = compose_config([preset, batch, *WHOLE.get(family, [])])
    spec = config.model.spec(vocab_size(config))
    return {"parameters": param_count(spec), "flops": flops_per_token(spec)}


def fp8_products(family: str) -> Row:
    """Return the FP8 products of a tiny model's plan, and its layers that are not."""
    plan = plan_of([*tiny(family), f"precision={FLAGSHIP}", *PLAN])
    layers = linear_sizes(plan.spec)
    program = plan.measured.compiled.program
    products = sum(gemm.times for gemm in program.gemms if gemm.dtype == "fp8")
    return {
        "layers": len(layers),
        "left": [layer.path for layer in plan.layers],
        "products": products,
    }


def beside_transformers(family: str) -> Row:
    """Return the largest differences from transformers, relative to the largest logit.

    Of a model without layers in a loop, of one with, of one that decodes with a cache,
    and of the first as it is written and read again.
    """
    worst = dict.fromkeys(LOGITS, 0.0)
    models = 0
    for directory in sorted(path for path in DATA.iterdir() if path.is_dir()):
        if read_object(config_beside(directory))["model_type"] != family:
            continue
        models += 1
        reader = huggingface.family_at(directory)
        assert reader is not None
        spec, stored = reader.huggingface.load(directory, None)
        params = jax.tree.map(lambda x: x.astype(np.float32), stored)
        reference = np.load(directory / "reference.npz")
        ids, expected = reference["ids"], reference["logits"]
        scanned = dataclasses.replace(spec, scan_layers=True)
        with tempfile.TemporaryDirectory() as written:
            huggingface.save(written, spec, params)
            _, reread = reader.huggingface.load(Path(written), None)
        computed = {
            "unrolled": logits(spec, params, ids),
            "scanned": logits(scanned, stack_layers(params), ids),
            "cache": decoded(spec, params, ids),
            "written": logits(spec, reread, ids),
        }
        for name, values in computed.items():
            difference = np.abs(values - expected).max() / np.abs(expected).max()
            worst[name] = max(worst[name], float(difference))
    return {"models": models, **worst}


def logits(spec: Spec, params: Any, ids: np.ndarray) -> np.ndarray:
    """Return the logits of a model."""
    bind = family_of(spec).build(spec).bind
    return np.asarray(jax.jit(lambda p, ids: bind(p)(ids))(params, ids))


def decoded(spec: Spec, params: Any, ids: np.ndarray) -> np.ndarray:
    """Return the logits of a model that decodes token by token after the first."""
    bind = family_of(spec).build(spec).bind

    @jax.jit
    def decode(params: Any) -> jax.Array:
        bound, parts = bind(params), []
        cache = bound.init_cache(len(ids), ids.shape[1])
        for start in range(ids.shape[1]):
            h_Bx1xD, cache = bound.decode(ids[:, start : start + 1], cache, start)
            parts.append(bound.logits(h_Bx1xD[:, 0]))
        return jnp.stack(parts, axis=1)

    return np.asarray(decode(params))


def tables(done: dict[str, Row], precisions: list[str], layouts: list[str]) -> str:
    """Format the tables."""
    families = [name for name in PRESETS if any(key.split()[0] == name for key in done)]

    def cell(family: str, check: str, beside: str = "") -> str:
        row, plain = done.get(f"{family} {check}", {}), done.get(f"{family} {beside}")
        if "refused" in row:
            return "refused"
        if "loss" not in row:
            return "-"
        if plain is None:
            return f"{row['loss']:.4f}"
        return f"{row['loss'] - plain['loss']:+.1e}"

    first = [
        [
            family,
            *logits_cells(done.get(f"{family} logits", {})),
            *plan_cells(done.get(f"{family} sizes", {}), done.get(f"{family} FP8", {})),
        ]
        for family in families
    ]
    second = [[f, *(cell(f, name) for name in precisions)] for f in families]
    names = [f"{p} {layout}" for p in ("fp32", FLAGSHIP) for layout in layouts]
    third = [
        [family, *(cell(family, name, name.split()[0]) for name in names)]
        for family in families
    ]
    head = ["family", "models", *LOGITS, "parameters", "FLOPs a token", "FP8"]
    today = datetime.datetime.now(tz=datetime.UTC).date()
    versions = read_object(DATA / "versions.json")
    machine = f"{os.cpu_count()} CPUs ({platform.machine()})"
    return "\n\n".join(
        [
            f"{today}, {machine}, Python {platform.python_version()}, JAX"
            f" {jax.__version__}; {', '.join(f'{k} {v}' for k, v in versions.items())}",
            rows.table(head, first),
            rows.table(["family", *precisions], second),
            rows.table(["family", *names], third),
        ]
    )


def logits_cells(row: Row) -> list[str]:
    """Format the differences from transformers."""
    if not row.get("models"):
        return ["-"] * (1 + len(LOGITS))
    return [f"{row['models']}", *(f"{row[name]:.1e}" for name in LOGITS)]


def plan_cells(counted: Row, fp8: Row) -> list[str]:
    """Format the sizes of a preset, and the FP8 layers and products of a plan."""
    cells = ["-", "-"]
    if counted:
        cells = [f"{counted['parameters']:,}", f"{counted['flops']:.4g}"]
    if not fp8:
        return [*cells, "-"]
    inside = fp8["layers"] - len(fp8["left"])
    return [
        *cells,
        f"{inside} of {fp8['layers']} layers in {fp8['products']} products",
    ]


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.families", __doc__ or "", main))
