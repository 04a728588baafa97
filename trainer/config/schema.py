"""The schema of the configuration: frozen dataclasses without defaults (the YAML files of `configs/` hold those).

`trainer.config.fields` makes a `Config` of a composed dictionary; `validate` refuses combinations that cannot run.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from trainer.errors import UserError


@dataclass(frozen=True)
class Model:
    name: str
    n_layer: int
    n_head: int
    d_model: int
    context: int
    vocab_size: int | None
    mlp: Literal["gelu", "swiglu", "smooth_swiglu"]
    d_mlp: int | None
    dropout: float
    lr: float
    scan_layers: bool
    remat: str
    keep_fp8_weights: bool
    init_std: float
    value_gain: float | None
    align_channels: int
    align_gain: float


@dataclass(frozen=True)
class Data:
    source: Literal["embedded", "text", "hf", "prepared"]
    tokenizer: str | None
    cache_dir: str | None
    workers: int | None
    document_mask: bool
    prefetch: int
    val_fraction: float | None
    paths: tuple[str, ...]
    format: Literal["text", "jsonl", "parquet"] | None
    column: str | None
    name: str | None
    config: str | None
    split: str | None
    revision: str | None
    streaming: bool
    max_documents: int | None
    max_tokens: int | None
    prepared_dir: str | None


@dataclass(frozen=True)
class AnyOptimizer:
    name: str
    lr: float
    weight_decay: float
    clip_norm: float


@dataclass(frozen=True)
class AdamW(AnyOptimizer):
    name: Literal["adamw"]
    b1: float
    b2: float
    eps: float


@dataclass(frozen=True)
class Lion(AnyOptimizer):
    name: Literal["lion"]
    b1: float
    b2: float


@dataclass(frozen=True)
class Adafactor(AnyOptimizer):
    name: Literal["adafactor"]


@dataclass(frozen=True)
class SGD(AnyOptimizer):
    name: Literal["sgd"]
    momentum: float


@dataclass(frozen=True)
class Muon(AnyOptimizer):
    name: Literal["muon"]
    momentum: float
    b1: float
    b2: float
    eps: float


# Told apart by `name`: each has the keys that it uses, and no others.
Optimizer = AdamW | Lion | Adafactor | SGD | Muon


@dataclass(frozen=True)
class Schedule:
    name: Literal["cosine", "wsd", "linear", "constant"]
    warmup_fraction: float
    min_ratio: float
    decay_fraction: float


@dataclass(frozen=True)
class Precision:
    name: str
    compute: Literal["fp32", "bf16", "fp16"]
    forward: str | None
    backward: str | None
    simulate: bool
    matmuls: tuple[str, ...]
    keep: tuple[str, ...]
    scaling: Literal["none", "propagate", "loss_scale", "delayed", "current"]
    weights: Literal["fp32", "bf16", "fp16"]
    weights_rounding: Literal["nearest", "stochastic"]
    weight_grad: Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
    mu: Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
    nu: Literal["fp32", "bf16", "fp16", "e4m3", "e5m2"]
    moments_rounding: Literal["auto", "nearest", "stochastic"]
    update: Literal["fp32", "propagate"]
    rescale_grads: tuple[str, ...]
    rescale_every: int
    require_fp8: bool | None
    clip_outliers: float | None
    amax_history: int


@dataclass(frozen=True)
class Parallel:
    data: int
    fsdp: int
    tensor: int
    reduce: Literal["fp32", "bf16", "fp16", "fp8"]
    deterministic_reduce: bool
    distributed: bool


@dataclass(frozen=True)
class Checkpoint:
    every: int
    keep: int
    keep_best: bool


@dataclass(frozen=True)
class Tracker:
    kind: Literal["wandb", "tensorboard", "jsonl", "none"]
    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Resume:
    source: str
    step: int | None
    convert: bool


@dataclass(frozen=True)
class Train:
    steps: int
    batch_tokens: int
    accum: int
    log_every: int
    eval_every: int
    eval_batches: int
    final_eval_batches: int


@dataclass(frozen=True)
class Metrics:
    numerics_every: int


@dataclass(frozen=True)
class Sample:
    every: int
    prompt: str
    max_new: int
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True)
class Watchdog:
    max_skips: int
    spike_zscore: float
    spike_window: int
    spike_steps: int
    max_rollbacks: int
    stop_seconds: float
    stall_seconds: float
    hang_seconds: float


@dataclass(frozen=True)
class Profile:
    steps: tuple[int, ...] | None


@dataclass(frozen=True)
class Config:
    model: Model
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    parallel: Parallel
    checkpoint: Checkpoint
    tracker: Tracker
    resume: Resume
    train: Train
    metrics: Metrics
    sample: Sample
    watchdog: Watchdog
    profile: Profile
    seed: int
    run_dir: str
    init_from: str | None
    dry_run: bool
    compile_cache: str | None

    @property
    def batch_size(self) -> int:
        """Sequences per optimiser step, over all devices and micro-batches."""
        return self.train.batch_tokens // self.model.context


# The sources that use a key of `data`; every source uses those that are not here.
DATA_KEYS = {
    "cache_dir": ("embedded", "text", "hf"),
    "workers": ("embedded", "text", "hf"),
    "val_fraction": ("embedded", "text", "hf"),
    "paths": ("text",),
    "format": ("text",),
    "column": ("text", "hf"),
    "name": ("hf",),
    "config": ("hf",),
    "split": ("hf",),
    "revision": ("hf",),
    "streaming": ("hf",),
    "max_documents": ("text", "hf"),
    "max_tokens": ("hf",),
    "prepared_dir": ("prepared",),
}
NEEDED = ("cache_dir", "val_fraction", "column", "split")  # of those that use them


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def validate(c: Config) -> None:
    """Refuse what cannot run, as far as the configuration alone can tell; `build` checks devices and tokenizer."""
    optimizer = dataclasses.asdict(c.optimizer)
    for path, value, least in (
        ("model.n_layer", c.model.n_layer, 1),
        ("model.n_head", c.model.n_head, 1),
        ("model.d_model", c.model.d_model, 1),
        ("model.context", c.model.context, 1),
        ("model.vocab_size", c.model.vocab_size, 1),
        ("model.d_mlp", c.model.d_mlp, 1),
        ("model.align_channels", c.model.align_channels, 0),
        ("data.workers", c.data.workers, 1),
        ("data.prefetch", c.data.prefetch, 1),
        ("data.max_documents", c.data.max_documents, 1),
        ("data.max_tokens", c.data.max_tokens, 1),
        ("train.steps", c.train.steps, 1),
        ("train.batch_tokens", c.train.batch_tokens, 1),
        ("train.accum", c.train.accum, 1),
        ("train.log_every", c.train.log_every, 1),
        ("train.eval_every", c.train.eval_every, 0),
        ("train.eval_batches", c.train.eval_batches, 1),
        ("train.final_eval_batches", c.train.final_eval_batches, 1),
        ("metrics.numerics_every", c.metrics.numerics_every, 0),
        ("sample.every", c.sample.every, 0),
        ("sample.max_new", c.sample.max_new, 0),
        ("sample.temperature", c.sample.temperature, 0),
        ("sample.top_k", c.sample.top_k, 0),
        ("checkpoint.every", c.checkpoint.every, 0),
        ("checkpoint.keep", c.checkpoint.keep, 1),
        ("precision.rescale_every", c.precision.rescale_every, 0),
        ("precision.clip_outliers", c.precision.clip_outliers, 1),
        ("precision.amax_history", c.precision.amax_history, 1),
        ("watchdog.max_skips", c.watchdog.max_skips, 1),
        ("watchdog.spike_zscore", c.watchdog.spike_zscore, 0),
        ("watchdog.spike_window", c.watchdog.spike_window, 2),
        ("watchdog.spike_steps", c.watchdog.spike_steps, 2),
        ("watchdog.max_rollbacks", c.watchdog.max_rollbacks, 0),
        ("watchdog.stop_seconds", c.watchdog.stop_seconds, 0),
        ("watchdog.stall_seconds", c.watchdog.stall_seconds, 0),
        ("watchdog.hang_seconds", c.watchdog.hang_seconds, 0),
        ("optimizer.lr", c.optimizer.lr, 0),
        ("optimizer.eps", optimizer.get("eps"), 0),
        ("optimizer.weight_decay", c.optimizer.weight_decay, 0),
        ("optimizer.clip_norm", c.optimizer.clip_norm, 0),
        ("seed", c.seed, 0),
    ):
        _require(value is None or value >= least, f"{path}={value}: expected at least {least}")
    # JAX keeps 32 bits of a seed.
    _require(c.seed < 2**32, f"seed={c.seed}: expected at most {2**32 - 1}")
    for path, share in (
        *((f"optimizer.{key}", optimizer[key]) for key in ("b1", "b2", "momentum") if key in optimizer),
        ("model.dropout", c.model.dropout),
        ("data.val_fraction", c.data.val_fraction or 0.0),
    ):
        _require(0 <= share < 1, f"{path}={share}: expected a number in [0, 1)")
    for path, share in (
        ("schedule.warmup_fraction", c.schedule.warmup_fraction),
        ("schedule.min_ratio", c.schedule.min_ratio),
        ("schedule.decay_fraction", c.schedule.decay_fraction),
    ):
        _require(0 <= share <= 1, f"{path}={share}: expected a number in [0, 1]")
    _require(0 < c.sample.top_p <= 1, f"sample.top_p={c.sample.top_p}: expected more than 0, at most 1 (all tokens)")
    _require(bool(c.sample.prompt), "sample.prompt is empty; give it a first word")
    _check_data(c.data)
    _require(
        c.model.d_model % c.model.n_head == 0,
        f"model.d_model={c.model.d_model} is not a multiple of model.n_head={c.model.n_head}",
    )
    _require(c.model.init_std > 0, f"model.init_std={c.model.init_std}: expected more than 0; GPT-2's is 0.02")
    _require(c.model.align_gain > 0, f"model.align_gain={c.model.align_gain}: expected more than 0, such as 64")
    _require(
        c.model.align_channels == 0 or c.model.mlp != "gelu",
        f"model.align_channels={c.model.align_channels}, but model.mlp=gelu has one branch; "
        "choose model.mlp=swiglu or smooth_swiglu",
    )
    gain = c.model.value_gain
    _require(
        gain is None or (0 < gain < math.inf and math.frexp(gain)[0] == 0.5),
        f"model.value_gain={gain}: expected a power of two, such as 4096 or 0.000244140625 (2^-12), or null",
    )
    tokens = c.model.context * c.train.accum
    _require(
        c.train.batch_tokens % tokens == 0,
        f"train.batch_tokens={c.train.batch_tokens} is not a multiple of model.context x train.accum = "
        f"{c.model.context} x {c.train.accum} = {tokens}; "
        f"nearest valid: {max(1, round(c.train.batch_tokens / tokens)) * tokens}",
    )
    mesh = {name: getattr(c.parallel, name) for name in ("data", "fsdp", "tensor")}
    for name, size in mesh.items():
        valid = size == -1 or size >= 1
        _require(valid, f"parallel.{name}={size}: expected a number of devices, or -1 for what the others leave")
    _require(
        list(mesh.values()).count(-1) <= 1,
        f"{', '.join(f'parallel.{n}=-1' for n, size in mesh.items() if size == -1)}: only one can be what the others "
        "leave; set parallel.data=1 to shard the state over all devices",
    )
    _require(
        not c.parallel.deterministic_reduce or c.parallel.reduce == "fp32",
        f"parallel.deterministic_reduce=true sums in FP32, but parallel.reduce={c.parallel.reduce}; choose one of them",
    )
    _require(
        not c.precision.require_fp8 or c.precision.forward is not None,
        f"precision.require_fp8=true, but precision={c.precision.name} has no FP8 matmuls; "
        "choose one that has, such as precision=scalify_fp8_fp16, or leave require_fp8 out",
    )
    if c.profile.steps is not None:
        ok = len(c.profile.steps) == 2 and 1 <= c.profile.steps[0] <= c.profile.steps[1] <= c.train.steps
        _require(ok, f"profile.steps={list(c.profile.steps)}: expected [first,last] within 1..{c.train.steps}")


def _check_data(c: Data) -> None:
    """Refuse keys of other sources than the chosen one, which would change nothing, and what it lacks itself."""
    given = {key: value for key in DATA_KEYS if (value := getattr(c, key)) not in (None, (), False)}
    for key, value in given.items():
        users = DATA_KEYS[key]
        shown = f"[{','.join(value)}]" if isinstance(value, tuple) else value
        choices = " or ".join(f"data={name}" for name in users)
        _require(
            c.source in users,
            f"data.{key}={shown} is not used by data={c.source}, and would be ignored; it is of {choices}: "
            f"add {choices}, or leave data.{key} out",
        )
    for key in NEEDED:
        missing = c.source in DATA_KEYS[key] and getattr(c, key) is None
        _require(not missing, f"data.{key} is null; choose the group, data={c.source}, or give it a value")
    _require(
        c.val_fraction != 0, "data.val_fraction=0: a validation part is needed; give it a small share, such as 0.01"
    )
    _require(c.source != "text" or bool(c.paths), "data=text needs data.paths=[FILE,...]")
    _require(c.source != "hf" or bool(c.name), "data=hf needs data.name=ORGANISATION/DATASET")
    _require(c.source != "prepared" or bool(c.prepared_dir), "data=prepared needs data.prepared_dir=DIRECTORY")
    _require(
        c.source == "prepared" or bool(c.tokenizer), "data.tokenizer is null; valid: byte, gpt2, cl100k_base, a file"
    )
