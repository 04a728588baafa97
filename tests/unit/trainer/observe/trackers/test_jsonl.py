"""metrics.jsonl and samples.txt: whole lines, each step once, cut where a run goes
on."""

import json

import pytest

from trainer.errors import UserError
from trainer.observe.records import (
    Sample,
    cut_rows,
    decode_row,
    encode_row,
    encode_sample,
    read_rows,
    read_samples,
)
from trainer.observe.trackers.jsonl import JsonlTracker
from trainer.observe.trackers.protocol import TrackerStart


def loss(step):
    return {"train/loss": 1 / step, "tokens": step * 10}


def jsonl(run_dir, *, start, again=False):
    tracker = JsonlTracker()
    tracker.start(TrackerStart(run_dir, start, again, {}, None, None))
    return tracker


def test_what_is_not_finite_is_valid_json_and_is_read_back(tmp_path):
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 3}
    line = encode_row(1, values).decode()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert str(decode_row(line)) == str(values)


def test_a_step_cannot_be_logged_twice(tmp_path):
    tracker = jsonl(tmp_path, start=0)
    tracker.row(2, loss(2))
    with pytest.raises(ValueError, match="row of step 2 after the row of step 2"):
        tracker.row(2, loss(2))
    tracker.finish()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 2, "train/loss": 0.5, "tokens": 20}\n'


def test_a_resumed_run_goes_on_after_its_step_as_if_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, pieces in (
        (whole, [(0, 9)]),
        (parts, [(0, 5), (3, 8), (0, 1), (1, 9)]),
    ):
        directory.mkdir()
        for start, stop in pieces:
            tracker = jsonl(directory, start=start)
            for step in range(start + 1, stop + 1):
                if step % 2:
                    tracker.event(step, "odd")
                tracker.row(step, loss(step))
                tracker.sample(step, "sample", f"text of {step}")
            tracker.finish()
    for name in ("metrics.jsonl", "samples.txt"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


def test_a_line_torn_anywhere_is_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for kept in range(1, 30):
        path.write_bytes(encode_row(1, {}) + encode_row(2, {"x": 123456789012})[:kept])
        tracker = jsonl(tmp_path, start=1)
        tracker.row(2, {})
        tracker.finish()
        assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode_row(1, {}) + b"{not json}\n" + encode_row(3, {}))
    with pytest.raises(UserError, match=r"metrics.jsonl:2 is not a row of metrics"):
        jsonl(tmp_path, start=3)


def resume(run_dir, step, written, again=False):
    tracker = JsonlTracker()
    tracker.start(TrackerStart(run_dir, step, again, {}, None, None, written))
    tracker.finish()
    return read_rows(run_dir / "metrics.jsonl")


DAMAGE = {
    "none": lambda lines: lines,
    "none, rows follow": lambda lines: [*lines, encode_row(5, {})],
    "removed": lambda lines: None,
    "emptied": lambda lines: [],
    "shortened": lambda lines: lines[:-1],
    "a row missing": lambda lines: [*lines[:1], *lines[2:]],
    "a row twice": lambda lines: [*lines[:1], *lines],
    "the step of a row changed": lambda lines: [
        lines[0].replace(b'"step": ', b'"step": 99'),
        *lines[1:],
    ],
    "a row changed": lambda lines: [
        line.replace(b'"tokens": ', b'"tokens": 1') for line in lines
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_log_that_is_not_what_was_written_is_noticed(tmp_path, damage):
    tracker = jsonl(tmp_path, start=0)
    for step in range(1, 5):
        tracker.row(step, loss(step))
    written = tracker.written()
    tracker.finish()
    path = tmp_path / "metrics.jsonl"
    lines = DAMAGE[damage](path.read_bytes().splitlines(keepends=True))
    path.unlink() if lines is None else path.write_bytes(b"".join(lines))
    rows = resume(tmp_path, 4, written)
    noticed = [row["event"] for row in rows if "event" in row]
    if damage.startswith("none"):
        assert not noticed
        assert len(rows) == 4
    else:
        [text] = noticed
        assert "is not what the run wrote up to step 4" in text
        assert "4 were written" in text
        assert ("missing lines" in text) == (len(lines or ()) < 4)
        assert ("lines were changed" in text) == (len(lines or ()) >= 4)
    if lines is not None and "step" in damage:
        assert len(rows) >= len(lines)  # one row is lost, and no other
    if damage == "a row twice":
        assert [row["step"] for row in rows if "event" not in row] == [1, 2, 3, 4]


@pytest.mark.parametrize("step", [2, 4])
def test_rows_and_samples_that_no_run_writes_behind_the_checkpoint_are_removed(
    tmp_path, step
):
    tracker = jsonl(tmp_path, start=0)
    tracker.row(4, loss(4))
    tracker.sample(4, "sample", "some text")
    written = tracker.written()
    tracker.event(4, "stalled")
    tracker.row(5, loss(5))
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(step, {"val/loss": 0.5}))
    with (tmp_path / "samples.txt").open("ab") as file:
        file.write(encode_sample(Sample(step, "sample", "forged")))
    rows = resume(tmp_path, 4, written)
    assert [row.get("event", row["step"]) for row in rows] == [4, "stalled"]
    assert len(read_samples(tmp_path / "samples.txt")) == 1


def test_a_row_that_comes_again_may_stand_behind_the_checkpoint(tmp_path):
    tracker = jsonl(tmp_path, start=0)
    tracker.row(1, loss(1))
    written = tracker.written()  # a signal interrupted step 2
    tracker.row(2, loss(2))
    tracker.finish()
    assert resume(tmp_path, 2, written, again=True) == [{"step": 1, **loss(1)}]


def test_steps_that_were_taken_without_the_log_are_named_once(tmp_path, caplog):
    before = jsonl(tmp_path, start=0)
    for step in (1, 2):
        before.row(step, loss(step))
    before.finish()
    for _ in range(2):  # the second start is from the same checkpoint
        tracker = jsonl(tmp_path, start=5)
        tracker.row(6, loss(6))
        tracker.finish()
    assert "has no rows after step 2 up to step 5: " in caplog.text
    written = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], "event" in row) for row in written] == [
        (1, False),
        (2, False),
        (6, True),
        (6, False),
    ]


@pytest.mark.parametrize(("start", "again"), [(2, False), (3, True)])
def test_a_log_without_a_gap_is_not_spoken_of(tmp_path, caplog, start, again):
    before = jsonl(tmp_path, start=0)
    for step in (1, 2):
        before.row(step, loss(step))
    before.finish()
    jsonl(tmp_path, start=start, again=again).finish()
    assert "no rows" not in caplog.text


def test_samples_that_are_not_what_was_written_are_noticed(tmp_path):
    tracker = jsonl(tmp_path, start=0)
    tracker.row(1, loss(1))
    tracker.sample(1, "sample", "some text")
    written = tracker.written()
    tracker.finish()
    path = tmp_path / "samples.txt"
    assert len(resume(tmp_path, 1, written)) == 1
    path.write_bytes(path.read_bytes().replace(b"some", b"same"))
    [event] = [row["event"] for row in resume(tmp_path, 1, written)[1:]]
    assert "samples.txt is not what the run wrote" in event


def test_lines_that_are_added_during_the_run_are_counted(tmp_path, caplog):
    tracker = jsonl(tmp_path, start=0)
    tracker.row(1, loss(1))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(1, {"event": "by somebody else"}))
    tracker.finish()
    assert "metrics.jsonl was changed while the run wrote it" in caplog.text
    assert "it has 2 lines, 1 were written" in caplog.text


def test_samples_that_are_removed_during_the_run_are_restored(tmp_path):
    tracker = jsonl(tmp_path, start=0)
    tracker.sample(1, "sample", "some text")
    (tmp_path / "samples.txt").unlink()
    tracker.finish()
    assert [sample.text for sample in read_samples(tmp_path / "samples.txt")] == [
        "some text"
    ]
    [row] = read_rows(tmp_path / "metrics.jsonl")
    assert "samples.txt was removed or replaced" in row["event"]


def test_of_a_row_that_comes_again_the_events_before_it_stay(tmp_path):
    path, event = tmp_path / "metrics.jsonl", {"event": "x"}
    lines = [
        encode_row(1, {"a": 1}),
        encode_row(2, event),
        encode_row(2, {"a": 2}),
        encode_row(2, event),
    ]
    path.write_bytes(b"".join(lines))
    assert cut_rows(path, 2) == 2
    assert cut_rows(path, 2, redo_row=True) == 1
    assert path.read_bytes() == b"".join(lines[:2])
    tracker = jsonl(tmp_path, start=2, again=True)
    tracker.row(2, {"a": 2})
    tracker.finish()
    assert path.read_bytes() == b"".join(lines[:3])


def test_cutting_says_which_step_is_the_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_rows(path, 5) == -1
    path.write_bytes(b"".join(encode_row(step, {}) for step in (1, 4, 7)))
    assert cut_rows(path, 5) == 4
    assert cut_rows(path, 0) == -1
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "a\n\nb",
        'step 9 | "x"\n  y',
        " indented",
        "ends\n",
        "\r\n\x0b\x0c\x85\u2028",
        "日本 \x00 ü",
        '\\ "',
    ],
)
def test_no_text_can_break_the_samples(tmp_path, text):
    path = tmp_path / "samples.txt"
    samples = [
        Sample(1, "first", "before"),
        Sample(2, 'a "name" | x', text),
        Sample(3, "last", "after"),
    ]
    path.write_bytes(b"".join(map(encode_sample, samples)))
    assert read_samples(path) == samples


def test_a_full_disk_is_an_error_in_a_line(tmp_path):
    tracker = jsonl(tmp_path, start=0)
    full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - the tracker closes it
    tracker._rows.close()
    tracker._rows._file = full
    with pytest.raises(
        UserError,
        match=(
            r"cannot write /dev/full: No space left on device; make room, then continue"
        ),
    ):
        tracker.row(1, loss(1))


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot write to .*; choose another run_dir"):
        jsonl(tmp_path, start=0)
