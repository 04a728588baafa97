"""A saved state comes back bit for bit, on other devices too; the checkpoints that stay;
states that do not fit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from checkpoints import META, abstract, bits, make_state, saved
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalify_core import ScaledArray
from trainer.errors import UserError


def test_a_state_comes_back_bit_for_bit_with_its_structure_and_meta(open_checkpointer):
    state = make_state(3)
    first = open_checkpointer()
    first.save(3, state, META)
    first.wait()
    # without shardings too
    for target in (abstract(state), jax.eval_shape(lambda: state)):
        restored = open_checkpointer().restore(target)
        assert (restored.step, restored.meta) == (3, META)
        assert jax.tree.structure(restored.state) == jax.tree.structure(state)
        assert bits(restored.state) == bits(state)
        assert jax.random.key_impl(restored.state.key) == jax.random.key_impl(state.key)


def test_low_precision_and_nan_payloads_come_back_bit_for_bit(open_checkpointer):
    rng = np.random.default_rng(0)
    state = {
        "bool": jnp.array([True, False]),
        "scalar": jnp.float32(np.nan),
        "empty": jnp.zeros((0, 3)),
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float32", "uint16"):
        dtype = jnp.dtype(name)
        data = rng.integers(0, 256, 64 * dtype.itemsize, np.uint8)
        state[name] = jnp.asarray(data.view(dtype))
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    assert bits(checkpointer.restore(abstract(state)).state) == bits(state)


def test_the_values_at_the_call_are_saved_although_the_next_step_reuses_their_memory(
    open_checkpointer,
):
    step = jax.jit(lambda x: jax.tree.map(lambda a: a * 2 + 1, x), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    expected = bits(state)
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert bits(checkpointer.restore(abstract(state)).state) == expected


def test_a_state_sharded_over_8_devices_comes_back_on_fewer(open_checkpointer):
    state = {
        "w": jnp.arange(64.0).reshape(16, 4),
        "v": jnp.ones((3, 8)),
        "key": jax.random.key(1),
    }
    specs = {"w": ["data"], "v": [None, "data"], "key": []}

    def shardings(n):
        devices, auto = jax.devices()[:n], (AxisType.Auto,)
        mesh = jax.make_mesh((n,), ("data",), axis_types=auto, devices=devices)
        return {
            name: NamedSharding(mesh, PartitionSpec(*axes))
            for name, axes in specs.items()
        }

    checkpointer = open_checkpointer()
    checkpointer.save(1, jax.device_put(state, shardings(8)), {})
    target = abstract(jax.device_put(state, shardings(2)))
    restored = checkpointer.restore(target).state
    assert bits(restored) == bits(state)
    assert {name: x.sharding for name, x in restored.items()} == shardings(2)


def save_with_losses(checkpointer, *losses):
    for step, loss in losses:
        checkpointer.save(step, make_state(step), {}, val_loss=loss)
    checkpointer.wait()
    return checkpointer


def test_the_newest_stay_and_the_best_also_after_a_restart(open_checkpointer):
    assert saved(open_checkpointer(keep=2, keep_best=True), 1, 2, 3).steps() == [2, 3]
    losses = [(4, 1.0), (5, 2.0), (6, None), (7, float("nan")), (8, 1.5)]
    first = save_with_losses(open_checkpointer(keep=1, keep_best=True), *losses)
    assert (first.steps(), first.best_step) == ([4, 8], 4)
    second = save_with_losses(open_checkpointer(keep=1, keep_best=True), (9, 3.0))
    assert (second.steps(), second.best_step) == ([4, 9], 4)


def test_the_best_one_has_read_the_validation_text_of_the_newest(open_checkpointer):
    """On another number of devices a short text gives other rows."""
    checkpointer = open_checkpointer(keep=9)
    for step, loss, rows in [(1, 1.0, 12), (2, 2.0, 8), (3, 3.0, 8)]:
        meta = {"validation_rows": rows}
        checkpointer.save(step, make_state(step), meta, val_loss=loss)
    checkpointer.wait()
    assert checkpointer.best_step == 2
    # Checkpoints of earlier versions do not say their rows.
    checkpointer.save(4, make_state(4), {}, val_loss=4.0)
    checkpointer.wait()
    assert checkpointer.best_step == 1


def test_the_best_one_is_kept_until_other_validation_rows_are_read(open_checkpointer):
    """A run on other devices may be stopped before its first validation there."""
    for rows, losses, expected in [
        (12, {1: 1.0, 2: 2.0}, [1, 2]),
        (8, {3: None}, [1, 3]),
        (8, {4: 2.0, 5: 3.0, 6: 4.0}, [4, 6]),
        (12, {7: None}, [4, 7]),
    ]:
        with open_checkpointer(keep=1, keep_best=True) as checkpointer:
            for step, loss in losses.items():
                meta = {"validation_rows": rows}
                checkpointer.save(step, make_state(step), meta, val_loss=loss)
        assert (checkpointer.steps(), checkpointer.best_step) == (expected, expected[0])


def test_checkpoints_of_stops_remove_none_that_an_undisturbed_run_keeps(
    open_checkpointer,
):
    for step, planned, loss, kept in [
        (2, False, None, [2]),
        (3, False, None, [2, 3]),
        (4, True, 1.0, [3, 4]),
        (5, False, 0.5, [4, 5]),
        (8, True, 2.0, [4, 8]),
        (12, True, 3.0, [4, 8, 12]),
        (13, False, None, [4, 8, 12, 13]),
        (14, False, None, [4, 8, 12, 14]),
    ]:
        with open_checkpointer(keep=2, keep_best=True) as checkpointer:
            checkpointer.save(
                step, make_state(step), {}, val_loss=loss, planned=planned
            )
        assert checkpointer.steps() == kept
    assert checkpointer.planned_steps() == [4, 8, 12]
    # For a moment, as a network's file system may: it is not removed for that.
    (checkpointer.directory / "8" / "manifest" / "metadata").write_text("")
    assert checkpointer.planned_steps() == [4, 8, 12]


def test_saving_the_newest_step_again_is_nothing_to_do_and_an_earlier_one_an_error(
    open_checkpointer,
):
    checkpointer = saved(open_checkpointer(), 4)
    folder = checkpointer.directory / "4"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    checkpointer.save(4, make_state(4), META)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(UserError, match=r"cannot save step 3: .* holds step 4"):
        checkpointer.save(3, make_state(3), META)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"b": jnp.ones((2, 3))}, r"b is float32\[2\], expected float32\[2, 3\]"),
        (
            {"b": jnp.ones(2, jnp.bfloat16)},
            r"leaf b is float32\[2\], expected bfloat16\[2\]",
        ),
        ({"b": jnp.zeros(2), "c": jnp.ones(2)}, r"no leaf c, expected float32\[2\]"),
        ({}, r"it has a leaf b, float32\[2\], that is not expected"),
    ],
)
def test_a_state_that_does_not_fit_names_the_leaf_and_both_sides(
    open_checkpointer, target, message
):
    checkpointer = open_checkpointer()
    checkpointer.save(1, {"b": jnp.zeros(2)}, {})
    with pytest.raises(UserError, match=message):
        checkpointer.restore(abstract(target))
    assert checkpointer.steps() == [1]  # not taken for damage


def test_a_few_bytes_do_not_hold_more_than_there_is_memory(open_checkpointer):
    state = {"w": jnp.zeros((2**14, 2**11), jnp.float32)}  # 128 MiB in some kilobytes
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    with pytest.raises(UserError, match=r"bytes are to hold 134,217,728 bytes"):
        checkpointer.restore(abstract(state))


def arrays_of(checkpointer):
    """The database of the arrays of step 1."""
    base = {"driver": "file", "path": f"{checkpointer.directory / '1' / 'state'}/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (".zarray", {"chunks": [100_000_000]}),
        ("zarr.json", {}),
    ],
)
def test_a_chunk_is_no_larger_than_its_array(open_checkpointer, file, change):
    """TensorStore would decode the whole of it."""
    state = {"w": jnp.arange(3.0)}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    checkpointer.wait()
    store = arrays_of(checkpointer)
    description = json.loads(store["w/.zarray"])
    store[f"w/{file}"] = json.dumps(description | change)
    with pytest.raises(UserError, match=f"w/{file} is not as the trainer writes it"):
        checkpointer.restore(abstract(state))


def test_a_few_bytes_do_not_name_more_chunks_than_there_is_memory(open_checkpointer):
    state = {"w": jnp.arange(3.0)}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    checkpointer.wait()
    store = arrays_of(checkpointer)
    with tensorstore.Transaction() as transaction:
        writer = store.with_transaction(transaction)
        for i in range(1200):
            writer[f"w/{'0' * 60_000}{i}"] = b""
    with pytest.raises(UserError, match=r"damaged \(state unreadable: IndexTooLarge"):
        checkpointer.restore(abstract(state), 1)


def test_a_checkpoint_is_read_without_a_list_of_its_keys(
    open_checkpointer, monkeypatch
):
    """Nodes of an index may share what is below them: a list can be of any length."""
    state = {"w": jnp.arange(3.0)}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    checkpointer.wait()
    monkeypatch.delattr(tensorstore.KvStore, "list")
    assert bits(checkpointer.restore(abstract(state)).state) == bits(state)


@pytest.mark.parametrize("scale", [-0.5, 3.0, 0.0, 2.0**127])
def test_a_scale_that_no_trainer_writes_is_refused(open_checkpointer, scale):
    x = jax.tree.map(jnp.asarray, ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(2)))
    structure = jax.tree.structure(x)
    state = {"w": jax.tree.unflatten(structure, [x.data, jnp.float32(scale)])}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    with pytest.raises(UserError, match=r"w: ScaledArray: scale is .*power of two"):
        checkpointer.restore(abstract(state))


ROW = '{"step": 1, "train/loss": 1.0}'


@pytest.mark.parametrize("seed", [1, 9])
def test_a_step_that_was_interrupted_gets_its_validation_loss_later(
    open_checkpointer, seed
):
    """Otherwise it could not be the best one, which is kept. A rescale, which made
    state 9, is in the checkpoint, as it is in that of a run without the interruption. A
    run may be interrupted in that step twice."""
    settings = {"keep": 1, "keep_best": True}
    with open_checkpointer(**settings) as first:
        first.save(1, make_state(1), {"unfinished": ROW}, planned=False)
    with open_checkpointer(**settings) as resumed:
        resumed.save(1, make_state(1), {"unfinished": ROW}, planned=False)
        assert resumed.planned_steps() == []
        finished = {"unfinished": None}
        resumed.save(1, make_state(seed), finished, val_loss=2.0)
        for step in (2, 3):
            resumed.save(step, make_state(step), finished, val_loss=1.0 + step)
    last = open_checkpointer(**settings)
    assert (last.steps(), last.best_step) == ([1, 3], 1)
    assert last.manifest(1).meta["unfinished"] is None
    state = last.restore(abstract(make_state(1)), 1).state
    assert bits(state) == bits(make_state(seed))
