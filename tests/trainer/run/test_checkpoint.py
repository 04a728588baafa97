import asyncio
import logging
import os
import re
import resource
import shutil
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
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.errors import UserError
from trainer.run.checkpoint import Checkpointer
from trainer.step.leaves import checksum, checksums, describe, leaf_names
from trainer.step.state import init_state

META = {"config": {"seed": 1}, "tracker": "abc"}


def make_state(seed=0, width=32):
    key = jax.random.key(seed)
    params = {"wte": jax.random.normal(key, (width, 16)), "h": [{"kernel": jnp.full((16, 16), float(seed))}]}
    return init_state(params, optax.adamw(1e-3), key)


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def bits(tree):
    """Names, dtypes and bytes: equal exactly when the trees are, NaN payloads included."""
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)
    ]
    return [(n, str(x.dtype), x.shape, np.asarray(x).tobytes()) for n, x in zip(leaf_names(tree), leaves, strict=True)]


@pytest.fixture
def open_checkpointer(tmp_path):
    opened = []

    def open_one(keep=3, keep_best=False, directory=tmp_path / "checkpoints"):
        opened.append(Checkpointer(directory, keep=keep, keep_best=keep_best))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()


def saved(checkpointer, *steps):
    for step in steps:
        assert checkpointer.save(step, make_state(step), META)
    checkpointer.wait()
    return checkpointer


# --- what comes back ---


def test_a_state_comes_back_bit_for_bit_with_its_structure_and_meta(open_checkpointer):
    state = make_state(3)
    first = open_checkpointer()
    first.save(3, state, META)
    first.wait()
    restored = open_checkpointer().restore(abstract(state))
    assert restored.step == 3
    assert restored.meta == META
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert bits(restored.state) == bits(state)
    assert jax.random.key_impl(restored.state.key) == jax.random.key_impl(state.key)


def test_low_precision_and_nan_payloads_come_back_bit_for_bit(open_checkpointer):
    rng = np.random.default_rng(0)
    state = {
        str(np.dtype(dtype)): jnp.asarray(rng.integers(0, 256, 64 * np.dtype(dtype).itemsize, np.uint8).view(dtype))
        for dtype in (
            jnp.float8_e4m3fn,
            jnp.float8_e5m2,
            jnp.bfloat16,
            jnp.float16,
            jnp.float32,
            jnp.int8,
            jnp.uint16,
            jnp.int32,
        )
    } | {"bool": jnp.array([True, False]), "scalar": jnp.float32(np.nan), "empty": jnp.zeros((0, 3))}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    assert bits(checkpointer.restore(abstract(state)).state) == bits(state)


def test_the_save_is_of_the_values_at_the_call_although_the_next_step_reuses_their_memory(open_checkpointer):
    step = jax.jit(lambda x: jax.tree.map(lambda a: a * 2 + 1, x), donate_argnums=0)
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((512, 512)), jnp.float32)}
    before = bits(state)
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert bits(checkpointer.restore(abstract(state)).state) == before


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_state_sharded_over_8_devices_comes_back_on_fewer(open_checkpointer, devices):
    def mesh(n):
        return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])

    spec = {"w": PartitionSpec("data"), "v": PartitionSpec(None, "data"), "n": PartitionSpec(), "key": PartitionSpec()}
    state = {"w": jnp.arange(64.0).reshape(16, 4), "v": jnp.ones((3, 8)), "n": jnp.int32(7), "key": jax.random.key(1)}
    on_8 = {k: jax.device_put(v, NamedSharding(mesh(8), spec[k])) for k, v in state.items()}
    checkpointer = open_checkpointer()
    checkpointer.save(1, on_8, {})
    target = {
        k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh(devices), spec[k]))
        for k, v in state.items()
    }
    restored = checkpointer.restore(target).state
    assert bits(restored) == bits(state)
    assert {k: v.sharding for k, v in restored.items()} == {k: v.sharding for k, v in target.items()}


def test_a_part_of_the_state_can_be_restored_alone(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 2)
    params = make_state(2).params
    restored = checkpointer.restore({"params": abstract(params)}, partial=True)
    assert bits(restored.state["params"]) == bits(params)


def test_without_a_sharding_leaves_go_to_the_first_device(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1)
    restored = checkpointer.restore(jax.eval_shape(lambda: make_state(1)))
    assert bits(restored.state) == bits(make_state(1))


# --- what stays ---


def test_the_newest_stay(open_checkpointer):
    assert saved(open_checkpointer(keep=2), 1, 2, 3).steps() == [2, 3]


def test_the_best_stays_too(open_checkpointer):
    checkpointer = open_checkpointer(keep=1, keep_best=True)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan")), (6, 1.5)]:
        checkpointer.save(step, make_state(step), {}, val_loss=loss)
    checkpointer.wait()
    assert checkpointer.steps() == [2, 6]
    assert checkpointer.best_step == 2


def test_the_best_is_still_known_after_a_restart(open_checkpointer):
    first = open_checkpointer(keep=1, keep_best=True)
    for step, loss in [(1, 1.0), (2, 2.0)]:
        first.save(step, make_state(step), {}, val_loss=loss)
    first.wait()
    second = open_checkpointer(keep=1, keep_best=True)
    second.save(3, make_state(3), {}, val_loss=3.0)
    second.wait()
    assert second.steps() == [1, 3]


def test_a_run_without_validation_has_no_best(open_checkpointer):
    checkpointer = saved(open_checkpointer(keep=2, keep_best=True), 1, 2, 3)
    assert checkpointer.best_step is None
    assert checkpointer.steps() == [2, 3]


def test_saving_the_newest_step_again_is_nothing_to_do(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 4)
    assert not checkpointer.save(4, make_state(4), META)


def test_saving_an_earlier_step_is_an_error(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 4)
    with pytest.raises(UserError, match=r"cannot save step 3: .* holds step 4"):
        checkpointer.save(3, make_state(3), META)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"b": jnp.ones((2, 3))}, r"leaf b is float32\[2\], expected float32\[2, 3\]"),
        (lambda s: s | {"b": jnp.ones(2, jnp.bfloat16)}, r"leaf b is float32\[2\], expected bfloat16\[2\]"),
        (lambda s: s | {"c": jnp.ones(2)}, r"it has no leaf c, expected float32\[2\]"),
        (lambda s: {"a": s["a"]}, r"it has a leaf b, float32\[2\], that is not expected"),
        (lambda s: s | {"b": jax.random.key(0)}, r"leaf b is float32\[2\], expected key<fry>\[\]"),
    ],
)
def test_a_state_that_does_not_fit_names_the_leaf_and_both_sides(open_checkpointer, change, message):
    state = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    with pytest.raises(UserError, match=message):
        checkpointer.restore(abstract(change(state)))
    assert checkpointer.steps() == [1]  # not taken for damage


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        describe({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_a_step_that_does_not_exist_is_named_with_those_that_do(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2)
    with pytest.raises(UserError, match=r"no checkpoint 9 in .*; there are: 1, 2"):
        checkpointer.restore(abstract(make_state()), step=9)


def test_an_empty_directory_has_nothing_to_restore(open_checkpointer):
    with pytest.raises(UserError, match="no usable checkpoint"):
        open_checkpointer().restore(abstract(make_state()))


# --- damage ---


def files(step_directory):
    return [path for path in sorted(step_directory.rglob("*")) if path.is_file()]


def payload(step_directory):
    """The file that holds the arrays."""
    return max((step_directory / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip_a_bit(directory):
    path = payload(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def alter_the_meta(directory):
    path = directory / "manifest" / "metadata"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))


DAMAGE = {
    "bit flipped in the arrays": flip_a_bit,
    "arrays truncated": lambda d: os.truncate(payload(d), payload(d).stat().st_size // 2),
    "arrays emptied": lambda d: os.truncate(payload(d), 0),
    "arrays removed": lambda d: payload(d).unlink(),
    "state removed": lambda d: shutil.rmtree(d / "state"),
    "manifest removed": lambda d: shutil.rmtree(d / "manifest"),
    "manifest altered": alter_the_meta,
    "manifest truncated": lambda d: os.truncate(d / "manifest" / "metadata", 40),
    "index removed": lambda d: (d / "state" / "manifest.ocdbt").unlink(),
    "everything removed": lambda d: [path.unlink() for path in files(d)],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_in_a_line_and_the_one_before_is_used(open_checkpointer, caplog, damage):
    first = saved(open_checkpointer(), 1, 2)
    DAMAGE[damage](first.directory / "2")
    checkpointer = open_checkpointer()
    restored = checkpointer.restore(abstract(make_state()))
    assert restored.step == 1
    assert bits(restored.state) == bits(make_state(1))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "trainer.run.checkpoint"]
    assert re.search(r"checkpoint 2 is damaged \(.+\): moved to .*damaged/2-0, using the one before", line)
    assert "\n" not in line
    saved(checkpointer, 2)  # the run comes to this step again
    assert bits(open_checkpointer().restore(abstract(make_state())).state) == bits(make_state(2))


@pytest.mark.parametrize("text", [b"", b"{\x00\xff", b"[1]", b'{"a": 1}', b'{"val_loss": null}'])
def test_a_damaged_validation_loss_costs_neither_the_checkpoint_nor_the_run(open_checkpointer, caplog, text):
    with open_checkpointer(keep=3, keep_best=True) as checkpointer:
        for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
            checkpointer.save(step, make_state(step), {}, val_loss=loss)
    (checkpointer.directory / "1" / "metrics" / "metrics").write_bytes(text)
    with pytest.raises(UserError, match=r"1/metrics/metrics is damaged; remove .*1/metrics, without which"):
        Checkpointer.reading(checkpointer.directory)  # which must not touch what may be another process's
    with open_checkpointer(keep=3, keep_best=True) as checkpointer:
        (line,) = [record.getMessage() for record in caplog.records if record.name == "trainer.run.checkpoint"]
        assert line == "the validation loss of checkpoint 1 is damaged: it cannot be the best one"
        assert bits(checkpointer.restore(abstract(make_state()), 1).state) == bits(make_state(1))
        assert checkpointer.best_step == 2
        checkpointer.save(4, make_state(4), {}, val_loss=4.0)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]


def test_no_flipped_bit_of_any_file_changes_what_is_restored(open_checkpointer):
    """A flip is found, or was in a byte that does not matter (a time, a comment)."""
    directory = saved(open_checkpointer(), 1, 2).directory
    rng = np.random.default_rng(0)
    for path in files(directory / "2"):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        checkpointer = open_checkpointer()
        restored = checkpointer.restore(abstract(make_state()))
        assert bits(restored.state) == bits(make_state(restored.step)), path
        assert restored.meta == META
        if restored.step == 1:
            (moved,) = (directory / "damaged").iterdir()
            moved.rename(directory / "2")
        path.write_bytes(whole)


def test_when_all_are_damaged_the_error_says_so(open_checkpointer):
    directory = saved(open_checkpointer(), 1, 2).directory
    for step in ("1", "2"):
        flip_a_bit(directory / step)
    with pytest.raises(UserError, match=r"no usable checkpoint in .*; start anew in another run_dir"):
        open_checkpointer().restore(abstract(make_state()))


def test_of_several_in_a_given_order_the_first_whole_one_is_restored(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2, 3)
    assert checkpointer.restore(abstract(make_state()), order=[2, 1]).step == 2
    flip_a_bit(checkpointer.directory / "2")
    assert checkpointer.restore(abstract(make_state()), order=[2, 1]).step == 1
    assert checkpointer.steps() == [1, 3]


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2)
    flip_a_bit(checkpointer.directory / "1")
    with pytest.raises(UserError, match=r"checkpoint 1 in .* is damaged"):
        checkpointer.restore(abstract(make_state()), step=1)


def test_a_reader_leaves_a_save_in_progress_and_a_damaged_checkpoint_where_they_are(open_checkpointer, caplog):
    directory = saved(open_checkpointer(), 1, 2).directory
    flip_a_bit(directory / "2")
    in_progress = directory / "3.orbax-checkpoint-tmp"
    in_progress.mkdir()
    before = sorted(directory.rglob("*"))
    with Checkpointer.reading(directory) as reader:
        assert reader.restore(abstract(make_state())).step == 1
    assert sorted(directory.rglob("*")) == before
    assert "checkpoint 2 is damaged" in caplog.text


def test_reading_where_there_is_nothing_is_an_error_and_makes_nothing(tmp_path):
    with (
        Checkpointer.reading(tmp_path / "nowhere") as reader,
        pytest.raises(UserError, match=r"no usable checkpoint in .*nowhere"),
    ):
        reader.restore(abstract(make_state()))
    assert not (tmp_path / "nowhere").exists()


def test_a_state_too_large_for_the_device_is_not_taken_for_damage(open_checkpointer, monkeypatch):
    checkpointer = saved(open_checkpointer(), 1)

    def exhausted(leaves):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr("trainer.run.checkpoint.checksums", exhausted)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpointer.restore(abstract(make_state()))
    assert checkpointer.steps() == [1]


def test_the_meta_alone_can_be_read_and_skips_a_damaged_one(open_checkpointer):
    checkpointer = saved(open_checkpointer(), 1, 2)
    alter_the_meta(checkpointer.directory / "2")
    assert checkpointer.meta() == META
    assert checkpointer.steps() == [1]


# --- saves that fail ---


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
    with no_file_larger_than(1 << 20), pytest.raises(UserError) as error:  # noqa: PT012 - either may raise it
        checkpointer.save(2, jax.tree.map(jnp.asarray, LARGE), {})
        checkpointer.wait()
    return str(error.value)


def test_a_save_that_the_disk_refuses_is_reported_and_the_earlier_checkpoints_are_intact(open_checkpointer):
    checkpointer = saved(open_checkpointer(keep=1), 1)
    message = failed_save(checkpointer)
    assert re.search(r"could not save checkpoint 2 in .*GiB free on that disk\); intact: 1; make room", message)
    assert "\n" not in message
    assert checkpointer.steps() == [1]
    assert bits(open_checkpointer().restore(abstract(make_state())).state) == bits(make_state(1))


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


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.04])
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path, open_checkpointer, delay):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    for line in process.stdout:
        if int(line) == 4:
            break
    time.sleep(delay)
    process.kill()
    process.wait()
    process.stdout.close()
    checkpointer = open_checkpointer(directory=tmp_path)
    restored = checkpointer.restore({"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)})
    assert restored.step >= 3  # the save before the one that was going on
    assert restored.meta == {"step": restored.step}
    expected = jax.random.normal(jax.random.key(0), (1 << 20,)) + restored.step
    assert bits(restored.state) == bits({"w": expected})
    assert checkpointer.save(restored.step + 1, restored.state, {})  # what the kill left is not in the way


def test_what_a_killed_save_left_is_removed_with_the_next_save(open_checkpointer):
    directory = saved(open_checkpointer(), 1).directory
    (directory / "5.orbax-checkpoint-tmp").mkdir()
    checkpointer = saved(open_checkpointer(), 2)
    assert checkpointer.steps() == [1, 2]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2"]


# --- checksums ---


def test_a_checksum_does_not_depend_on_the_sharding():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    assert checksums([x]) == checksums([spread])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32, jnp.bool_])
def test_every_single_bit_changes_the_checksum(dtype):
    itemsize = np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype == jnp.bool_ else 256, 12 * itemsize).astype(np.uint8)
    whole = checksums([jnp.asarray(raw.view(dtype))])
    for bit in range(0, raw.size * 8, 8 if dtype == jnp.bool_ else 1):
        changed = raw.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert checksums([jnp.asarray(changed.view(dtype))]) != whole, bit


def test_a_checksum_tells_places_apart():
    x = jnp.arange(6.0)
    assert len({checksums([x])[0], checksums([x[::-1]])[0], checksums([jnp.roll(x, 1)])[0]}) == 3


def test_two_changes_that_cancel_in_one_sum_change_the_checksum():
    x = jnp.arange(1.0, 9.0)
    assert checksums([x.at[2].multiply(-1).at[5].multiply(-1)]) != checksums([x])
    # Scrambled as in the first sum, these two differ in the highest bit alone.
    a, b = np.array([0xBFFB7D7D, 0xE7CC1AF0], np.uint32).view(np.float32)
    first, changed = (np.asarray(checksum(x.at[2].set(p).at[5].set(q))) for p, q in ((a, b), (b, a)))
    assert first[0] == changed[0]
    assert first[1] != changed[1]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (12, 5), (2, 3, 35)])
def test_a_checksum_is_the_documented_sum(shape):
    """Written out in Python."""
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    total = [0, 0]
    for index in np.ndindex(shape):
        for which, (seed, scramble) in enumerate(((0x9E3779B1, 0x7FEB352D), (0x85EBCA77, 0x846CA68B))):
            word = int(x[index].view(np.uint32))
            word = (word ^ word >> (16, 15)[which]) * scramble % 2**32
            term = word ^ word >> (15, 16)[which]
            for axis, i in enumerate(index or (0,)):
                odd = ((i + 1) * seed + axis * 0x27D4EB2F) % 2**32
                odd = (odd ^ odd >> 15) * 0x2C1B3C6D % 2**32
                odd = (odd ^ odd >> 12) * 0x297A2D39 % 2**32
                term *= (odd ^ odd >> 15) | 1
            total[which] = (total[which] + term) % 2**32
    assert checksum(jnp.asarray(x)).tolist() == total


def test_saves_on_a_full_disk_end_in_a_line_each_and_print_nothing_else(tmp_path, capfd, monkeypatch):
    """Some of its writes end after the save has failed, in threads that nobody waits for."""
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
            with pytest.raises(UserError, match=r"could not save checkpoint 2 .*; intact: 1;"):
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
        given = {"exc_type": RuntimeError, "exc_value": error, "exc_traceback": None, "object": None} | attributes
        sys.unraisablehook(SimpleNamespace(**given))

    with Checkpointer(tmp_path):
        loop = asyncio.new_event_loop()
        loop.close()
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as raised:
            error = raised
        ours, tensorstores = error.__traceback__, error.__traceback__.tb_next
        coroutines = [ocp.PyTreeCheckpointHandler.async_save(None, None, None), of_ours()]
        report(exc_traceback=tensorstores)
        report(exc_traceback=ours)
        for coroutine in coroutines:
            report(object=coroutine)
            coroutine.close()
    found = [report for report in seen if report.exc_value is error]
    assert [(report.exc_traceback, report.object) for report in found] == [(ours, None), (None, coroutines[1])]


def test_of_asyncio_only_orbaxs_errors_are_not_logged(tmp_path, caplog):
    def raised(filename):
        try:
            exec(compile("raise ValueError('late')", filename, "exec"))
        except ValueError as error:
            return ValueError, error, error.__traceback__.tb_next

    with Checkpointer(tmp_path):
        for filename in (ocp.__file__, __file__):
            logging.getLogger("asyncio").error("of %s", filename, exc_info=raised(filename))
        logging.getLogger("asyncio").error("no exception")
    assert [record.getMessage() for record in caplog.records] == [f"of {__file__}", "no exception"]


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
