"""The watchdog: it skips non-finite steps, detects spikes, and decides on rollbacks.

A step that is not finite leaves the state unchanged. Too many of them in a row cause a
rollback, and so do several losses in a row far above the earlier ones. A rollback
restores the last checkpoint before these steps. Steps and batches go on, so the bad
batches are left out. The number of rollbacks is bounded; then the run stops.

`trainer.step.nonfinite` explains a NaN: it finds the first operation whose result is
not finite although its operands are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from trainer.bounds import Bound, Natural

# Nats. Without it, a small change of a nearly constant loss would be a spike.
MIN_STANDARD_DEVIATION = 0.01


@dataclass(frozen=True)
class Bounds:
    """Thresholds of the watchdog.

    Attributes:
      max_skips: non-finite steps in a row that cause a rollback.
      spike_zscore: a loss is a spike if it is more than this number of standard
        deviations above the mean of the last `spike_window` good losses; 0: never.
      spike_window: number of good losses in that mean; until the window is full, no
        loss is a spike.
      spike_steps: spikes in a row that cause a rollback.
      max_rollbacks: number of rollbacks in the whole run; instead of the next one the
        run stops.
      loss_scale_skips: number of skipped steps in a row that finding the initial loss
        scale may take. A run may end with this many; with more it has failed.
    """

    max_skips: int
    spike_zscore: float
    spike_window: int
    spike_steps: int
    max_rollbacks: int
    loss_scale_skips: int = 0


# The squares of losses from 1.35e154 on overflow FP64, which Python raises as an error.
Loss = Annotated[float, Bound(lambda x: abs(x) < 1e100, "a number below 1e100")]


@dataclass
class WatchdogState:
    """The counts of a watchdog.

    Attributes:
      skipped: number of steps that were not finite.
      in_a_row: number of such steps since the last finite one.
      spikes: number of spikes since the last good loss.
      suspect_since: the first of the last steps in a row that were skipped or spiked;
        None: the last step was good.
      rollbacks: number of rollbacks in the whole run.
      rolled_back_at: the step after which the last rollback was; None: there was none.
      losses: the last good losses, whose mean and deviation define a spike.
      failure: why the run failed although it took all its steps; None: it did not fail,
        or has not ended.
    """

    skipped: Natural = 0
    in_a_row: Natural = 0
    spikes: Natural = 0
    suspect_since: Natural | None = None
    rollbacks: Natural = 0
    rolled_back_at: Natural | None = None
    losses: tuple[Loss, ...] = ()
    failure: str | None = None


class Watchdog(WatchdogState):
    """Checks the metrics of every step, in order.

    Its decisions depend on the metrics alone, so a resumed run makes the same ones.

    Args:
      bounds: its thresholds.
      leaves: names of the parameters in the order of their flattened tree, for
        messages.
      state: the result of `state()` in a checkpoint; None: a new run.

    Attributes:
      rollback_reason: why the run cannot go on from its state; None: it can.
        `rolled_back` and `restart_spike_window` reset it.
    """

    def __init__(
        self, bounds: Bounds, leaves: list[str], state: Mapping[str, Any] | None = None
    ) -> None:
        # The bounds are not part of the state: a resumed run may change them.
        super().__init__(**(state or {}))
        self.bounds = bounds
        self.leaves = leaves
        self.rollback_reason: str | None = None
        # A resumed run may have a shorter window.
        self.losses = tuple(self.losses)[-bounds.spike_window :]

    def observe(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Take a step's metrics (`loss`, `grad_norm`, `finite`, `bad_leaf`); return an
        event to log, or None.
        """
        # A run that failed at its end may be resumed with more steps.
        self.failure = None
        if not metrics["finite"]:
            return self._skip(step, metrics)
        self.in_a_row = 0
        # The spike itself never enters the window: it would raise the mean that judges
        # the next.
        score = self._score(metrics["loss"])
        if score > self.bounds.spike_zscore > 0:
            return self._spike(step, metrics["loss"], score)
        losses = (*self.losses, metrics["loss"])
        self.losses = losses[-self.bounds.spike_window :]
        self.spikes, self.suspect_since = 0, None
        return None

    def _skip(self, step: int, metrics: Mapping[str, Any]) -> str:
        self.skipped += 1
        self.in_a_row += 1
        self.suspect_since = self.suspect_since or step
        leaf = int(metrics["bad_leaf"])
        where = "every gradient leaf is finite"
        if leaf >= 0:
            where = f"first bad gradient: {self.leaves[leaf]}"
        values = f"loss {metrics['loss']:g}, grad_norm {metrics['grad_norm']:g}"
        details = f"{values}, {where}"
        # A skipped step changes no weight: a few are bad batches, many in a row a bad
        # state.
        if self.in_a_row >= self.bounds.max_skips:
            self.rollback_reason = (
                f"{self.in_a_row} steps in a row were not finite ({details})"
            )
        return (
            f"step {step} skipped ({details}): {self.in_a_row} in a row;"
            f" {self.bounds.max_skips} cause a rollback"
        )

    def _spike(self, step: int, loss: float, score: float) -> str | None:
        self.spikes += 1
        self.suspect_since = self.suspect_since or step
        details = (
            f"loss {loss:.4g}, {score:.1f} standard deviations above the mean of the"
            f" {len(self.losses)} before"
        )
        if self.spikes >= self.bounds.spike_steps:
            self.rollback_reason = (
                f"{self.spikes} losses in a row were spikes ({details})"
            )
        # An event for each spike of a series would bury the first one in the log.
        if self.spikes > 1:
            return None
        return (
            f"step {step}: spike ({details}); {self.bounds.spike_steps} in a row cause"
            " a rollback"
        )

    def _score(self, loss: float) -> float:
        """Return the standard deviations above the mean of the window; 0 until it
        is full.
        """
        losses = self.losses
        # The loss falls fast at first, and a few losses say little about its deviation.
        if len(losses) < self.bounds.spike_window:
            return 0.0
        mean = math.fsum(losses) / len(losses)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / len(losses))
        return (loss - mean) / max(deviation, MIN_STANDARD_DEVIATION)

    def check_state(self, step: int, nonfinite: str | None) -> None:
        """Check the state after a step.

        `nonfinite`: the name of its first array that is not finite; None: all are
        finite.
        """
        if nonfinite is not None:
            self.rollback_reason = f"{nonfinite} is not finite after step {step}"
            # Only after a spike may `recover` continue without a rollback.
            self.spikes = 0

    def finish(self, step: int, val_losses: Sequence[float]) -> None:
        """Set `failure` after the last step of a run.

        `val_losses`: those of the last validation, nats; empty: there was none.
        """
        nonfinite = [loss for loss in val_losses if not math.isfinite(loss)]
        if self.in_a_row > self.bounds.loss_scale_skips:
            self.failure = (
                f"the last {self.in_a_row} steps were not finite and were skipped"
            )
        # A run of fewer steps than `loss_scale_skips` ends within that bound.
        elif self.skipped >= step:
            self.failure = "no step was finite, so all were skipped"
        # Nothing was trained after it, so the last weights are those of an earlier
        # step.
        elif self.rolled_back_at == step:
            self.failure = "the run was rolled back after its last step"
        elif nonfinite:
            self.failure = f"the validation loss after the last step is {nonfinite[0]}"

    @property
    def is_spiking(self) -> bool:
        """Return whether the last losses were spikes, so the state should not be saved.

        After skipped steps it may be saved, because they leave it unchanged.
        """
        return self.spikes > 0

    @property
    def may_roll_back(self) -> bool:
        """Return whether another rollback is allowed."""
        return self.rollbacks < self.bounds.max_rollbacks

    def rolled_back(self, step: int) -> None:
        """Record that the state was rolled back after this step."""
        self.rollbacks += 1
        self.rolled_back_at = step
        # `losses` stay: they are of good steps, and the next ones are compared with
        # them.
        self.rollback_reason, self.suspect_since = None, None
        self.in_a_row = self.spikes = 0

    def restart_spike_window(self) -> None:
        """Forget earlier losses, so that spikes are measured by those from now on."""
        self.losses = ()
        self.rollback_reason, self.suspect_since = None, None
        self.spikes = 0

    def row(self) -> dict[str, int]:
        """Return the metrics of the watchdog for the row of a step."""
        return {"watchdog/skipped": self.skipped, "watchdog/rollbacks": self.rollbacks}

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint, with which a resumed run continues."""
        return asdict(self)
