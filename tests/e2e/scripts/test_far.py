"""The supervisor of machines that come and go: who starts when with whom, and a run
that loses one for good."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command import TINY, environment, values

from scripts.far import Arguments, Supervisor, end_orphan
from scripts.members import Members, Round, beating
from trainer.cli.arguments import read
from trainer.errors import UserError
from trainer.files import saved_steps

# In place of the trainer: it stops as that does, and else goes on until its machine is
# gone.
FOREVER = ["sh", "-c", "trap 'exit 143' TERM; while :; do sleep 0.02; done"]


class Machine:
    """A supervisor in a thread, with what its processes were started for.

    Who leaves says so, and all that are wanted start at once: long times pass only
    where a thread is stopped as long.
    """

    def __init__(
        self,
        folder,
        name,
        count,
        quorum,
        *,
        command=FOREVER,
        settings="",
        saved=lambda: 0,
        more=(),
        gone=60,
        settle=60,
    ):
        texts = [
            f"member={name}",
            f"members={count}",
            "trainer=",
            "beat_seconds=0.02",
            f"settle_seconds={settle}",
        ]
        times = read(Arguments, [*texts, *more])
        self.members, self.rounds, self.said, self.process, self.code = (
            Members(folder, name, gone),
            [],
            [],
            None,
            None,
        )
        self.command, self.starts, self.refused = command, [], None
        self.made = lambda: Supervisor(
            self.members,
            count,
            quorum,
            self.start,
            saved,
            times,
            self.said.append,
            settings,
        )
        self.supervisor = None
        # a test that fails ends
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def start(self, this):
        self.rounds.append(this)
        self.starts.append(time.monotonic())
        self.process = subprocess.Popen(self.command)
        return self.process

    def work(self):
        try:
            with beating(self.members, 0.5 if self.members.gone > 5 else 0.05):
                # once the name is its own: nobody else's round is ended
                self.supervisor = self.made()
                self.code = self.supervisor.run()
        except UserError as error:
            self.refused = str(error)

    def stop(self):
        until(lambda: self.supervisor is not None or self.refused)
        if self.supervisor is not None:
            self.supervisor.signal = signal.SIGTERM
        self.thread.join(60)
        assert not self.thread.is_alive()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def machines(*made):
    try:
        yield made
    finally:
        for machine in made:
            machine.stop()


def names(machine):
    return [this.members for this in machine.rounds]


def test_all_start_together_go_on_without_the_lost_one_and_with_it_again(tmp_path):
    with machines(*(Machine(tmp_path, name, 3, 2, settle=4) for name in "abc")) as (
        a,
        b,
        c,
    ):
        until(lambda: all(machine.process for machine in (a, b, c)))
        assert names(a) == names(b) == names(c) == [("a", "b", "c")]
        assert len({machine.rounds[0].address for machine in (a, b, c)}) == 1
        a.process.kill()  # the first of them, and with it who led
        a.stop()
        until(lambda: len(b.rounds) == len(c.rounds) == 2)
        assert names(b)[1] == names(c)[1] == ("b", "c")
        assert any("without 1 that are gone" in text for text in b.said)
        with machines(Machine(tmp_path, "a", 3, 2, settle=4)) as (again,):
            until(lambda: len(b.rounds) == len(c.rounds) == 3 and again.rounds)
            assert names(b)[2] == names(c)[2] == names(again)[0] == ("a", "b", "c")
            time.sleep(0.3)
            # and no round is proposed while all are there
            assert b.members.newest() == again.rounds[0]
    assert (again.code, b.code) == (143, 143)


def test_a_process_that_dies_is_started_again_with_all(tmp_path):
    with machines(*(Machine(tmp_path, name, 2, 2) for name in "ab")) as (a, b):
        until(lambda: a.process and b.process)
        b.process.kill()
        until(lambda: len(a.rounds) == len(b.rounds) == 2)
        assert names(a) == names(b) == [("a", "b")] * 2
        assert any("the process of b is gone" in text for text in a.said)


def test_a_process_that_a_lost_machine_takes_along_is_not_started_with_it_again(
    tmp_path,
):
    with machines(Machine(tmp_path, "a", 2, 1, gone=4, settle=1)) as (a,):
        b = Machine(tmp_path, "b", 2, 1)
        until(
            lambda: (
                b.process
                and names(a)[-1:] == [("a", "b")]
                and a.process
                and a.process.poll() is None
            )
        )
        b.members.end = b.members.run = lambda *_: None
        b.members.leave = lambda: None  # killed, with its process: its file stays
        b.process.kill()
        b.stop()
        earlier = len(a.rounds)
        a.process.kill()
        until(lambda: len(a.rounds) > earlier)
        assert names(a)[earlier] == ("a",)


def test_less_than_the_quorum_waits(tmp_path):
    with machines(Machine(tmp_path, "a", 3, 2, settle=0.3)) as (a,):
        time.sleep(0.8)
        assert not a.rounds
        with machines(Machine(tmp_path, "b", 3, 2)) as (b,):
            until(lambda: a.rounds and b.rounds)
            assert names(a) == [("a", "b")]


def test_a_machine_that_restarts_before_it_is_missed_ends_the_round_that_it_was_in(
    tmp_path,
):
    with machines(Machine(tmp_path, "a", 2, 1)) as (a,):
        b = Machine(tmp_path, "b", 2, 1)
        until(lambda: a.process and b.process)
        lost = b.rounds[0]
        b.members.end = lambda *_: None
        b.members.leave = lambda: None  # killed: its file stays
        b.process.kill()
        b.stop()
        with machines(Machine(tmp_path, "b", 2, 1)) as (again,):
            # of 60 after which it is missed
            until(lambda: len(a.rounds) == 2 and again.rounds, 30)
            assert again.rounds[0].number > lost.number


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_cannot_be_helped_by_starting_again_ends_all(tmp_path, code):
    command = ["sh", "-c", f"sleep 0.2; exit {code}"]
    with machines(
        *(Machine(tmp_path, name, 2, 1, command=command) for name in "ab")
    ) as made:
        until(lambda: all(machine.code is not None for machine in made))
        assert [machine.code for machine in made] == [code, code]
        assert [len(machine.rounds) for machine in made] == [1, 1]


FAILS = ["sh", "-c", "exit 1"]


def test_a_disk_that_fails_is_waited_for_and_without_it_no_process_goes_on_alone(
    tmp_path,
):
    with machines(Machine(tmp_path / "run", "a", 1, 1, gone=4)) as (a,):
        until(lambda: a.process)
        for seconds in (0.2, 9):  # of 4 that others wait
            (tmp_path / "run").rename(tmp_path / "away")
            time.sleep(seconds)
            assert (a.refused is None) == (seconds < 0.5)
            (tmp_path / "away").rename(tmp_path / "run")
            assert (a.process.poll() is None) == (seconds < 0.5)
            time.sleep(0.2)
    assert "run could not be used for 4 s (No such file or directory)" in a.refused
    assert len(a.rounds) == 1


def test_a_machine_that_trains_something_else_is_refused_in_a_line_and_the_others_go_on(
    tmp_path,
):
    with machines(
        Machine(tmp_path, "b", 2, 1, settings="optimizer.lr=1e-3", settle=0.3)
    ) as (b,):
        until(lambda: b.process)
        other = Machine(tmp_path, "a", 2, 1, settings="optimizer.lr=8e-3")
        until(lambda: other.refused)
        other.stop()
        said = (
            "trainer= of a says 'optimizer.lr=8e-3', but round 1 (b) was begun with"
            " 'optimizer.lr=1e-3'"
        )
        assert said in other.refused
        assert (names(other), names(b), b.process.poll()) == ([], [("b",)], None)
    with machines(
        *(Machine(tmp_path, name, 2, 2, settings="optimizer.lr=8e-3") for name in "ab")
    ) as (a, b):
        # where nothing runs all may go on with others
        until(lambda: a.rounds and b.rounds)


def test_a_machine_too_many_waits_until_one_has_left(tmp_path):
    with machines(*(Machine(tmp_path, name, 2, 1) for name in "bc")) as (b, c):
        until(lambda: b.process and c.process)
        with machines(Machine(tmp_path, "a", 2, 1)) as (a,):
            until(
                lambda: (
                    "waiting: b, c are there, which are all 2; one must leave" in a.said
                )
            )
            assert (names(a), names(b), names(c)) == ([], [("b", "c")], [("b", "c")])
            c.stop()
            until(lambda: names(a) and names(b)[-1] == names(a)[-1] == ("a", "b"))


def test_a_start_that_is_stopped_for_a_machine_that_is_back_is_no_failure(tmp_path):
    # ends by the signal itself, as a trainer does at its very start
    command, more = ["sleep", "100"], ["failures=1"]
    with machines(
        Machine(tmp_path, "a", 2, 1, command=command, more=more, settle=0.3)
    ) as (a,):
        until(lambda: a.process)
        with machines(Machine(tmp_path, "b", 2, 1, command=command, more=more)) as (b,):
            until(
                lambda: a.code is not None or (names(a)[-1] == ("a", "b") and b.rounds)
            )
            assert a.code is None


def test_starts_that_fail_without_a_new_checkpoint_wait_and_are_given_up(tmp_path):
    more = ["failures=4", "pause_seconds=0.3"]
    with machines(
        *(Machine(tmp_path, name, 2, 2, command=FAILS, more=more) for name in "ab")
    ) as (a, b):
        until(lambda: a.code is not None or b.code is not None)
        first = a if a.code is not None else b
        assert first.code == 4
        # of which one may have been ended for the other's sake
        assert len(first.rounds) <= 5
        gaps = [
            later - earlier
            for earlier, later in zip(first.starts, first.starts[1:], strict=False)
        ]
        assert sum(gap >= 0.3 for gap in gaps) >= 2
        assert any(
            "2 starts in a row failed without a new checkpoint: waiting 0.3 s" in text
            for text in first.said
        )
        assert (
            "giving up: 4 starts in a row failed without a new checkpoint; the last"
            " ended here with exit code 1" in (first.said[-1])
        )


def test_starts_that_bring_new_checkpoints_are_not_given_up(tmp_path):
    more, steps = ["failures=2", "rounds=6"], itertools.count()
    with machines(
        Machine(
            tmp_path, "a", 1, 1, command=FAILS, saved=lambda: next(steps), more=more
        )
    ) as (a,):
        until(lambda: a.code is not None)
    assert len(a.rounds) == 6
    assert (
        a.said[-1]
        == "giving up after 6 starts, the last of which ended here with exit code 1"
    )


def test_a_machine_whose_process_always_fails_first_leaves_and_the_others_go_on(
    tmp_path,
):
    more = ["failures=6", "pause_seconds=0.05"]
    commands = {"a": FAILS, "b": FOREVER, "c": FOREVER}
    made = (
        Machine(tmp_path, name, 3, 2, command=command, more=more, settle=4)
        for name, command in commands.items()
    )
    with machines(*made) as (a, b, c):
        until(lambda: a.code is not None and names(b)[-1] == names(c)[-1] == ("b", "c"))
        assert a.code == 4
        assert len(a.rounds) == 3
        assert a.said[-1].startswith(
            "leaving: 3 starts in a row failed without a new checkpoint"
        )
        time.sleep(0.2)
        assert (b.code, c.code) == (None, None)


def test_a_name_that_another_machine_has_is_refused_in_a_line_and_who_had_it_goes_on(
    tmp_path,
):
    message = (
        r"member=a is the name of another machine, too, which is there: .*, process"
        r" \d+; give each a name of its own"
    )
    with machines(Machine(tmp_path, "a", 1, 1)) as (a,):
        until(lambda: a.process)
        with (
            pytest.raises(UserError, match=message),
            beating(Members(tmp_path, "a", 60), 2),
        ):
            pass
        assert a.code is None
        assert not a.members.other
        # One that slept while its name was taken over ends its process, and leaves the
        # name to the other.
        (tmp_path / "a").write_text("0 elsewhere:1:0")
        until(lambda: a.refused)
        assert "which is there: elsewhere, process 1" in a.refused
        assert a.process.poll() is not None
        assert (tmp_path / "a").exists()


def test_of_several_that_begin_under_one_name_at_once_one_has_it(tmp_path):
    # slow enough for a busy machine
    made = [Machine(tmp_path, "a", 1, 1) for _ in range(4)]
    with machines(*made):
        until(lambda: sum(bool(machine.refused) for machine in made) == 3)
        until(lambda: any(machine.process for machine in made))
        assert [len(machine.rounds) for machine in made if not machine.refused] == [1]


def test_a_round_that_begins_while_a_machine_starts_is_its_own(tmp_path):
    a, b = Members(tmp_path, "a", 60), Members(tmp_path, "b", 60)
    a.propose(Round(1, ("a", "b"), "here:1"))
    b.take(0.1)
    a.propose(Round(2, ("a", "b"), "here:2"))  # b is there, and has not looked yet
    supervisor = Supervisor(
        b,
        2,
        2,
        None,
        None,
        read(Arguments, ["member=b", "members=2", "trainer="]),
        None,
    )
    assert supervisor.previous == 1
    assert b.ended(a.newest()) == {}
    assert b.ended(Round(1, ("a", "b"), "here:1")) == {"b": 4}


def test_who_began_first_has_begun_and_a_round_stays_what_it_is(tmp_path):
    a, b = Members(tmp_path, "a", 1), Members(tmp_path, "b", 1)
    assert a.newest() is None
    first, second = Round(1, ("a", "b"), "here:1"), Round(2, ("a",), "here:2")
    a.propose(first)
    b.propose(Round(1, ("b",), "there:1"))
    assert b.newest() == first
    a.propose(second)
    assert b.newest() == second
    assert (
        a.folder.joinpath("1.json").read_text()
        == '{"members": ["a", "b"], "address": "here:1", "settings": ""}'
    )


def test_age_is_told_by_ones_own_file(tmp_path):
    a, b = Members(tmp_path, "a", 5), Members(tmp_path, "b", 5)
    a.beat()
    b.beat()
    for name, then in (("a", 1000), ("b", 996)):
        os.utime(tmp_path / name, (then, then))  # by the clock of the disk
    assert a.present() == ["a", "b"]
    os.utime(tmp_path / "b", (994, 994))
    assert a.present() == ["a"]


def test_a_process_whose_supervisor_was_killed_is_ended_and_no_other_of_its_number(
    tmp_path,
):
    words, said = [f"run_dir={tmp_path}", "parallel=diloco"], []
    left, other = (
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import time; time.sleep(60)",
                "-m",
                "trainer",
                *arguments,
            ]
        )
        for arguments in (words, words[1:])
    )
    for process in (left, other):
        until(
            lambda process=process: (
                b"trainer" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            )
        )
        (tmp_path / "a.pid").write_text(str(process.pid))
        end_orphan(tmp_path / "a.pid", words, said.append)
    assert left.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    assert not said
    # Elsewhere than on Linux it is said that there may be one.
    end_orphan(tmp_path / "a.pid", words, said.append, tmp_path / "proc")
    assert other.poll() is None
    other.kill()
    other.wait()
    assert [f"process {other.pid} has the number" in text for text in said] == [True]
    end_orphan(tmp_path / "a.pid", words, said.append)  # gone
    end_orphan(tmp_path / "a.pid", words, said.append, tmp_path / "proc")
    end_orphan(tmp_path / "b.pid", words, said.append)  # never there
    assert len(said) == 1


@pytest.mark.slow  # four trainers, one after the other compiled
def test_a_run_goes_on_alone_when_its_other_machine_is_gone(tmp_path):
    words = [
        *TINY,
        "run_dir=A",
        "parallel=diloco",
        "diloco.replicas=2",
        "diloco.quorum=1",
        "tracker=jsonl",
    ]
    words += [
        "diloco.sync_every=3",
        "train.steps=100000",
        "checkpoint.every=10",
        "train.eval_every=0",
    ]
    words += [
        "sample.max_new_tokens=0",
        f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}",
    ]
    settings = [
        "members=2",
        "settle_seconds=15",
        "gone_seconds=8",
        f"trainer={' '.join(words)}",
    ]
    logs = [(tmp_path / f"{name}.log").open("w") for name in "ab"]
    a, b = (
        subprocess.Popen(
            [sys.executable, "-m", "scripts.far", f"member={name}", *settings],
            cwd=tmp_path,
            env=environment(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for name, log in zip("ab", logs, strict=True)
    )
    metrics = tmp_path / "A" / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, 200)
        os.killpg(b.pid, signal.SIGKILL)
        b.wait()
        until(lambda: "DiLoCo: one replica" in (tmp_path / "a.log").read_text(), 200)
        earlier = len(values(tmp_path / "A"))
        until(lambda: len(values(tmp_path / "A")) > earlier + 20, 200)
        a.terminate()
        assert a.wait(100) == 143
    finally:
        for process in (a, b):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for log in logs:
            log.close()
    said = (tmp_path / "a.log").read_text()
    assert "b not heard of: ending this one" in said
    assert "round 2: 1 of 2 machines (a), without 1 that are gone" in said
    rows = values(tmp_path / "A")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert saved_steps(tmp_path / "A")[-1] == len(rows)
