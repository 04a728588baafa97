import functools
import io
import logging
import os
import sys
from unittest import mock

import pytest

from trainer.observe.display import (
    PLAIN_SECONDS,
    SPARKS,
    Display,
    Output,
    short,
    sparkline,
)

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
    console = Output(
        file=stream,
        force_terminal=terminal,
        width=100,
        soft_wrap=True,
        _environ={"TERM": "xterm"},
    )
    return Display(steps, console=console, clock=clock), stream


def test_without_a_terminal_there_are_plain_lines_every_few_seconds(clock):
    display, stream = make(clock)
    with display:
        for step in range(1, 100):
            clock.now += PLAIN_SECONDS / 10
            display.update(step, ROW)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [
        f"{step}/100" for step in range(1, 100, 10)
    ]
    assert "mfu n/a" in lines[0]  # the peak of this device is not known
    assert "\x1b" not in stream.getvalue()


def test_a_plain_line_says_it_all(clock):
    display, stream = make(clock)
    with display:
        display.update(
            1, ROW | {"val/loss": 3.5, "perf/mfu": 0.4321, "watchdog/skipped": 2}
        )
    assert (
        stream.getvalue()
        == "step 1/100  loss 3.1416  val 3.5000  lr 1.00e-03  norm 0.5  skipped 2  "
        "ms/step 10.0  12.3k tokens/s  mfu 43.2%  GiB 0.50  eta 0:00:01\n"
    )


def test_the_speed_is_the_mean_of_the_last_steps_and_says_of_how_many(clock):
    display, stream = make(clock, steps=1000)
    slow = {"perf/step_ms": 30.0, "perf/tokens_per_s": 1000.0, "perf/mfu": 0.1}
    fast = {"perf/step_ms": 10.0, "perf/tokens_per_s": 3000.0, "perf/mfu": 0.3}
    with display:
        display.update(1, ROW | slow)
        clock.now += PLAIN_SECONDS
        display.update(2, ROW | fast)  # 60 tokens in 40 ms
        for step in range(3, 100):
            display.update(step, ROW | fast)
        clock.now += PLAIN_SECONDS
        display.update(100, ROW | slow)
    first, second, last = stream.getvalue().splitlines()
    assert "ms/step 30.0  1k tokens/s  mfu 10.0%  GiB" in first
    assert "ms/step 20.0  1.5k tokens/s  mfu 15.0%  (mean of 2 steps)  GiB" in second
    assert "ms/step 10.3  2.91k tokens/s  mfu 29.1%  (mean of 64 steps)  GiB" in last


def test_validations_and_the_last_step_are_never_left_out(clock):
    display, stream = make(clock, steps=4)
    with display:
        for step in range(1, 5):
            display.update(step, ROW | ({"val/loss": 2.0} if step == 2 else {}))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == [
        "1/4",
        "2/4",
        "4/4",
    ]


def test_the_time_left_is_the_steps_left_at_the_speed_shown(clock):
    display, _ = make(clock, steps=600)
    without = {key: value for key, value in ROW.items() if key != "perf/step_ms"}
    clock.now = 50.0
    display.update(501, without)
    assert display.eta() == "-:--:--"
    for step in range(502, 511):
        clock.now += 2.0 if step != 505 else 47.0  # compiling per-layer numerics
        display.update(step, ROW | {"perf/step_ms": 2000.0})
    assert display.eta() == "0:03:00"  # 90 steps of 2 s


def test_the_time_left_has_the_validations_left_but_no_second_compilation(clock):
    display, _ = make(clock, steps=100)
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
    assert "\x1b[" in text
    assert "step 50: skipped [not markup]" in text
    assert "a damaged checkpoint" in text
    assert "step 50/100" in text
    assert "50%" in text


def test_every_figure_is_seen_in_a_terminal_of_80_columns(clock):
    stream = io.StringIO()
    console = Output(file=stream, width=80)
    display = Display(100_000, console=console, clock=clock)
    large = {
        "perf/step_ms": 98765.4,
        "perf/tokens_per_s": 12.3e6,
        "perf/mfu": 0.4321,
        "memory/device_peak_gib": 137.25,
        "val/loss": 13.5,
        "grad_norm": 1.23e-05,
        "watchdog/skipped": 1000,
    }
    for step in range(12_282, 12_346):
        display.update(step, ROW | large)
    stream.seek(stream.truncate(0))
    console.print(display.render())
    text = stream.getvalue()
    shown = [
        "3.1416",
        "13.5000",
        "1.00e-03",
        "1.23e-05",
        "1000",
        "98765.4",
        "12.3M tokens/s",
        "43.2%",
        "137.25",
    ]
    shown.append("(mean of 64 steps)")
    assert [figure for figure in shown if figure not in text] == []
    assert max(map(len, text.splitlines())) <= 80


def quiet(request, logger):
    """The level at which a logger starts, whatever ran in this process before."""
    request.addfinalizer(functools.partial(logger.setLevel, logger.level))
    logger.setLevel(logging.WARNING)


def test_log_records_appear_without_a_terminal_too_and_once(
    clock, monkeypatch, request
):
    elsewhere = io.StringIO()  # what any library's logging.basicConfig would write to
    monkeypatch.setattr(
        logging.getLogger(), "handlers", [logging.StreamHandler(elsewhere)]
    )
    monkeypatch.setattr(logging.getLogger("trainer"), "handlers", [])
    quiet(request, logging.getLogger("trainer"))
    display, stream = make(clock)
    with display:
        logging.getLogger("trainer.observe.trackers.wandb").info("W&B run")
    logging.getLogger("trainer.observe.trackers.wandb").info("after")
    assert stream.getvalue() == "W&B run\n"
    assert elsewhere.getvalue() == ""


def test_the_terminal_is_given_back_before_a_traceback(clock):
    before = sys.stdout, sys.stderr
    display, stream = make(clock, terminal=True)
    display.__enter__()
    display.update(1, ROW)
    error = RuntimeError("boom")
    assert not display.__exit__(RuntimeError, error, None)  # not swallowed
    assert (sys.stdout, sys.stderr) == before
    assert stream.getvalue().rstrip("\n").endswith("\x1b[?25h")  # the cursor is back
    assert "boom" not in stream.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1k"),
        (1234, "1.23k"),
        (45_600_000, "45.6M"),
        (2e9, "2G"),
        (3e12, "3T"),
        (4e15, "4e+03T"),
    ],
)
def test_short_numbers(number, text):
    assert short(number) == text


@pytest.mark.parametrize(
    ("values", "width", "shown"),
    [
        ([float(v) for v in range(8)], 8, SPARKS),
        ([3.0, 1.0], 60, SPARKS[-1] + SPARKS[0]),
        # means of equal parts
        ([0.0, 2.0, 7.0, 9.0], 2, SPARKS[0] + SPARKS[-1]),
        ([1.0, float("nan"), 2.0], 3, SPARKS[0] + "x" + SPARKS[-1]),
        ([5.0, 5.0], 2, SPARKS[0] * 2),
        ([], 10, ""),
    ],
)
def test_a_sparkline_goes_from_the_lowest_to_the_highest(values, width, shown):
    assert sparkline(values, width) == shown


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


def test_a_text_is_no_markup_and_does_not_command_a_terminal():
    file = io.StringIO()
    Output(file=file, force_terminal=True).print("x[/x] [red]a\x1b]0;OWNED\a")
    assert file.getvalue() == "x[/x] [red]a\\x1b]0;OWNED\\x07\n"
