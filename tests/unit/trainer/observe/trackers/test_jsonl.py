"""metrics.jsonl and samples.txt: complete lines, each step once, cut where a run goes
on."""

import json
import re
import zlib

import pytest
from forging import same_crc32

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


def jsonl(run_dir, *, start=0, redo=False, state=None):
    tracker = JsonlTracker()
    tracker.start(TrackerStart(run_dir, start, {}, redo, checkpoint_state=state))
    return tracker


def log_steps(tracker, *steps):
    for step in steps:
        tracker.row(step, loss(step))


def resume(run_dir, step, state, redo=False):
    jsonl(run_dir, start=step, redo=redo, state=state).finish()
    return read_rows(run_dir / "metrics.jsonl")


def test_numbers_that_are_not_finite_are_valid_json_and_are_read_back():
    values = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 3}
    line = encode_row(1, values).decode()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert str(decode_row(line)) == str(values)


def test_a_resumed_run_goes_on_after_its_step_as_if_never_stopped(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for directory, parts in (
        (straight, [(0, 9)]),
        (resumed, [(0, 5), (3, 8), (0, 1), (1, 9)]),
    ):
        directory.mkdir()
        for start, stop in parts:
            tracker = jsonl(directory, start=start)
            for step in range(start + 1, stop + 1):
                if step % 2:
                    tracker.event(step, "odd")
                tracker.row(step, loss(step))
                tracker.sample(step, "sample", f"text of {step}")
            tracker.finish()
    for name in ("metrics.jsonl", "samples.txt"):
        assert (straight / name).read_bytes() == (resumed / name).read_bytes()


def test_a_line_torn_anywhere_is_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = encode_row(2, {"x": 123456789012})
    for size in range(1, 30):
        path.write_bytes(encode_row(1, {}) + line[:size])
        tracker = jsonl(tmp_path, start=1)
        tracker.row(2, {})
        tracker.finish()
        assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_a_backup_of_hard_links_stays_as_it_was(tmp_path):
    run_dir, backup = tmp_path / "run", tmp_path / "backup"
    run_dir.mkdir()
    backup.mkdir()
    tracker = jsonl(run_dir)
    log_steps(tracker, 1, 2, 3)
    tracker.sample(3, "sample", "some text")
    tracker.finish()
    before = {}
    for path in run_dir.iterdir():
        (backup / path.name).hardlink_to(path)
        before[path.name] = path.read_bytes()
    tracker = jsonl(run_dir, start=1)
    log_steps(tracker, 2)
    tracker.sample(2, "sample", "another text")
    tracker.finish()
    assert {path.name: path.read_bytes() for path in backup.iterdir()} == before
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [1, 2]
    assert [sample.step for sample in read_samples(run_dir / "samples.txt")] == [2]


DAMAGE = {
    "none": lambda lines: lines,
    "none, rows follow": lambda lines: [*lines, encode_row(5, {})],
    "emptied": lambda lines: [],
    "a row missing": lambda lines: [*lines[:1], *lines[2:]],
    "a row twice": lambda lines: [*lines[:1], *lines],
    "a row changed": lambda lines: [
        line.replace(b'"tokens": ', b'"tokens": 1') for line in lines
    ],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_log_that_is_not_as_it_was_written_is_noticed(tmp_path, damage):
    tracker = jsonl(tmp_path)
    log_steps(tracker, 1, 2, 3, 4)
    state = tracker.checkpoint_state()
    tracker.finish()
    path = tmp_path / "metrics.jsonl"
    lines = DAMAGE[damage](path.read_bytes().splitlines(keepends=True))
    path.write_bytes(b"".join(lines))
    rows = resume(tmp_path, 4, state)
    events = [row["event"] for row in rows if "event" in row]
    if damage.startswith("none"):
        assert (events, len(rows)) == ([], 4)
        return
    [text] = events
    assert "is not what the run wrote up to step 4" in text
    assert "4 were written" in text
    assert ("missing lines" in text) == (len(lines) < 4)
    assert ("lines were changed" in text) == (len(lines) >= 4)
    if damage == "a row twice":
        assert [row["step"] for row in rows if "event" not in row] == [1, 2, 3, 4]


def crc32_of(path):
    data = path.read_bytes()
    digest = {"size": len(data), "rows": data.count(b"\n"), "crc32": zlib.crc32(data)}
    return data, digest


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt"])
def test_a_change_that_keeps_size_and_crc32_is_noticed(tmp_path, name):
    tracker = jsonl(tmp_path)
    log_steps(tracker, *range(1, 9))
    tracker.sample(8, "sample", "0123456789" * 5)
    state = tracker.checkpoint_state()
    tracker.finish()
    data, _ = crc32_of(tmp_path / name)
    # digits remain digits; the first row, and the sample's heading, stay
    digits = [match.start() for match in re.finditer(rb"(?<=\d\d)\d(?=\d)", data)]
    (tmp_path / name).write_bytes(same_crc32(data, digits))
    events = [row["event"] for row in resume(tmp_path, 8, state) if "event" in row]
    assert [name in event for event in events] == [True]


def test_a_checkpoint_of_before_logs_had_a_hash_is_compared_by_crc32(tmp_path):
    tracker = jsonl(tmp_path)
    log_steps(tracker, 1, 2)
    tracker.sample(2, "sample", "some text")
    tracker.finish()
    paths = tmp_path / "metrics.jsonl", tmp_path / "samples.txt"
    (data, state), (_, samples) = map(crc32_of, paths)
    state |= {"samples": samples}
    assert len(resume(tmp_path, 2, state)) == 2
    paths[0].write_bytes(data.replace(b'"tokens": 1', b'"tokens": 3'))
    assert "event" in resume(tmp_path, 2, state)[-1]


@pytest.mark.parametrize("step", [2, 4])
def test_what_the_digest_of_the_checkpoint_does_not_cover_is_removed(tmp_path, step):
    tracker = jsonl(tmp_path)
    tracker.event(4, "stalled")
    log_steps(tracker, 4)
    tracker.sample(4, "sample", "some text")
    state = tracker.checkpoint_state()
    log_steps(tracker, 5)
    tracker.finish()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(step, {"val/loss": 0.5}))
        file.write(encode_row(step, {"event": "finished with a loss of 0.5"}))
    with (tmp_path / "samples.txt").open("ab") as file:
        file.write(encode_sample(Sample(step, "sample", "forged")))
    rows = resume(tmp_path, 4, state)
    assert [row.get("event", row["step"]) for row in rows] == ["stalled", 4]
    assert len(read_samples(tmp_path / "samples.txt")) == 1


def test_steps_that_were_taken_without_the_log_are_named_once(tmp_path, caplog):
    first = jsonl(tmp_path)
    log_steps(first, 1, 2)
    first.finish()
    for start, redo in ((2, False), (3, True)):  # no gap
        jsonl(tmp_path, start=start, redo=redo).finish()
    assert "no rows" not in caplog.text
    for _ in range(2):  # the second start is from the same checkpoint
        tracker = jsonl(tmp_path, start=5)
        log_steps(tracker, 6)
        tracker.finish()
    assert "has no rows after step 2 up to step 5: " in caplog.text
    rows = [
        (row["step"], "event" in row) for row in read_rows(tmp_path / "metrics.jsonl")
    ]
    assert rows == [(1, False), (2, False), (6, True), (6, False)]


def test_changes_of_the_files_during_the_run_are_told_and_samples_restored(
    tmp_path, caplog
):
    tracker = jsonl(tmp_path)
    log_steps(tracker, 1)
    tracker.sample(1, "sample", "some text")
    (tmp_path / "samples.txt").unlink()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(encode_row(1, {"event": "by somebody else"}))
    tracker.finish()
    [sample] = read_samples(tmp_path / "samples.txt")
    assert sample.text == "some text"
    assert "samples.txt was removed or replaced" in caplog.text
    assert "metrics.jsonl was changed while the run wrote it" in caplog.text


def test_events_before_a_row_that_comes_again_stay(tmp_path):
    path, event = tmp_path / "metrics.jsonl", encode_row(2, {"event": "x"})
    lines = [encode_row(1, {"a": 1}), event, encode_row(2, {"a": 2}), event]
    path.write_bytes(b"".join(lines))
    assert cut_rows(path, 2) == 2
    assert cut_rows(path, 2, redo_row=True) == 1
    assert path.read_bytes() == b"".join(lines[:2])
    assert cut_rows(path, 0) == -1
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "text",
    [
        "",
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


@pytest.mark.parametrize("content", [b"", b"some other text"])
def test_samples_that_are_not_as_they_were_written_are_noticed(tmp_path, content):
    tracker = jsonl(tmp_path)
    log_steps(tracker, 1)
    tracker.sample(1, "sample", "some text")
    state = tracker.checkpoint_state()
    tracker.finish()
    assert len(resume(tmp_path, 1, state)) == 1
    (tmp_path / "samples.txt").write_bytes(content)
    [event] = [row["event"] for row in resume(tmp_path, 1, state)[1:]]
    assert "samples.txt is not what the run wrote" in event


def test_a_step_cannot_be_logged_twice(tmp_path):
    tracker = jsonl(tmp_path)
    log_steps(tracker, 1, 2)
    with pytest.raises(ValueError, match="row of step 2 after the row of step 2"):
        log_steps(tracker, 2)
