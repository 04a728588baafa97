"""Throughput, utilization and memory of a run."""

import resource
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from trainer.observe.throughput import GIB, Throughput, memory, mfu
from trainer.run.loop import log_row


@pytest.fixture
def clock():
    """A clock that shows its attribute `now`."""
    clock = mock.Mock(now=100.0)
    clock.side_effect = lambda: clock.now
    return clock


def throughput(clock, **changes):
    """Return a throughput whose first step, which compiles, is over."""
    settings = {"tokens_per_step": 1000, "flops_per_token": 6e6, "devices": 1}
    t = Throughput(**settings | {"peak_flops": 1e12, "clock": clock} | changes)
    assert t.row() == {}
    return t


def test_figures_are_of_a_step_and_of_no_other(clock):
    t = throughput(clock)
    t.waited(0.05)
    t.exclude(2.0)  # a pause is no training time
    clock.now += 2.5
    assert t.row() == pytest.approx(
        {
            "perf/tokens_per_s": 2000.0,  # 1000 tokens in half a second
            "perf/step_ms": 500.0,
            "perf/data_ms": 50.0,
            "perf/mfu": 0.012,  # 2000 tokens/s x 6 MFLOP over 1 TFLOP/s
        }
    )
    clock.now += 0.25
    twice_as_fast = {"perf/tokens_per_s": 4000.0, "perf/mfu": 0.024}
    rest = {"perf/step_ms": 250.0, "perf/data_ms": 0.0}
    assert t.row() == pytest.approx(twice_as_fast | rest)


def test_a_logged_row_is_the_mean_of_the_steps_since_the_one_before(clock):
    t, rows = throughput(clock), []
    session = SimpleNamespace(
        display=SimpleNamespace(update=lambda *_: None),
        tracker=SimpleNamespace(row=lambda step, row: rows.append(row)),
    )
    run = SimpleNamespace(
        session=session, plan=SimpleNamespace(log_every=3), throughput=t
    )
    for step, (seconds, waited) in enumerate([(0.7, 0.1), (0.2, 0.05), (0.6, 0)], 1):
        t.waited(waited)
        clock.now += seconds
        log_row(run, step, t.row())
    [row] = rows
    speed = {"perf/tokens_per_s": 2000.0, "perf/mfu": 0.012}
    assert row == pytest.approx(speed | {"perf/step_ms": 500.0, "perf/data_ms": 50.0})
    assert t.mean_since_last_call() == {}


def test_without_a_known_peak_there_is_no_utilization(clock):
    t = throughput(clock, peak_flops=None)
    clock.now += 1.0
    assert "perf/mfu" not in t.row()


def test_utilization_of_a_published_run():
    """nanoGPT's 124M on 8 A100 at 312 TFLOP/s each: about 178k tokens/s a device at
    857.2 MFLOP a token is 49%."""
    assert mfu(8 * 178_300, 857.2e6, 312e12, 8) == pytest.approx(0.49, abs=0.005)


def test_device_memory_is_the_peak_of_the_fullest_device(monkeypatch):
    devices = [
        SimpleNamespace(memory_stats=lambda stats=stats: stats)
        for stats in ({"peak_bytes_in_use": 3 * GIB}, {"peak_bytes_in_use": 5 * GIB})
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory()["memory/device_peak_gib"] == 5.0
    for stats in (None, {}, {"bytes_in_use": 1}):
        device = SimpleNamespace(memory_stats=lambda stats=stats: stats)
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert set(memory()) == {"memory/host_peak_gib"}


def test_host_memory_is_that_of_this_process_alone(monkeypatch):
    """Linux hands `ru_maxrss` down to a process that is started."""
    usage = SimpleNamespace(ru_maxrss=2**40)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    assert 0.05 < memory()["memory/host_peak_gib"] < 64
