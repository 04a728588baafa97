"""Bytes of DiLoCo's syncs, compared with gradients reduced in every step."""

import math
from typing import NamedTuple

import jax

from trainer.compiled.hlo import Program
from trainer.parallel.diloco import DiLoCoSettings, bytes_of_sync, fragments_of
from trainer.parallel.mesh import REPLICA
from trainer.parallel.replicas import DiLoCoStep
from trainer.workload import TrainTask


class SyncBytes(NamedTuple):
    """Bytes that each device sends to other replicas, on a ring.

    Attributes:
      fragments: bytes of the sync of each fragment.
      every_step: bytes of FP32 gradients in every step, over as many devices.
      settings: the schedule of the syncs.
      are_compiled: whether the bytes are read from compiled programs; else they are
        computed for replicas on machines of their own.
    """

    fragments: tuple[float, ...]
    every_step: float
    settings: DiLoCoSettings
    are_compiled: bool

    @property
    def mean(self) -> float:
        """Mean bytes a step, over a round."""
        return math.fsum(self.fragments) / self.settings.sync_every

    @property
    def reduction(self) -> float:
        """Ratio of the bytes of FP32 gradients in every step to these."""
        if self.mean:
            return self.every_step / self.mean
        return math.inf

    def seconds(self, gbps: float) -> float:
        """Estimate the time of the longest sync at `gbps` Gbit/s per link."""
        return max(self.fragments) * 8 / (gbps * 1e9)

    def up_to(self, step: int) -> float:
        """Return the bytes of the syncs in the first `step` steps."""
        settings, total = self.settings, 0.0
        for fragment, size in enumerate(self.fragments):
            # Fragments sync at equal distances within a round. The first has place 0:
            # step 0 has no sync, so it starts a full round later.
            place = fragment * settings.sync_every // settings.fragments
            count = (step - place) // settings.sync_every + (place > 0)
            # All fragments sync at the last step, whatever their place.
            is_extra = (
                step == settings.last_step and step % settings.sync_every != place
            )
            total += size * (max(0, count) + is_extra)
        return total


def sync_bytes_of(task: TrainTask, step: DiLoCoStep | None = None) -> SyncBytes:
    """Return the bytes of the syncs of a task with DiLoCo.

    They are read from the compiled syncs where each device has one replica.

    Args:
      task: a task with DiLoCo.
      step: its compiled step; None: nothing is read.
    """
    assert task.diloco is not None
    settings = task.diloco
    trained = task.select_trained(task.model.training.shapes)
    sizes = [p.size for p in jax.tree.leaves(trained)]
    replicas = settings.num_replicas
    # Of an all-reduce on a ring, as in `Collective.sent`.
    ring = 2 * (replicas - 1) / replicas
    every_step = 4.0 * ring * sum(sizes)
    devices = task.mesh.size
    # Only then does all that a device sends go to another replica.
    if step is not None and task.mesh.shape[REPLICA] == devices == replicas:
        sent = tuple(bytes_sent(sync, devices) for sync in step.syncs)
        return SyncBytes(sent, every_step, settings, are_compiled=True)
    parts = fragments_of(sizes, settings.fragments)
    computed = (
        bytes_of_sync(sum(sizes[i] for i in part), len(part), settings)
        for part in parts
    )
    return SyncBytes(tuple(computed), every_step, settings, are_compiled=False)


def bytes_sent(program: jax.stages.Compiled, devices: int) -> float:
    """Return the bytes that every device of a compiled program sends, on a ring."""
    return math.fsum(
        collective.sent(devices)
        for collective in Program(program.as_text() or "").collectives
    )
