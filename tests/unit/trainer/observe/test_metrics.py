from types import SimpleNamespace

import jax
import pytest

from trainer.observe import metrics
from trainer.observe.metrics import GIB, Throughput, memory, mfu
from trainer.run.loop import log_row


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def throughput(clock, **changes):
    return Throughput(
        **{
            "tokens_per_step": 1000,
            "flops_per_token": 6e6,
            "peak_flops": 1e12,
            "devices": 1,
            "clock": clock,
        }
        | changes
    )


def test_the_first_step_which_compiles_gives_no_figures(clock):
    assert throughput(clock).row() == {}


def test_figures_are_of_a_step_and_of_no_other(clock):
    t = throughput(clock)
    t.row()
    t.waited(0.05)
    clock.now += 0.5
    figures = {
        "perf/tokens_per_s": 2000.0,  # 1000 tokens in half a second
        "perf/step_ms": 500.0,
        "perf/data_ms": 50.0,
        "perf/mfu": 0.012,  # 2000 tokens/s x 6 MFLOP over 1 TFLOP/s
    }
    assert t.row() == pytest.approx(figures)
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
    t.row()
    for step, (seconds, waited) in enumerate([(0.7, 0.1), (0.2, 0.05), (0.6, 0)], 1):
        t.waited(waited)
        clock.now += seconds
        log_row(run, step, t.row())
    assert rows == [
        pytest.approx(
            {
                "perf/tokens_per_s": 2000.0,
                "perf/step_ms": 500.0,
                "perf/data_ms": 50.0,
                "perf/mfu": 0.012,
            }
        )
    ]
    assert t.mean_since_last_call() == {}


def test_pauses_are_no_training_time(clock):
    t = throughput(clock)
    t.row()
    t.exclude(2.0)
    clock.now += 2.5
    assert t.row()["perf/step_ms"] == pytest.approx(500.0)


def test_without_a_known_peak_there_is_no_utilisation(clock):
    t = throughput(clock, peak_flops=None)
    t.row()
    clock.now += 1.0
    assert "perf/mfu" not in t.row()


def test_utilisation_is_of_all_devices_together(clock):
    """Eight devices that do a step of the same tokens in the same time are used an
    eighth as well."""
    rows = []
    for devices in (1, 8):
        t = throughput(clock, devices=devices)
        t.row()
        clock.now += 1.0
        rows.append(t.row()["perf/mfu"])
    assert rows[0] == pytest.approx(8 * rows[1])


def test_utilisation_of_a_published_run():
    """nanoGPT's 124M on 8 A100 at 312 TFLOP/s each: about 178k tokens/s a device at
    857.2 MFLOP a token is 49%."""
    assert mfu(8 * 178_300, 857.2e6, 312e12, 8) == pytest.approx(0.49, abs=0.005)


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_device_memory_is_the_peak_of_the_fullest_device():
    devices = [
        Device({"peak_bytes_in_use": 3 * GIB}),
        Device({"peak_bytes_in_use": 5 * GIB, "bytes_in_use": GIB}),
    ]
    assert memory(devices)["memory/device_peak_gib"] == 5.0


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 1}])
def test_what_a_device_does_not_report_is_left_out(stats):
    assert set(memory([Device(stats)])) == {"memory/host_peak_gib"}


def test_host_memory_is_not_that_of_the_process_that_started_this_one(monkeypatch):
    """Linux hands `ru_maxrss` down to a process that is started."""
    usage = SimpleNamespace(ru_maxrss=2**40)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda _: usage)
    assert memory()["memory/host_peak_gib"] < 2**10


def test_host_memory_is_this_process():
    before = memory()["memory/host_peak_gib"]
    block = bytearray(GIB // 4)
    block[::4096] = b"x" * len(block[::4096])
    after = memory()["memory/host_peak_gib"]
    assert 0.05 < before < 64
    assert before <= after <= before + 0.5
    assert jax.devices()[0].platform == "cpu"
