"""The bytes of the exchanges of a run with local steps, beside those of gradients that are reduced in every step."""

import math
from typing import NamedTuple

import jax

from trainer.compiled.hlo import Program
from trainer.parallel.local import Local, bytes_of_exchange, fragments_of
from trainer.parallel.mesh import LOCAL
from trainer.parallel.replicas import LocalStep
from trainer.workload import Task


class Exchanges(NamedTuple):
    """What each device sends to other replicas, in bytes, on a ring.

    Attributes:
      fragments: in the exchange of each fragment.
      every_step: FP32 gradients of every step would be, over as many devices.
      local: when which fragment is exchanged.
      read: whether the compiled programs say so; else it is what replicas on machines of their own would send.
    """

    fragments: tuple[float, ...]
    every_step: float
    local: Local
    read: bool

    @property
    def mean(self) -> float:
        """Bytes a step, on average over a round."""
        return math.fsum(self.fragments) / self.local.steps

    @property
    def fewer(self) -> float:
        """How many times fewer bytes than FP32 gradients in every step."""
        return self.every_step / self.mean if self.mean else math.inf

    def seconds(self, gbps: float) -> float:
        """An estimate of the longest exchange, at so many gigabits a second between any two neighbours."""
        return max(self.fragments) * 8 / (gbps * 1e9)

    def up_to(self, step: int) -> float:
        """Bytes of the exchanges of the first `step` steps."""
        total = 0.0
        for fragment, size in enumerate(self.fragments):
            place = fragment * self.local.steps // self.local.fragments
            count = (step - place) // self.local.steps + (place > 0)
            last = step == self.local.last and step % self.local.steps != place
            total += size * (max(0, count) + last)
        return total


def exchanges_of(task: Task, step: LocalStep | None = None) -> Exchanges:
    """The figures of a task with local steps, read from its compiled exchanges where each device has one replica.

    `step`: compiled; None: nothing is read.
    """
    assert task.local is not None
    local, like = task.local, jax.eval_shape(task.model.training.init, jax.random.key(0))
    sizes = [p.size for p in jax.tree.leaves(task.trained(like))]
    ring = 2 * (local.replicas - 1) / local.replicas
    every = 4.0 * ring * sum(sizes)
    if step is not None and task.mesh.shape[LOCAL] == task.mesh.size == local.replicas:
        return Exchanges(tuple(bytes_sent(exchange, task.mesh.size) for exchange in step.exchanges), every, local, True)
    parts = fragments_of(sizes, local.fragments)
    computed = (bytes_of_exchange(sum(sizes[i] for i in part), len(part), local) for part in parts)
    return Exchanges(tuple(computed), every, local, False)


def bytes_sent(program: jax.stages.Compiled, devices: int) -> float:
    """Bytes that every one of the devices of a compiled program sends, on a ring."""
    return math.fsum(collective.sent(devices) for collective in Program(program.as_text() or "").collectives)
