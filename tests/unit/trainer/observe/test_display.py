"""The display of a run: a live line in a terminal, plain lines elsewhere."""

import io
import logging
import os
from unittest import mock

import pytest

from trainer.observe.display import PLAIN_SECONDS, Display, Output

ROW = {
    "train/loss": 3.14159,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens": 100,
    "perf/tokens_per_s": 12345.6,
    "perf/step_ms": 10.0,
    "memory/host_peak_gib": 0.5,
}


@pytest.fixture
def clock():
    """A clock that shows its attribute `now`."""
    clock = mock.Mock(now=0.0)
    clock.side_effect = lambda: clock.now
    return clock


def make(clock, steps=100, terminal=False):
    stream = io.StringIO()
    environ = {"TERM": "xterm"}
    console = Output(
        file=stream, force_terminal=terminal, soft_wrap=True, _environ=environ
    )
    return Display(steps, console=console, clock=clock), stream


def test_plain_lines_come_every_few_seconds_with_validations_and_at_the_end(clock):
    display, stream = make(clock)
    with display:
        for step in range(1, 101):
            clock.now += PLAIN_SECONDS / 10
            display.update(step, ROW | ({"val/loss": 2.0} if step == 2 else {}))
    text = stream.getvalue()
    steps = [line.split()[1] for line in text.splitlines()]
    assert steps == [f"{step}/100" for step in (1, 2, *range(12, 100, 10), 100)]
    assert "\x1b" not in text


def test_a_plain_line_has_every_figure(clock):
    display, stream = make(clock)
    figures = {"val/loss": 3.5, "perf/mfu": 0.4321, "watchdog/skipped": 2}
    with display:
        display.update(1, ROW | figures)
    assert stream.getvalue() == (
        "step 1/100  loss 3.1416  val 3.5000  lr 1.00e-03  norm 0.5  skipped 2  "
        "ms/step 10.0  12.3k tokens/s  mfu 43.2%  GiB 0.50  eta 0:00:01\n"
    )


def test_the_speed_is_the_mean_of_the_last_steps(clock):
    display, stream = make(clock)
    slow = {"perf/step_ms": 30.0, "perf/tokens_per_s": 1000.0, "perf/mfu": 0.1}
    fast = {"perf/step_ms": 10.0, "perf/tokens_per_s": 3000.0, "perf/mfu": 0.3}
    with display:
        display.update(1, ROW | slow)
        clock.now += PLAIN_SECONDS
        for step in range(2, 100):
            display.update(step, ROW | fast)
        display.update(100, ROW | slow)
    _, second, last = stream.getvalue().splitlines()
    # 60 tokens in 40 ms
    assert "ms/step 20.0  1.5k tokens/s  mfu 15.0%  (mean of 2 steps)  GiB" in second
    assert "ms/step 10.3  2.91k tokens/s  mfu 29.1%  (mean of 64 steps)  GiB" in last


def test_the_time_left_is_that_of_steps_and_pauses_but_no_second_compilation(clock):
    display, _ = make(clock)
    assert display.eta() == "-:--:--"
    display.record_pause("evaluation", 10, 47.0)
    display.record_pause("samples", 0, 5.0)
    display.update(50, ROW | {"perf/step_ms": 1000.0})
    assert display.eta() == "0:00:50"
    display.record_pause("evaluation", 10, 3.0)
    display.update(60, ROW | {"perf/step_ms": 1000.0})
    assert display.eta() == "0:00:52"  # 40 steps of 1 s, 4 validations of 3 s


def test_in_a_terminal_the_line_is_live_and_messages_stay_above(clock):
    display, stream = make(clock, terminal=True)
    with display:
        display.update(50, ROW)
        display.event(50, "skipped [not markup]")
        logging.getLogger("trainer.run.checkpoint").warning("a damaged checkpoint")
    text = stream.getvalue()
    for part in (
        "\x1b[",
        "step 50: skipped [not markup]",
        "a damaged checkpoint",
        "step 50/100",
        "50%",
        "12.3k tokens/s",
    ):
        assert part in text


def test_a_text_is_no_markup_and_does_not_command_a_terminal():
    file = io.StringIO()
    Output(file=file, force_terminal=True).print("x[/x] [red]a\x1b]0;OWNED\a")
    assert file.getvalue() == "x[/x] [red]a\\x1b]0;OWNED\\x07\n"


def test_a_run_whose_output_nobody_reads_any_more_goes_on():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        display = Display(10, console=Output(file=pipe, soft_wrap=True))
        display.message("to nobody")
        display.message("to nobody, again")
        assert display.console.quiet


def test_a_run_whose_output_goes_to_a_full_disk_goes_on_and_says_so_once(capsys):
    with open("/dev/full", "w") as full:
        display = Display(10, console=Output(file=full, soft_wrap=True))
        display.message("lost")
        display.message("lost, too")
    assert capsys.readouterr().err == (
        "error: cannot write to standard output: No space left on device; the run"
        " continues without it\n"
    )
