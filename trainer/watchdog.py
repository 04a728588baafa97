"""No NaN is trained on: the step leaves the state as it was; here the skips are counted, bounded and explained."""

from collections.abc import Mapping
from typing import Any


class Watchdog:
    """Counts skipped steps; too many in a row exhaust it.

    Args:
      max_skips: this many in a row are too many.
      leaves: names of the parameters in the order of their flattened tree, for messages.
      state: of an earlier part of the run, as `state()` gave it.
    """

    def __init__(self, max_skips: int, leaves: list[str], state: Mapping[str, Any] | None = None) -> None:
        self.max_skips = max_skips
        self.leaves = leaves
        self.skipped: int = state["skipped"] if state else 0
        self.in_a_row: int = state["in_a_row"] if state else 0
        self._last = ""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Take a step's metrics (`loss`, `grad_norm`, `finite`, `bad_leaf`); an event in words when it was skipped."""
        if metrics["finite"]:
            self.in_a_row = 0
            return None
        self.skipped += 1
        self.in_a_row += 1
        leaf = int(metrics["bad_leaf"])
        where = f"first bad gradient: {self.leaves[leaf]}" if leaf >= 0 else "every gradient leaf is finite"
        self._last = f"loss {metrics['loss']:g}, grad_norm {metrics['grad_norm']:g}, {where}"
        return f"step {step} skipped ({self._last}); {self.in_a_row} in a row, {self.max_skips} stop the run"

    @property
    def exhausted(self) -> bool:
        """Whether the run must stop."""
        return self.in_a_row >= self.max_skips

    def row(self) -> dict[str, int]:
        """For the dashboard."""
        return {"watchdog/skipped": self.skipped}

    def state(self) -> dict[str, int]:
        """JSON values for a checkpoint, so that a resumed run counts on."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def report(self, step: int) -> str:
        """Why the run stops after `step`, in one line."""
        return f"step {step}: {self.in_a_row} steps in a row were not finite ({self._last})"
