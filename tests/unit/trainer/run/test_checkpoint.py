"""What is saved comes back bit for bit, on other devices too; what stays; what does not
fit."""

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
from trainer.step.state_tree import describe

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
        str(np.dtype(dtype)): jnp.asarray(
            rng.integers(0, 256, 64 * np.dtype(dtype).itemsize, np.uint8).view(dtype)
        )
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
    } | {
        "bool": jnp.array([True, False]),
        "scalar": jnp.float32(np.nan),
        "empty": jnp.zeros((0, 3)),
    }
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    assert bits(checkpointer.restore(abstract(state)).state) == bits(state)


def test_the_save_is_of_the_values_at_the_call_although_the_next_step_reuses_their_memory(
    open_checkpointer,
):
    step = jax.jit(lambda x: jax.tree.map(lambda a: a * 2 + 1, x), donate_argnums=0)
    state = {
        "w": jnp.asarray(
            np.random.default_rng(0).standard_normal((512, 512)), jnp.float32
        )
    }
    before = bits(state)
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    assert bits(checkpointer.restore(abstract(state)).state) == before


def test_a_state_sharded_over_8_devices_comes_back_on_fewer(open_checkpointer):
    def mesh(n):
        return jax.make_mesh(
            (n,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n]
        )

    spec = {
        "w": PartitionSpec("data"),
        "v": PartitionSpec(None, "data"),
        "n": PartitionSpec(),
        "key": PartitionSpec(),
    }
    state = {
        "w": jnp.arange(64.0).reshape(16, 4),
        "v": jnp.ones((3, 8)),
        "n": jnp.int32(7),
        "key": jax.random.key(1),
    }
    on_8 = {
        k: jax.device_put(v, NamedSharding(mesh(8), spec[k])) for k, v in state.items()
    }
    checkpointer = open_checkpointer()
    checkpointer.save(1, on_8, {})
    target = {
        k: jax.ShapeDtypeStruct(
            v.shape, v.dtype, sharding=NamedSharding(mesh(2), spec[k])
        )
        for k, v in state.items()
    }
    restored = checkpointer.restore(target).state
    assert bits(restored) == bits(state)
    assert {k: v.sharding for k, v in restored.items()} == {
        k: v.sharding for k, v in target.items()
    }


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


def save_with_losses(checkpointer, *losses):
    for step, loss in losses:
        checkpointer.save(step, make_state(step), {}, val_loss=loss)
    checkpointer.wait()
    return checkpointer


def test_the_best_stays_too(open_checkpointer):
    losses = [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, float("nan")), (6, 1.5)]
    checkpointer = save_with_losses(open_checkpointer(keep=1, keep_best=True), *losses)
    assert checkpointer.steps() == [2, 6]
    assert checkpointer.best_step == 2


def test_the_best_is_still_known_after_a_restart(open_checkpointer):
    save_with_losses(open_checkpointer(keep=1, keep_best=True), (1, 1.0), (2, 2.0))
    second = save_with_losses(open_checkpointer(keep=1, keep_best=True), (3, 3.0))
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
        (
            lambda s: s | {"b": jnp.ones((2, 3))},
            r"leaf b is float32\[2\], expected float32\[2, 3\]",
        ),
        (
            lambda s: s | {"b": jnp.ones(2, jnp.bfloat16)},
            r"leaf b is float32\[2\], expected bfloat16\[2\]",
        ),
        (lambda s: s | {"c": jnp.ones(2)}, r"it has no leaf c, expected float32\[2\]"),
        (
            lambda s: {"a": s["a"]},
            r"it has a leaf b, float32\[2\], that is not expected",
        ),
        (
            lambda s: s | {"b": jax.random.key(0)},
            r"leaf b is float32\[2\], expected key<fry>\[\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_names_the_leaf_and_both_sides(
    open_checkpointer, change, message
):
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


def test_a_few_bytes_do_not_hold_more_than_there_is_memory(open_checkpointer):
    state = {"w": jnp.zeros((2**14, 2**11), jnp.float32)}  # 128 MiB in some kilobytes
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    with pytest.raises(UserError, match=r"bytes are to hold 134,217,728 bytes"):
        checkpointer.restore(abstract(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": [100_000_000]}, r"w/\.zarray is not as the trainer writes it"),
        ({"dtype": "<V100000000"}, r"w/\.zarray is not as the trainer writes it"),
        (None, r"w/zarr\.json is not as the trainer writes it"),
    ],
)
def test_a_chunk_is_no_larger_than_its_array(open_checkpointer, change, message):
    """TensorStore would decode the whole of it."""
    state = {"w": jnp.arange(3.0)}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    checkpointer.wait()
    folder = checkpointer.directory / "1" / "state"
    base = {"driver": "file", "path": f"{folder}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    description = json.loads(store["w/.zarray"])
    if change is None:
        store["w/zarr.json"] = "{}"
    else:
        store["w/.zarray"] = json.dumps(description | change)
    with pytest.raises(UserError, match=message):
        checkpointer.restore(abstract(state))


@pytest.mark.parametrize("scale", [-0.5, 3.0, 0.0, 2.0**127])
def test_a_scale_that_no_trainer_writes_is_refused(open_checkpointer, scale):
    x = jax.tree.map(jnp.asarray, ScaledArray(jnp.ones(3, jnp.float16), jnp.float32(2)))
    _, structure = jax.tree.flatten(x)
    state = {"w": jax.tree.unflatten(structure, [x.data, jnp.float32(scale)])}
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, {})
    with pytest.raises(UserError, match=r"w: ScaledArray: scale is .*power of two"):
        checkpointer.restore(abstract(state))


ROW = '{"step": 1, "train/loss": 1.0}'


@pytest.mark.parametrize(("again", "unfinished"), [(1, None), (9, ROW)])
def test_a_step_that_was_interrupted_gets_its_validation_loss_later(
    open_checkpointer, again, unfinished
):
    """Otherwise it could not be the best one, which is kept. The loss is that of the
    saved arrays: it is measured before a rescale, which made state 9. A run may then
    be interrupted in that step once more."""
    settings = {"keep": 1, "keep_best": True}
    with open_checkpointer(**settings) as first:
        first.save(1, make_state(1), {"unfinished": ROW})
    with open_checkpointer(**settings) as resumed:
        whole = {"unfinished": None}
        assert not resumed.save(1, make_state(again), whole, val_loss=2.0)
        assert not resumed.save(1, make_state(1), {"unfinished": unfinished})
        for step in (2, 3):
            resumed.save(step, make_state(step), whole, val_loss=1.0 + step)
    last = open_checkpointer(**settings)
    assert (last.steps(), last.best_step) == ([1, 3], 1)
    assert last.meta(1)["unfinished"] == unfinished
    assert bits(last.restore(abstract(make_state(1)), 1).state) == bits(make_state(1))
