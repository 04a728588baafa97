"""The schema of the configuration: frozen dataclasses without defaults, which the YAML
files of `trainer/configs/` have.

Keys of a model, a precision or an optimizer are declared where they are used: in the
specs of `trainer.models`, the `Policy` of `trainer.precision` and the entries of
`trainer.step.optimizers`. `trainer.config.fields` makes a `Config` of a composed
dictionary; `trainer.config.combinations` refuses settings that cannot run together.
"""

import dataclasses
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from trainer.bounds import (
    MAX_NEW_TOKENS,
    MAX_SEQUENCES,
    Amount,
    Bound,
    Natural,
    Positive,
    Share,
    ShareBelow1,
    Variants,
    annotations,
    at_least,
    at_most,
)
from trainer.models.new_tokens import Method
from trainer.models.registry import SPECS
from trainer.precision.policy import Policy
from trainer.step.optimizers import OPTIMIZERS, Optimizer
from trainer.step.schedule import ScheduleName
from trainer.step.xla_flags import Deterministic


@dataclass(frozen=True)
class ModelConfig:
    """The keys of every model; the schemas in MODEL_SCHEMAS add those of the spec.

    Attributes:
      name: name of the preset.
      family: name of an entry of `trainer.models.registry`.
      lr: the peak learning rate that suits the size; `optimizer.lr` takes it.
      vocab_size: number of ids; None: that of the tokenizer.
      context: tokens per sequence.
    """

    # Kept in the configuration, so that a run tells which preset it began with.
    name: str
    family: str
    lr: Amount
    vocab_size: int | None
    context: int

    def spec(self, vocab_size: int) -> Any:
        """Return the spec of the family; `vocab_size` is the tokenizer's.

        Raises:
          UserError: the sizes do not fit each other.
        """
        spec = SPECS[self.family]
        settings = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(spec)
        }
        return spec(**settings | {"vocab_size": self.vocab_size or vocab_size})


def schema_of(spec: type) -> type:
    """Return the schema of `model` for a spec: `ModelConfig` and the spec's fields, of
    which `vocab_size` may be null.
    """
    # Made from the spec, so that a new family changes no schema.
    keys = [
        (name, hint | None if name == "vocab_size" else hint)
        for name, hint in annotations(spec).items()
    ]
    return dataclasses.make_dataclass(
        f"{spec.__name__}Keys", keys, bases=(ModelConfig,), frozen=True
    )


MODEL_SCHEMAS = {family: schema_of(spec) for family, spec in SPECS.items()}


@dataclass(frozen=True)
class Data:
    source: Literal["embedded", "python", "text", "hf", "prepared", "mix"]
    # Null where prepared data name their own.
    tokenizer: str | None
    cache_dir: str | None
    workers: Positive | None
    document_mask: bool
    # Null is true: runs that were saved before the key existed have null.
    boundary_loss: bool | None
    # Each is a batch in memory, and the number may be of somebody else's run.
    prefetch: Annotated[int, at_least(1), at_most(1000)]
    val_fraction: ShareBelow1 | None
    paths: tuple[str, ...]
    format: Literal["text", "jsonl", "parquet"] | None
    column: str | None
    name: str | None
    config: str | None
    split: str | None
    revision: str | None
    streaming: bool
    max_documents: Positive | None
    max_tokens: Positive | None
    prepared_dir: str | None
    sources: tuple[str, ...] | None
    weights: tuple[float, ...] | None
    stages: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True)
class Schedule:
    name: ScheduleName
    warmup_fraction: Share
    min_ratio: Share
    decay_fraction: Share


@dataclass(frozen=True)
class Precision(Policy):
    """The precision policy of a run, the preset's name, and two settings of the run.

    Attributes:
      name: name of the preset.
      rescale_every: steps between two checks of the weights' scales; 0: never.
      require_fp8: whether to stop if a chosen matmul was not compiled in FP8; None: if
        the GPU is a Hopper or newer.
    """

    name: str
    rescale_every: Natural
    require_fp8: bool | None

    @property
    def policy(self) -> Policy:
        """The resolved precision policy."""
        # Without the name and the settings of the run, equal policies compare equal:
        # phases then share a task.
        return Policy(
            **{field.name: getattr(self, field.name) for field in fields(Policy)}
        )


# -1 as in NumPy's reshape: the rest.
Devices = Annotated[
    int,
    Bound(
        lambda n: n == -1 or n >= 1,
        "a number of devices, or -1 for all remaining ones",
    ),
]


@dataclass(frozen=True)
class Parallel:
    """The mesh, and the reduction of gradients."""

    data: Devices
    fsdp: Devices
    tensor: Devices
    reduce: Literal["fp32", "bf16", "fp16", "fp8"]
    deterministic_reduce: bool
    distributed: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the mesh's axes, of which one may be -1."""
        return self.data, self.fsdp, self.tensor


@dataclass(frozen=True)
class DiLoCo:
    """DiLoCo's replicas and outer optimizer; `parallel=diloco` sets defaults, and all
    keys are null without replicas.

    Attributes:
      replicas: number of replicas, each with its own optimizer.
      sync_every: steps between two exchanges of outer gradients.
      outer_grad: the format in which outer gradients are sent.
      outer_lr: learning rate of the outer optimizer, SGD with Nesterov momentum
        `outer_momentum`.
      error_feedback: whether an exchange adds the rounding error of the last one.
      fragments: number of parts of the parameters, exchanged at different steps.
      participants: replicas that train in a round, drawn for each round; None: all.
      data: `split`: replicas share every batch; `sources`: replica k reads source k of
        `data=mix`.
      quorum: replicas that must be left when `launcher=ray` loses machines; None: all.
      bandwidth_gbps: gigabits a second between replicas, to estimate the time of an
        exchange.
    """

    replicas: Positive | None
    sync_every: Positive | None
    outer_grad: Literal["fp32", "bf16", "fp16", "fp8", "fp8_e5m2", "fp4"] | None
    outer_lr: Amount | None
    outer_momentum: ShareBelow1 | None
    error_feedback: bool | None
    fragments: Positive | None
    participants: Positive | None
    data: Literal["split", "sources"] | None
    quorum: Positive | None
    bandwidth_gbps: Amount | None


@dataclass(frozen=True)
class Launcher:
    """The launcher of a run's processes. Without one (`launcher=local`) the command
    itself trains, and all keys are null.

    Attributes:
      kind: the launcher; None: no launcher.
      workers: minimum and maximum number of workers; each is a process.
      worker_gpus: GPUs of a worker; None: one if the cluster has GPUs, else none.
      worker_cpus: CPU cores of a worker; None: one.
      restarts: how often lost workers are replaced.
      resize_seconds: seconds between two checks for machines that came back.
    """

    kind: Literal["ray"] | None
    # A pair in the form of a list, as Hydra and YAML write it; `combinations` checks
    # its length.
    workers: tuple[Positive, ...] | None
    worker_gpus: Natural | None
    worker_cpus: Positive | None
    restarts: Natural | None
    resize_seconds: Positive | None


@dataclass(frozen=True)
class Checkpoint:
    every: Natural
    keep: Positive
    keep_best: bool


@dataclass(frozen=True)
class TrackerConfig:
    kind: Literal["wandb", "tensorboard", "jsonl", "none"]
    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Init:
    """The use of `init_from`'s weights.

    Attributes:
      embeddings: how embedding rows are made if the weights have another tokenizer;
        None: refuse such weights.
    """

    embeddings: Method | None


@dataclass(frozen=True)
class Resume:
    source: str
    step: int | None
    convert: bool


@dataclass(frozen=True)
class TrainPhase:
    """A part of the training with its own settings, an entry of `train.phases`. None:
    the value of the run.

    Attributes:
      until: the step, counted over the whole run, after which the phase ends; None, in
        the last phase only: `train.steps`.
      trainable: as `train.trainable`; None: all parameters.
      lr: peak learning rate.
      schedule: shape of the learning rate over the phase's own steps, warm-up included.
      warmup_fraction, min_ratio, decay_fraction: as in `schedule`, of these steps.
      precision: as the group; in a configuration file, the name of a preset.
    """

    # Defaults stand here, because the entries of a list have no YAML file for them.
    until: Positive | None = None
    trainable: tuple[str, ...] | None = None
    lr: Amount | None = None
    schedule: ScheduleName | None = None
    warmup_fraction: Share | None = None
    min_ratio: Share | None = None
    decay_fraction: Share | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class Train:
    steps: Positive
    batch_tokens: Annotated[int, at_least(1), at_most(2**30)]
    grad_accum_steps: Positive
    trainable: tuple[str, ...] | None
    phases: tuple[TrainPhase, ...] | None
    log_every: Positive
    eval_every: Natural
    eval_batches: Positive
    final_eval_batches: Positive


@dataclass(frozen=True)
class Eval:
    """Tasks that evaluate the model, in addition to the validation loss.

    Attributes:
      tasks: tasks of `scalify-trainer evaluate`; None: no tasks.
      tasks_every: steps between two scores; None: only after the last step.
      limit: maximum number of items per task; None: 200 for last_word and word_order,
        all for the harness's tasks.
      batch_size: sequences at once; None: 16.
    """

    tasks: tuple[str, ...] | None
    tasks_every: Positive | None
    limit: Positive | None
    batch_size: Annotated[int, at_least(1), at_most(MAX_SEQUENCES)] | None


@dataclass(frozen=True)
class Metrics:
    numerics_every: Natural
    sharpness: bool | None


@dataclass(frozen=True)
class SampleConfig:
    every: Natural
    # A model needs a first token.
    prompt: Annotated[str, Bound(bool, "a first word")]
    max_new_tokens: Annotated[int, at_least(0), at_most(MAX_NEW_TOKENS)]
    temperature: Amount
    # JAX's integers have 32 bits.
    top_k: Annotated[int, at_least(0), at_most(2**31 - 1)]
    # 0 would leave no token to sample.
    top_p: Annotated[
        float, Bound(lambda p: 0 < p <= 1, "more than 0, at most 1 (all tokens)")
    ]


@dataclass(frozen=True)
class WatchdogConfig:
    max_skips: Positive
    spike_zscore: Amount
    # A checkpoint's metadata holds as many losses.
    spike_window: Annotated[int, at_least(2), at_most(10**6)]
    # One jump of the loss that comes back at once is harmless.
    spike_steps: Annotated[int, at_least(2)]
    max_rollbacks: Natural
    stop_seconds: Amount
    stall_seconds: Amount
    hang_seconds: Amount


@dataclass(frozen=True)
class Profile:
    steps: tuple[int, ...] | None


@dataclass(frozen=True)
class Config:
    model: Annotated[ModelConfig, Variants("family", MODEL_SCHEMAS)]
    data: Data
    optimizer: Annotated[Optimizer, Variants("name", OPTIMIZERS)]
    schedule: Schedule
    precision: Precision
    parallel: Parallel
    diloco: DiLoCo
    launcher: Launcher
    checkpoint: Checkpoint
    tracker: TrackerConfig
    resume: Resume
    train: Train
    eval: Eval
    metrics: Metrics
    sample: SampleConfig
    watchdog: WatchdogConfig
    profile: Profile
    seed: Annotated[int, at_least(0), at_most(2**32 - 1)]  # JAX keeps 32 bits of a seed
    run_dir: str
    init_from: str | None
    init: Init
    dry_run: bool
    compile_cache: str | None
    # None: auto. Runs that were saved before the key existed have None.
    deterministic: Deterministic | None

    @property
    def has_processes(self) -> bool:
        """Whether the run joins several processes, which write to one directory."""
        return self.parallel.distributed or self.launcher.kind is not None

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step, over all devices and micro-batches."""
        return self.train.batch_tokens // self.model.context

    @property
    def trained_tokens(self) -> int:
        """Tokens that an optimizer step trains on, under DiLoCo by the participants."""
        replicas = self.diloco.replicas or 1
        # Replicas that sit out a round train on nothing, though the batch has their
        # part.
        participants = self.diloco.participants or replicas
        return self.train.batch_tokens * participants // replicas


# The sources that use a key of `data`. Keys that are not listed belong to every source.
DATA_KEYS = {
    # A prepared directory has its own shards, and a split that was made with it.
    "cache_dir": ("embedded", "python", "text", "hf", "mix"),
    "workers": ("embedded", "python", "text", "hf", "mix"),
    "val_fraction": ("embedded", "python", "text", "hf", "mix"),
    "paths": ("text",),
    "format": ("text",),
    "column": ("text", "hf", "mix"),
    "name": ("hf",),
    "config": ("hf",),
    "split": ("hf",),
    "revision": ("hf",),
    "streaming": ("hf",),
    "max_documents": ("text", "hf"),
    "max_tokens": ("hf",),
    "prepared_dir": ("prepared",),
    "sources": ("mix",),
    "weights": ("mix",),
    "stages": ("mix",),
}
# Keys that may not be null for the sources that use them.
NOT_NULL_KEYS = ("cache_dir", "val_fraction", "column", "split")
