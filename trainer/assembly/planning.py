"""From a checked configuration to the plan of its step on GPUs that are not there."""

from collections.abc import Callable
from pathlib import Path

from trainer.assembly.build import (
    build_diloco,
    build_model,
    build_optimizer,
    build_policy,
    build_reduce,
    build_sizes,
    check_fragments,
    check_split,
    check_trainable,
)
from trainer.compiled.exchange import exchanges_of
from trainer.config import schema
from trainer.data import Manifest
from trainer.data.tokenizer import get_tokenizer
from trainer.parallel.mesh import abstract_batch, batch_devices
from trainer.plan.aot import make_target_mesh
from trainer.plan.figures import Aim
from trainer.plan.plan import Plan, make_plan
from trainer.report.messages import describe_exchanges
from trainer.step.kernels import Kernels
from trainer.step.step import Tokens
from trainer.workload import Model, TrainTask


def vocabulary(c: schema.Config) -> int:
    """How many ids there are, the data not read."""
    if c.model.vocab_size is not None:
        return c.model.vocab_size
    if c.data.source == "prepared":
        return Manifest.load(Path(c.data.prepared_dir or "")).vocab_size
    return get_tokenizer(c.data.tokenizer or "").vocab_size


def build_plan(
    c: schema.Config,
    aim: Aim,
    *,
    sequences: int,
    bf16: schema.Precision | None,
    search: bool,
    exact: bool,
    say: Callable[[str], None],
) -> Plan:
    """What the step of a configuration needs and does on GPUs that are not there; see
    `plan.make_plan`.

    `bf16`: the configuration of what it is compared with; None: not compared.
    """
    mesh = make_target_mesh(aim.target, aim.gpus, aim.hosts, *build_sizes(c.parallel))
    model = build_model(c.model, build_policy(c.precision), vocabulary(c))
    check_split(model, mesh)
    kernels = Kernels.of(c.deterministic, cached=c.compile_cache is not None)
    reduce, optimizer = build_reduce(c.parallel), build_optimizer(c.optimizer)
    task = TrainTask(
        model,
        c.optimizer.name,
        optimizer,
        mesh,
        reduce,
        kernels,
        c.train.trainable or (),
    )
    check_trainable(task)
    # each replica has the GPUs of the plan: what it computes is the same
    if (diloco := build_diloco(c)) is not None:
        check_fragments(task._replace(diloco=diloco))
        for line in describe_exchanges(
            exchanges_of(task._replace(diloco=diloco)), c.diloco.bandwidth_gbps
        ):
            say(line)
    other = (
        None
        if bf16 is None
        else task._replace(model=Model.make(model.spec, build_policy(bf16)))
    )

    def batches(sequences: int) -> Tokens:
        rows = sequences * batch_devices(mesh) * c.train.grad_accum_steps
        return abstract_batch(
            c.train.grad_accum_steps,
            rows,
            c.model.context,
            document_mask=c.data.document_mask,
            mesh=mesh,
        )

    return make_plan(
        task,
        batches,
        aim,
        sequences=sequences,
        accum=c.train.grad_accum_steps,
        bf16=other,
        search=search,
        exact=exact,
        log=say,
    )
