"""Saves that fail or are killed leave the earlier checkpoints whole, and say so in a
line."""

import asyncio
import logging
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints import abstract, bits, make_state, saved

from trainer.errors import UserError
from trainer.run.orbax_errors import hide_orbax_tracebacks


@contextmanager
def no_file_larger_than(size):
    """Let writes beyond fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LARGE = {"w": np.random.default_rng(0).integers(0, 2**31, 1 << 20).astype(np.int32)}


def wait_until(condition, checkpointer):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        checkpointer.check()


@pytest.mark.parametrize("waits", [True, False])
def test_a_save_that_the_disk_refuses_is_reported_and_the_others_are_intact(
    open_checkpointer, waits
):
    checkpointer = saved(open_checkpointer(keep=1), 1)
    message = (
        r"could not save checkpoint 2 in .*GiB free on that disk\); intact: 1; make"
    )
    with no_file_larger_than(1 << 20), pytest.raises(UserError, match=message) as error:  # noqa: PT012
        # the save itself, or the thread that writes
        checkpointer.save(2, jax.tree.map(jnp.asarray, LARGE), {})
        checkpointer.wait() if waits else wait_until(lambda: False, checkpointer)
    assert "\n" not in str(error.value)
    assert checkpointer.steps() == [1]
    restored = checkpointer.restore(abstract(make_state()))
    assert bits(restored.state) == bits(make_state(1))
    # the next one works
    checkpointer.save(2, make_state(2), {})
    wait_until(lambda: checkpointer.steps() == [2], checkpointer)
    assert checkpointer.steps() == [2]


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


def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(
    tmp_path, open_checkpointer
):
    command = [sys.executable, "-c", KILLED, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) == 4:
            break
    time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    checkpointer = open_checkpointer(directory=tmp_path)
    target = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    restored = checkpointer.restore(target)
    assert restored.step >= 3  # the save before the one that was going on
    assert restored.meta == {"step": restored.step}
    expected = jax.random.normal(jax.random.key(0), (1 << 20,)) + restored.step
    assert bits(restored.state) == bits({"w": expected})
    # the rest of that save is not in the way
    checkpointer.save(restored.step + 1, restored.state, {})
    checkpointer.wait()
    assert checkpointer.steps()[-1] == restored.step + 1


def test_the_rest_of_a_killed_save_is_removed_with_the_next_save(open_checkpointer):
    directory = saved(open_checkpointer(), 1).directory
    (directory / "5.orbax-checkpoint-tmp").mkdir()
    checkpointer = saved(open_checkpointer(), 2)
    assert checkpointer.steps() == [1, 2]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


def test_reports_of_errors_outside_of_orbax_are_not_hidden(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    hide_orbax_tracebacks()

    async def other():
        pass

    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as raised:
        loop.call_soon_threadsafe(print)
    with_caller = raised.value.__traceback__
    of_orbax = ocp.PyTreeCheckpointHandler.async_save(None, None, None)
    coroutines = of_orbax, other()
    causes = [(with_caller.tb_next, None), (with_caller, None)]
    causes += [(None, coroutine) for coroutine in coroutines]
    reports = [
        SimpleNamespace(exc_type=RuntimeError, exc_traceback=trace, object=coroutine)
        for trace, coroutine in causes
    ]
    for report in reports:
        sys.unraisablehook(report)
    for coroutine in coroutines:
        coroutine.close()
    # others may be of earlier tests
    assert [report for report in shown if report in reports] == reports[1::2]


def test_errors_that_asyncio_logs_are_hidden_only_if_orbax_raised_them(caplog):
    def raised_in(filename):
        try:
            exec(compile("raise ValueError('late')", filename, "exec"))
        except ValueError as error:
            return ValueError, error, error.__traceback__.tb_next

    hide_orbax_tracebacks()
    logger = logging.getLogger("asyncio")
    for filename in (ocp.__file__, __file__):
        logger.error("%s", filename, exc_info=raised_in(filename))
    logger.error("no exception")
    actual = [record.getMessage() for record in caplog.records]
    assert actual == [__file__, "no exception"]
