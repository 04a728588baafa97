"""The bytes of the exchanges of a run with DiLoCo, beside those of gradients that are
reduced in every step.
"""

import math
from typing import NamedTuple

import jax

from trainer.compiled.hlo import Program
from trainer.parallel.diloco import DiLoCoSettings, bytes_of_exchange, fragments_of
from trainer.parallel.mesh import REPLICA
from trainer.parallel.replicas import DiLoCoStep
from trainer.workload import TrainTask


class Exchanges(NamedTuple):
    """What each device sends to other replicas, in bytes, on a ring.

    Attributes:
      fragments: in the exchange of each fragment.
      every_step: FP32 gradients of every step would be, over as many devices.
      diloco: when which fragment is exchanged.
      read: whether the compiled programs say so; else it is what replicas on machines
          of their own would send.
    """

    fragments: tuple[float, ...]
    every_step: float
    diloco: DiLoCoSettings
    read: bool

    @property
    def mean(self) -> float:
        """Bytes a step, on average over a round."""
        return math.fsum(self.fragments) / self.diloco.steps

    @property
    def fewer(self) -> float:
        """How many times fewer bytes than FP32 gradients in every step."""
        return self.every_step / self.mean if self.mean else math.inf

    def seconds(self, gbps: float) -> float:
        """An estimate of the longest exchange, at so many gigabits a second between any
        two neighbors.
        """
        return max(self.fragments) * 8 / (gbps * 1e9)

    def up_to(self, step: int) -> float:
        """Bytes of the exchanges of the first `step` steps."""
        total = 0.0
        for fragment, size in enumerate(self.fragments):
            place = fragment * self.diloco.steps // self.diloco.fragments
            count = (step - place) // self.diloco.steps + (place > 0)
            last = step == self.diloco.last and step % self.diloco.steps != place
            total += size * (max(0, count) + last)
        return total


def exchanges_of(task: TrainTask, step: DiLoCoStep | None = None) -> Exchanges:
    """The figures of a task with DiLoCo, read from its compiled exchanges where each
    device has one replica.

    `step`: compiled; None: nothing is read.
    """
    assert task.diloco is not None
    diloco, like = (
        task.diloco,
        jax.eval_shape(task.model.training.init, jax.random.key(0)),
    )
    sizes = [p.size for p in jax.tree.leaves(task.trained(like))]
    ring = 2 * (diloco.replicas - 1) / diloco.replicas
    every = 4.0 * ring * sum(sizes)
    if (
        step is not None
        and task.mesh.shape[REPLICA] == task.mesh.size == diloco.replicas
    ):
        return Exchanges(
            tuple(bytes_sent(exchange, task.mesh.size) for exchange in step.exchanges),
            every,
            diloco,
            True,
        )
    parts = fragments_of(sizes, diloco.fragments)
    computed = (
        bytes_of_exchange(sum(sizes[i] for i in part), len(part), diloco)
        for part in parts
    )
    return Exchanges(tuple(computed), every, diloco, False)


def bytes_sent(program: jax.stages.Compiled, devices: int) -> float:
    """Bytes that every one of the devices of a compiled program sends, on a ring."""
    return math.fsum(
        collective.sent(devices)
        for collective in Program(program.as_text() or "").collectives
    )
