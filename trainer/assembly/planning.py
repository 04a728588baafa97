"""Build the plan of a configuration's step for GPUs that are not present."""

from collections.abc import Callable
from pathlib import Path

from trainer.assembly.build import (
    build_batch,
    build_diloco,
    build_model,
    build_task,
    check_fragments,
)
from trainer.compiled.sync_bytes import sync_bytes_of
from trainer.config import schema
from trainer.data import Manifest
from trainer.data.tokenizer import ByteTokenizer, get_tokenizer
from trainer.model import Model
from trainer.parallel.mesh import batch_shards
from trainer.plan.aot import make_target_mesh
from trainer.plan.figures import Hardware
from trainer.plan.plan import StepPlan, plan_step
from trainer.report.messages import describe_syncs
from trainer.step.step import Tokens

GPT2_IDS = 50_257


def vocab_size(c: schema.Config) -> int:
    """Return the number of ids without reading the data."""
    if c.model.vocab_size is not None:
        return c.model.vocab_size
    if c.data.source == "prepared":
        # `config.combinations.validate` refuses nulls here.
        assert c.data.prepared_dir is not None
        # The manifest alone: a plan runs where the shards are not.
        return Manifest.load(Path(c.data.prepared_dir)).vocab_size
    assert c.data.tokenizer is not None
    return get_tokenizer(c.data.tokenizer).vocab_size


def build_plan(
    c: schema.Config,
    hardware: Hardware,
    *,
    sequences: int,
    bf16: schema.Precision | None,
    search: bool,
    exact: bool,
    log: Callable[[str], None],
    on_first_plan: Callable[[StepPlan], None],
) -> StepPlan:
    """Return what a configuration's step needs on GPUs that are not present.

    Args:
      c: the configuration.
      hardware: the GPUs.
      sequences: the number of sequences of a micro-batch on each device.
      bf16: the precision to compare with; None: no comparison.
      search: see `plan.plan_step`.
      exact: see `plan.plan_step`.
      log: prints a message.
      on_first_plan: see `plan.plan_step`.
    """
    # Described GPUs: XLA compiles for them without a device.
    mesh = make_target_mesh(
        hardware.target, hardware.gpus, hardware.hosts, *c.parallel.sizes
    )
    ids = vocab_size(c)
    # Without this line 256 ids, of the default data, would plan a smaller model than is
    # meant.
    if c.model.vocab_size is None and c.data.tokenizer == ByteTokenizer.name:
        log(
            f"planned with the vocabulary of data.tokenizer={c.data.tokenizer}: {ids}"
            f" ids; model.vocab_size={GPT2_IDS} plans GPT-2's"
        )
    model = build_model(c.model, c.precision.policy, ids)
    task = build_task(c, model, mesh, None, cached=c.compile_cache is not None)
    # Each replica has the GPUs of the plan, and computes the same as one run alone.
    if (diloco := build_diloco(c)) is not None:
        diloco_task = task._replace(diloco=diloco)
        # `build_task` checked the task without replicas.
        check_fragments(diloco_task)
        sync_bytes = sync_bytes_of(diloco_task)
        for line in describe_syncs(sync_bytes, c.diloco.bandwidth_gbps):
            log(line)
    bf16_task = None
    if bf16 is not None:
        # Without rows, which decide about FP8 matmuls alone.
        bf16_task = task._replace(model=Model.make(model.spec, bf16.policy))

    def batches(sequences: int) -> Tokens:
        rows = sequences * batch_shards(mesh) * c.train.grad_accum_steps
        return build_batch(c, mesh, rows)

    return plan_step(
        task,
        batches,
        hardware,
        sequences=sequences,
        accum=c.train.grad_accum_steps,
        bf16=bf16_task,
        search=search,
        exact=exact,
        log=log,
        on_first_plan=on_first_plan,
    )
