"""Metrics of a run that the train step does not return: speed, utilization, memory.

Tokens and utilization are totals over all devices and micro-batches.
"""

import contextlib
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

GIB = 2**30


class Throughput:
    """A meter of the speed of steps.

    It reads the host's clock when the device is known to have finished a step.

    Args:
      tokens_per_step: tokens trained on in a step, over all devices and micro-batches.
      flops_per_token: FLOPs of the forward and backward pass of the whole model
          (`flops.flops_per_token`).
      peak_flops: FLOP/s of one device in the compute dtype; None: unknown (a CPU), and
          the utilization is left out.
      devices: number of devices that share a step.
      clock: returns seconds; for tests.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        devices: int,
        # Not `time.time`, which jumps when the machine's clock is set.
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
        # seconds and waits of the steps since the last `mean_since_last_call`
        self._steps: list[tuple[float, float]] = []

    def waited(self, seconds: float) -> None:
        """Count time spent waiting for the next batch."""
        self._waited += seconds

    def exclude(self, seconds: float) -> None:
        """Exclude time that is not training: validation, saving, sampling."""
        self._paused += seconds

    def row(self) -> dict[str, float]:
        """Return `perf/*` of the step that has just finished.

        Call it once a step, when the step's metrics have arrived. The first call
        returns an empty row, because its time is mostly compilation. `perf/mfu` (a
        share of 1) needs a known peak.
        """
        now = self._clock()
        if self._since is not None:
            # The time of callbacks is taken out; that of waiting for data is not, since
            # a slow loader slows the training.
            self._steps.append((now - self._since - self._paused, self._waited))
        self._since, self._paused, self._waited = now, 0.0, 0.0
        if not self._steps:
            return {}
        return self._figures(*self._steps[-1])

    def mean_since_last_call(self) -> dict[str, float]:
        """Return the means of `perf/*` over the steps since the previous call.

        Empty if there are none. Single steps are timed badly: the host starts step n+1
        before it waits for step n.
        """
        if not self._steps:
            return {}
        seconds, waits = zip(*self._steps, strict=True)
        self._steps = []
        return self._figures(statistics.fmean(seconds), statistics.fmean(waits))

    def _figures(self, seconds: float, waited: float) -> dict[str, float]:
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
    """Return the model FLOPs utilization, a share of 1.

    It is the model's FLOP/s over the peak of `devices` devices. Recomputation under
    remat is not counted (Chowdhery et al. 2022, PaLM, appendix B).
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices)


def memory() -> dict[str, float]:
    """Return the peak memory in GiB of this process.

    `memory/device_peak_gib` is the largest peak of its accelerators; CPUs do not report
    one. `memory/host_peak_gib` is the largest resident set. Neither falls, so in a
    sweep a job reports the largest peak of all jobs so far.
    """
    # `memory_stats` returns None on a CPU.
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    row = {"memory/host_peak_gib": host_peak() / GIB}
    if peaks:
        row["memory/device_peak_gib"] = max(peaks) / GIB
    return row


def host_peak() -> int:
    """Return the largest resident set of this process, in bytes."""
    # Linux lets ru_maxrss begin with the peak of the process that started this one.
    # There is no /proc on macOS.
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if peak := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(peak[1]) * 1024
    # `ru_maxrss` is in bytes on macOS, in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
