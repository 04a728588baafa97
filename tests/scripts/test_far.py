"""The supervisor of machines that come and go: who starts when with whom, and a run that loses one for good."""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from command import ROOT, TINY, environment, values

from scripts.arguments import read
from scripts.far import Arguments, Members, Round, Supervisor, beating, end_orphan, planned
from trainer.errors import UserError
from trainer.run.start import saved_steps

# In place of the trainer: it stops as that does, and else goes on until its machine is gone.
FOREVER = ["sh", "-c", "trap 'exit 143' TERM; while :; do sleep 0.02; done"]


class Machine:
    """A supervisor in a thread, with what its processes were started for."""

    def __init__(self, folder, name, count, quorum, *, command=FOREVER, settle=0.3):
        texts = [f"member={name}", f"members={count}", "trainer=", "beat_seconds=0.02", f"settle_seconds={settle}"]
        times = read(Arguments, texts)
        self.members, self.rounds, self.said, self.process, self.code = Members(folder, name, 0.5), [], [], None, None
        self.command = command
        self.supervisor = Supervisor(self.members, count, quorum, self.start, times, self.said.append)
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def start(self, this):
        self.rounds.append(this)
        self.process = subprocess.Popen(self.command)
        return self.process

    def work(self):
        with beating(self.members, 0.02):
            self.code = self.supervisor.run()

    def stop(self):
        self.supervisor.signal = signal.SIGTERM
        self.thread.join(10)
        assert not self.thread.is_alive()


def until(condition, seconds=30):
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
    with machines(*(Machine(tmp_path, name, 3, 2) for name in "abc")) as (a, b, c):
        until(lambda: all(machine.process for machine in (a, b, c)))
        assert names(a) == names(b) == names(c) == [("a", "b", "c")]
        assert len({machine.rounds[0].address for machine in (a, b, c)}) == 1
        a.process.kill()  # the first of them, and with it who led
        a.stop()
        until(lambda: len(b.rounds) == len(c.rounds) == 2)
        assert names(b)[1] == names(c)[1] == ("b", "c")
        assert any("without 1 that are gone" in text for text in b.said)
        with machines(Machine(tmp_path, "a", 3, 2)) as (again,):
            until(lambda: len(b.rounds) == len(c.rounds) == 3 and again.rounds)
            assert names(b)[2] == names(c)[2] == names(again)[0] == ("a", "b", "c")
            time.sleep(0.3)
            assert b.members.newest() == again.rounds[0]  # and no round is proposed while all are there
    assert (again.code, b.code) == (143, 143)


def test_a_process_that_dies_is_started_again_with_all(tmp_path):
    with machines(*(Machine(tmp_path, name, 2, 2) for name in "ab")) as (a, b):
        until(lambda: a.process and b.process)
        b.process.kill()
        until(lambda: len(a.rounds) == len(b.rounds) == 2)
        assert names(a) == names(b) == [("a", "b")] * 2
        assert any("the process of b is gone" in text for text in a.said)


def test_less_than_the_quorum_waits(tmp_path):
    with machines(Machine(tmp_path, "a", 3, 2)) as (a,):
        time.sleep(0.8)
        assert not a.rounds
        with machines(Machine(tmp_path, "b", 3, 2)) as (b,):
            until(lambda: a.rounds and b.rounds)
            assert names(a) == [("a", "b")]


def test_a_machine_that_restarts_before_it_is_missed_ends_the_round_that_it_was_in(tmp_path):
    with machines(Machine(tmp_path, "a", 2, 1)) as (a,):
        b = Machine(tmp_path, "b", 2, 1)
        until(lambda: a.process and b.process)
        with beating(Members(tmp_path, "b", 0.5), 0.02):  # it is heard of all the time
            lost = b.rounds[0]
            b.supervisor.members.end = lambda *_: None
            b.process.kill()
            b.stop()
            with machines(Machine(tmp_path, "b", 2, 1)) as (again,):
                until(lambda: len(a.rounds) == 2 and again.rounds)
                assert again.rounds[0].number > lost.number


@pytest.mark.parametrize("code", [0, 2, 3])
def test_what_cannot_be_helped_by_starting_again_ends_all(tmp_path, code):
    command = ["sh", "-c", f"sleep 0.2; exit {code}"]
    with machines(*(Machine(tmp_path, name, 2, 1, command=command) for name in "ab")) as made:
        until(lambda: all(machine.code is not None for machine in made))
        assert [machine.code for machine in made] == [code, code]
        assert [len(machine.rounds) for machine in made] == [1, 1]


def test_who_began_first_has_begun_and_a_round_stays_what_it_is(tmp_path):
    a, b = Members(tmp_path, "a", 1), Members(tmp_path, "b", 1)
    assert a.newest() is None
    first, second = Round(1, ("a", "b"), "here:1"), Round(2, ("a",), "here:2")
    a.propose(first)
    b.propose(Round(1, ("b",), "there:1"))
    assert b.newest() == first
    a.propose(second)
    assert b.newest() == second
    assert a.folder.joinpath("1.json").read_text() == '{"members": ["a", "b"], "address": "here:1"}'


def test_age_is_told_by_ones_own_file(tmp_path):
    a, b = Members(tmp_path, "a", 5), Members(tmp_path, "b", 5)
    a.beat()
    b.beat()
    for name, then in (("a", 1000), ("b", 996)):
        os.utime(tmp_path / name, (then, then))  # by the clock of the disk
    assert a.present() == ["a", "b"]
    os.utime(tmp_path / "b", (994, 994))
    assert a.present() == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel=local", "found parallel.local=4, parallel.local_quorum=None"),
        ("parallel=local parallel.local=2 parallel.local_quorum=2", "found parallel.local=2"),
        ("parallel=local parallel.local_quorum=3 train.batch_tokens=2048", "split over parallel.local=3 replicas"),
        ("parallel=local parallel.local_quorum=5", "less than parallel.local_quorum=5"),
    ],
)
def test_what_could_not_go_on_with_fewer_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        planned(Arguments(member="a", members=4, trainer=f"run_dir={tmp_path / 'A'} {words}"))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"member": ""}, "member=: expected a name"), ({"members": 0}, "members=0"), ({"gone_seconds": -1}, "=-1,")],
)
def test_numbers_and_names_that_nobody_has_are_refused_in_a_line(given, message):
    words = {"member": "a", "members": 2, "trainer": "parallel=local parallel.local_quorum=1"}
    with pytest.raises(UserError, match=message):
        planned(Arguments(**words | given))


def test_a_process_whose_supervisor_was_killed_is_ended_and_no_other_of_its_number(tmp_path):
    words = [f"run_dir={tmp_path}", "parallel=local"]
    left, other = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-m", "trainer", *arguments])
        for arguments in (words, words[1:])
    )
    for process in (left, other):
        (tmp_path / "a.pid").write_text(str(process.pid))
        end_orphan(tmp_path / "a.pid", words)
    assert left.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
    end_orphan(tmp_path / "a.pid", words)  # gone
    end_orphan(tmp_path / "b.pid", words)  # never there


def test_the_examples_of_the_documents_could_go_on_with_fewer():
    found = []
    for document in (ROOT / "README.md", ROOT / "docs" / "parallel.md"):
        for line in document.read_text().replace("\\\n", " ").splitlines():
            if "python -m scripts.far" in line:
                words = shlex.split(line.partition("scripts.far")[2].replace("$m", "a"), comments=True)
                words = list(itertools.takewhile(lambda word: "=" in word, words))
                found.append(planned(read(Arguments, words)))
    assert len(found) >= 2
    assert all(plan.fewest < 4 for plan in found)


@pytest.mark.whole  # four trainers, one after the other compiled
def test_a_run_goes_on_alone_when_its_other_machine_is_gone(tmp_path):
    words = [*TINY, "run_dir=A", "parallel=local", "parallel.local=2", "parallel.local_quorum=1", "tracker=jsonl"]
    words += ["parallel.local_steps=3", "train.steps=100000", "checkpoint.every=10", "train.eval_every=0"]
    words += ["sample.max_new=0", f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}"]
    own = ["members=2", "settle_seconds=8", "gone_seconds=4", f"trainer={' '.join(words)}"]
    logs = [(tmp_path / f"{name}.log").open("w") for name in "ab"]
    a, b = (
        subprocess.Popen(
            [sys.executable, "-m", "scripts.far", f"member={name}", *own],
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
        until(lambda: "local steps: one replica" in (tmp_path / "a.log").read_text(), 200)
        before = len(values(tmp_path / "A"))
        until(lambda: len(values(tmp_path / "A")) > before + 20, 200)
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
