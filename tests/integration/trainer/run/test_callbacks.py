"""What happens between two steps: in which order, and what a stop request leaves for
the run that resumes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.observe.records import decode_row, encode_row, is_row
from trainer.run import loop
from trainer.run.callbacks import Callback, CallbackKind
from trainer.run.totals import Totals

ROW = {"train/loss": 2.0}


class Recording:
    """As much of a run as the pause between two steps needs; `record` is what it was
    told, in order."""

    def __init__(self, callbacks, *, step=10, until=100, stop_at=None):
        self.record, self.signal, self.stop_at = [], 0, stop_at
        self.plan = SimpleNamespace(steps=100, phase_end=until, log_every=1000)
        self.callbacks, self.step, self.last_logged_step = callbacks, step, 0
        self.state, self.train_step = "state", "step"
        watchdog = SimpleNamespace(is_spiking=False, state=dict, finish=ignore)
        self.recovery = SimpleNamespace(watchdog=watchdog)
        self.meta = {}
        self.totals = lambda step: Totals(tokens=8 * step)
        self.throughput = SimpleNamespace(exclude=ignore, mean_since_last_call=dict)
        self.guard = SimpleNamespace(beat=ignore)
        note = lambda name: lambda *args, **_: self.record.append((name, *args))
        told = ("row", "event", "sample", "picture", "summary", "alert")
        tracker = {name: note(name) for name in told} | {
            "flush": ignore,
            "checkpoint_state": ignore,
        }

        def save(step, state, meta, val_loss, planned):
            self.record.append(("save", step, meta["unfinished"], val_loss))
            self.is_planned = planned

        self.session = SimpleNamespace(
            run_dir=None,
            verify_run_dir=ignore,
            restore_config=ignore,
            tracker=SimpleNamespace(**tracker),
            display=SimpleNamespace(update=ignore, event=ignore, record_pause=ignore),
            checkpointer=SimpleNamespace(save=save),
        )

    def requested(self, doing):
        if self.stop_at is not None and self.stop_at in doing:
            self.signal = 15
        return self.signal > 0

    def settle(self, monkeypatch):
        monkeypatch.setattr(loop, "to_checkpoint_form", lambda state: state)
        monkeypatch.setattr(loop, "first_nonfinite_array", lambda state: None)
        loop.run_callbacks(self, dict(ROW), "tokens", self)
        return self.record


def ignore(*_):
    return None


def look(name, every=10):
    def run(context):
        context.text(name, f"after {context.step}")
        return {f"{name}/figure": np.float32(0.5)}

    return Callback(name, every, run)


KEEP = Callback("checkpoint", 10, lambda context: context.save(), CallbackKind.SAVE)


@pytest.mark.parametrize(
    ("phase", "every", "step", "last", "stopping", "is_spiking", "happens"),
    [
        (CallbackKind.EVALUATE, 10, 20, False, False, False, True),
        (CallbackKind.EVALUATE, 0, 20, True, False, True, True),
        (CallbackKind.UPDATE, 10, 20, False, False, True, True),
        (CallbackKind.UPDATE, 10, 20, True, False, False, False),
        (CallbackKind.SAVE, 10, 21, False, True, False, True),
        (CallbackKind.SAVE, 10, 20, False, True, True, False),
        (CallbackKind.SAVE, 0, 21, True, False, True, True),
    ],
)
def test_when_a_callback_is_due_follows_from_its_kind(
    phase, every, step, last, stopping, is_spiking, happens
):
    context = SimpleNamespace(step=step, last=last)
    callback = Callback("own", every, lambda context: None, phase)
    assert callback.is_due(context, stopping=stopping, is_spiking=is_spiking) is happens


def test_figures_are_in_the_row_texts_follow_it_and_the_checkpoint_covers_both(
    monkeypatch,
):
    record = Recording([look("first"), KEEP, look("second")]).settle(monkeypatch)
    row = ROW | {"first/figure": 0.5, "second/figure": 0.5}
    assert record == [
        ("row", 10, row),
        ("sample", 10, "first", "after 10"),
        ("sample", 10, "second", "after 10"),
        ("save", 10, None, None),
    ]


@pytest.mark.parametrize("stop_at", ["at the first", "at the second"])
def test_a_stop_request_at_a_callback_leaves_the_whole_step_to_the_resumed_run(
    monkeypatch, stop_at
):
    run = Recording([look("first"), look("second"), KEEP], stop_at=stop_at)
    ((what, step, unfinished, val_loss),) = run.settle(monkeypatch)
    assert (what, step, val_loss) == ("save", 10, None)
    assert decode_row(unfinished) == ROW
    assert not run.is_planned


def test_a_long_callback_can_be_interrupted_inside(monkeypatch):
    done = []

    def slow(context):
        for part in range(5):
            context.raise_if_stopped(f"part {part}")
            done.append(part)

    run = Recording([Callback("slow", 10, slow), KEEP], stop_at="part 3")
    ((what, *_),) = run.settle(monkeypatch)
    assert (what, done) == ("save", [0, 1, 2])


def test_a_change_of_the_state_is_told_before_the_row_and_saved_after_it(monkeypatch):
    replace = lambda context: context.set_state("new state", "new step", "changed")
    run = Recording([KEEP, Callback("change", 5, replace, CallbackKind.UPDATE)])
    record = run.settle(monkeypatch)
    assert (run.state, run.train_step) == ("new state", "new step")
    # the bare row is not due
    assert [entry[0] for entry in record] == ["event", "save"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train/loss", "would be in the row twice"),
        ("first/figure", "would be in the row twice"),
        ("event", "cannot be called event"),
        ("numerics/mine", "cannot be called numerics/mine"),
    ],
)
def test_a_figure_that_the_row_or_the_log_cannot_have_is_refused(
    monkeypatch, name, message
):
    second = Callback("second", 10, lambda context: {name: 1.0})
    with pytest.raises(ValueError, match=message):
        Recording([look("first"), second]).settle(monkeypatch)


@pytest.mark.parametrize("kind", [CallbackKind.UPDATE, CallbackKind.SAVE])
def test_metrics_that_come_too_late_for_the_row_are_an_error(monkeypatch, kind):
    late = Callback("late", 10, lambda context: {"late/figure": 1.0}, kind)
    with pytest.raises(ValueError, match="the callback late returned metrics"):
        Recording([late]).settle(monkeypatch)


@pytest.mark.parametrize("value", [True, np.float64(1.7e308), np.int64(3), np.inf])
def test_what_a_callback_returns_is_a_row_that_the_log_reads_back(monkeypatch, value):
    run = Recording([Callback("own", 10, lambda context: {"own/figure": value})])
    [(_, step, row)] = run.settle(monkeypatch)
    line = encode_row(step, row).decode()
    assert is_row(json.loads(line))
    assert decode_row(line)["own/figure"] == value


def test_the_end_of_a_phase_is_saved(monkeypatch):
    every = Callback("checkpoint", 1000, lambda c: c.save(), CallbackKind.SAVE)
    for until, expected in ((10, True), (20, False)):
        record = Recording([every], until=until).settle(monkeypatch)
        assert (("save", 10, None, None) in record) == expected


def test_a_checkpoint_is_planned_unless_a_stop_request_is_its_reason(monkeypatch):
    for every, until, expected in (
        (10, 20, True),
        (1000, 10, True),
        (1000, 20, False),
    ):
        save = Callback("checkpoint", every, lambda c: c.save(), CallbackKind.SAVE)
        run = Recording([save], until=until)
        run.signal = 15
        run.settle(monkeypatch)
        assert run.is_planned == expected
