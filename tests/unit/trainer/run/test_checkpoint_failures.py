"""Saves that fail or are killed leave the earlier checkpoints whole, and say so in a
line."""

import asyncio
import logging
import re
import resource
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import META, abstract, bits, make_state, saved
from families import slow

from trainer.errors import UserError
from trainer.run.checkpoint import Checkpointer


@contextmanager
def no_file_larger_than(size):
    """Writes beyond fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = {"w": np.random.default_rng(0).integers(0, 2**31, 1 << 20).astype(np.int32)}


def failed_save(checkpointer):
    """A save of 4 MiB where 1 MiB fits; the error."""
    with no_file_larger_than(1 << 20), pytest.raises(UserError) as error:  # noqa: PT012
        checkpointer.save(2, jax.tree.map(jnp.asarray, LARGE), {})
        checkpointer.wait()  # the save itself, or the thread that writes
    return str(error.value)


def test_a_save_that_the_disk_refuses_is_reported_and_the_earlier_checkpoints_are_intact(
    open_checkpointer,
):
    checkpointer = saved(open_checkpointer(keep=1), 1)
    message = failed_save(checkpointer)
    assert re.search(
        r"could not save checkpoint 2 in .*GiB free on that disk\); intact: 1; make"
        r" room",
        message,
    )
    assert "\n" not in message
    assert checkpointer.steps() == [1]
    assert bits(open_checkpointer().restore(abstract(make_state())).state) == bits(
        make_state(1)
    )


def test_after_a_failed_save_the_next_one_works(open_checkpointer):
    checkpointer = open_checkpointer()
    failed_save(checkpointer)
    assert saved(checkpointer, 2).steps() == [2]


def test_a_failed_save_is_noticed_by_check_without_waiting(open_checkpointer):
    checkpointer = open_checkpointer()
    deadline = time.monotonic() + 60
    with no_file_larger_than(1 << 20):
        checkpointer.save(2, jax.tree.map(jnp.asarray, LARGE), {})
        with pytest.raises(UserError, match="could not save checkpoint 2"):  # noqa: PT012
            while time.monotonic() < deadline:
                checkpointer.check()


def test_a_save_that_works_is_no_error_to_check(open_checkpointer):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(1), {})
    deadline = time.monotonic() + 60
    while checkpointer.steps() != [1] and time.monotonic() < deadline:
        checkpointer.check()
    assert checkpointer.steps() == [1]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*; choose another run_dir"):
        Checkpointer(tmp_path / "file" / "checkpoints", keep=1, keep_best=False)


# --- kill -9 ---

KILLED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from trainer.run.checkpoint import Checkpointer
checkpointer = Checkpointer(Path(sys.argv[1]), keep=2, keep_best=False)
state = {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}
for step in range(1, 1000):
    checkpointer.save(step, jax.tree.map(lambda x: x + step, state), {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.01, *(slow(delay) for delay in (0.0, 0.04))])
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(
    tmp_path, open_checkpointer, delay
):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )
    for line in process.stdout:
        if int(line) == 4:
            break
    time.sleep(delay)
    process.kill()
    process.wait()
    process.stdout.close()
    checkpointer = open_checkpointer(directory=tmp_path)
    restored = checkpointer.restore(
        {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    )
    assert restored.step >= 3  # the save before the one that was going on
    assert restored.meta == {"step": restored.step}
    expected = jax.random.normal(jax.random.key(0), (1 << 20,)) + restored.step
    assert bits(restored.state) == bits({"w": expected})
    # what the kill left is not in the way
    assert checkpointer.save(restored.step + 1, restored.state, {})


def test_what_a_killed_save_left_is_removed_with_the_next_save(open_checkpointer):
    directory = saved(open_checkpointer(), 1).directory
    (directory / "5.orbax-checkpoint-tmp").mkdir()
    checkpointer = saved(open_checkpointer(), 2)
    assert checkpointer.steps() == [1, 2]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_saves_on_a_full_disk_end_in_a_line_each_and_print_nothing_else(
    tmp_path, capfd, monkeypatch
):
    """Some of its writes end after the save has failed, in threads that nobody waits
    for."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {f"p{i}": jnp.full((200, 200), i) for i in range(30)}

    def save_twice(directory):
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(1, state, META)
            checkpointer.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            checkpointer.save(2, state, META)
            checkpointer.wait()

    for attempt in range(4):
        try:
            with pytest.raises(
                UserError, match=r"could not save checkpoint 2 .*; intact: 1;"
            ):
                save_twice(tmp_path / str(attempt))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    time.sleep(0.5)  # for the last of them
    assert [report for report in seen if report.exc_type is RuntimeError] == []
    assert "Traceback" not in capfd.readouterr().err


def test_reports_of_our_own_errors_are_not_hidden(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    async def of_ours():
        pass

    def report(**attributes):
        given = {
            "exc_type": RuntimeError,
            "exc_value": error,
            "exc_traceback": None,
            "object": None,
        } | attributes
        sys.unraisablehook(SimpleNamespace(**given))

    with Checkpointer(tmp_path):
        loop = asyncio.new_event_loop()
        loop.close()
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as raised:
            error = raised
        ours, tensorstores = error.__traceback__, error.__traceback__.tb_next
        coroutines = [
            ocp.PyTreeCheckpointHandler.async_save(None, None, None),
            of_ours(),
        ]
        report(exc_traceback=tensorstores)
        report(exc_traceback=ours)
        for coroutine in coroutines:
            report(object=coroutine)
            coroutine.close()
    actual = [report for report in seen if report.exc_value is error]
    assert [(report.exc_traceback, report.object) for report in actual] == [
        (ours, None),
        (None, coroutines[1]),
    ]


def test_of_asyncio_only_orbaxs_errors_are_not_logged(tmp_path, caplog):
    def raised(filename):
        try:
            exec(compile("raise ValueError('late')", filename, "exec"))
        except ValueError as error:
            return ValueError, error, error.__traceback__.tb_next

    with Checkpointer(tmp_path):
        for filename in (ocp.__file__, __file__):
            logging.getLogger("asyncio").error(
                "of %s", filename, exc_info=raised(filename)
            )
        logging.getLogger("asyncio").error("no exception")
    assert [record.getMessage() for record in caplog.records] == [
        f"of {__file__}",
        "no exception",
    ]


def test_what_stopped_a_save_is_told_once(tmp_path, monkeypatch):
    """Orbax's manager raises it again when it is closed."""

    def stopped():
        raise OSError("File too large")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": jnp.ones(2)}, META)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer._manager, "wait_until_finished", stopped)
        patch.setattr(checkpointer._manager, "close", stopped)
        with pytest.raises(OSError, match="File too large"):
            checkpointer.close()  # of nothing that is known
        with pytest.raises(UserError, match="could not save checkpoint 2"):
            checkpointer.save(2, {"x": jnp.ones(2)}, META)
        checkpointer.close()
    checkpointer.close()
