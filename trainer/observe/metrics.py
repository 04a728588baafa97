"""Figures about the run itself: throughput, utilization, memory. Losses and norms come
from the step.

Tokens are counted over all devices and micro-batches; utilization is of all devices
together.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence

import jax

GIB = 2**30


class Throughput:
    """Speed, from the host's clock at the moments when the device is known to have
    finished a step.

    Args:
      tokens_per_step: global: sequences x context, over all devices and micro-batches.
      flops_per_token: forward and backward, of the whole model
          (`flops.flops_per_token`).
      peak_flops: of one device in the compute dtype, per second; None when unknown (a
          CPU): no utilization then.
      devices: how many share a step.
      clock: seconds; for tests.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        devices: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.devices = devices
        self._clock = clock
        self._since: float | None = None
        self._paused = 0.0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for the next batch."""
        self._waited += seconds

    def pause(self, seconds: float) -> None:
        """Leave out time that is no training: validation, saving, sampling."""
        self._paused += seconds

    def row(self) -> dict[str, float]:
        """`perf/*` of the step that has just finished: call it once a step, when its
        metrics have arrived.

        Empty for the first one, whose time is mostly compilation. `perf/mfu` (a share)
        only where the peak is known.
        """
        now = self._clock()
        since, paused, waited = self._since, self._paused, self._waited
        self._since, self._paused, self._waited = now, 0.0, 0.0
        if since is None:
            return {}
        seconds = now - since - paused
        tokens_per_s = self.tokens_per_step / seconds
        row = {
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_ms": 1e3 * seconds,
            "perf/data_ms": 1e3 * waited,
        }
        if self.peak_flops is not None:
            row["perf/mfu"] = mfu(
                tokens_per_s, self.flops_per_token, self.peak_flops, self.devices
            )
        return row


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops: float, devices: int
) -> float:
    """Model FLOPs utilization, a share of 1: the model's FLOPs per second over what
    `devices` devices could do at most.

    Recomputation under remat is not counted as useful (Chowdhery et al. 2022, PaLM,
    appendix B).
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices)


def memory(devices: Sequence[jax.Device] | None = None) -> dict[str, float]:
    """GiB. `memory/device_peak_gib`: the most any of this process's accelerators ever
    held; `memory/host_peak_gib`: the resident set of this process at its largest, the
    only figure on a CPU, which reports no device memory of its own.
    """
    stats = [
        device.memory_stats()
        for device in (jax.local_devices() if devices is None else devices)
    ]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    # ru_maxrss: bytes on macOS, KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    row = {
        "memory/host_peak_gib": (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
        )
    }
    if peaks:
        row["memory/device_peak_gib"] = max(peaks) / GIB
    return row
