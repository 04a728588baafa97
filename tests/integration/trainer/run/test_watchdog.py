import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from trainer.assembly.build import build_watchdog
from trainer.config.composition import compose_config
from trainer.precision.gradients import first_loss_scale, next_loss_scale
from trainer.run.watchdog import Bounds, Watchdog
from trainer.step.nonfinite import first_nonfinite_operation

OK = {"loss": 1.0, "grad_norm": 1.0, "finite": True, "bad_leaf": -1}
BAD = {"loss": float("nan"), "grad_norm": float("nan"), "finite": False, "bad_leaf": 1}
LEAVES = ["h_0/kernel", "h_1/kernel"]
BOUNDS = Bounds(
    max_skips=2, spike_zscore=4.0, spike_window=8, spike_steps=3, max_rollbacks=1
)
NOISE = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]  # standard deviation 0.07


def make(state=None):
    return Watchdog(BOUNDS, LEAVES, state)


def losses(dog, values, start=1):
    """Show finite losses, one a step, and return the events."""
    events = [dog.observe(start + i, OK | {"loss": x}) for i, x in enumerate(values)]
    return [event for event in events if event is not None]


def test_a_skip_is_counted_and_names_the_first_bad_gradient_and_a_finite_step_is_no_event():
    dog = make()
    assert dog.observe(1, OK) is None
    assert dog.row() == {"watchdog/skipped": 0, "watchdog/rollbacks": 0}
    event = dog.observe(7, BAD)
    assert "step 7 skipped" in event
    assert "h_1/kernel" in event
    assert (dog.row()["watchdog/skipped"], dog.suspect_since) == (1, 7)
    assert not dog.is_spiking  # the state is what it was


def test_only_skips_in_a_row_are_too_many():
    dog = make()
    for step, metrics in enumerate([BAD, OK, BAD, OK, BAD]):
        dog.observe(step, metrics)
        assert dog.rollback_reason is None
    dog.observe(5, BAD)
    assert "2 steps in a row were not finite" in dog.rollback_reason
    assert dog.suspect_since == 4
    assert dog.row()["watchdog/skipped"] == 4


def test_a_spike_is_far_above_the_losses_before_it_and_several_in_a_row_are_too_many():
    dog = make()
    # the first is out of the window by then; 0.1 is good news
    assert losses(dog, [9.0, *NOISE, 1.25, 0.1]) == []
    (event,) = losses(dog, [3.0], start=12)
    assert "step 12: spike (loss 3" in event
    assert dog.is_spiking
    assert losses(dog, [1.0, 3.0, 3.1], start=13) != []
    assert (dog.rollback_reason, dog.suspect_since) == (None, 14)
    losses(dog, [3.2], start=16)
    assert "3 losses in a row were spikes (loss 3.2" in dog.rollback_reason


def test_nothing_is_a_spike_before_the_window_is_full_or_when_the_bound_is_zero():
    assert losses(make(), [*NOISE[:7], 50.0]) == []
    dog = Watchdog(dataclasses.replace(BOUNDS, spike_zscore=0.0), LEAVES)
    assert losses(dog, [*NOISE, 50.0, 50.0, 50.0]) == []
    assert dog.rollback_reason is None


def test_a_loss_that_hardly_varies_may_move_a_little():
    dog = make()
    assert losses(dog, [1.0] * 8 + [1.03]) == []
    assert losses(dog, [1.0] * 8 + [1.06], start=10) != []


def test_after_a_rollback_it_counts_anew_and_not_more_often_than_allowed():
    dog = make()
    losses(dog, [*NOISE, 3.0, 3.0, 3.0])
    assert dog.may_roll_back
    dog.rolled_back(11)
    assert dog.rollback_reason is dog.suspect_since is None
    assert not dog.is_spiking
    assert not dog.may_roll_back
    # spikes are not in the window that they are measured by
    assert losses(dog, [3.0], start=12) != []
    dog.restart_spike_window()
    assert losses(dog, [3.0] * 20, start=13) == []


def test_a_resumed_watchdog_goes_on_as_if_never_stopped():
    sequence = [*NOISE, 3.0, float("nan"), 3.0, 1.0, 3.0, 3.1, 3.2]

    def steps(dog, values, start):
        rows = [(OK if x == x else BAD) | {"loss": x} for x in values]
        return [dog.observe(start + i, row) for i, row in enumerate(rows)]

    uninterrupted = make()
    expected = steps(uninterrupted, sequence, 1)
    for cut in range(1, len(sequence)):
        stopped = make()
        events = steps(stopped, sequence[:cut], 1)
        resumed = make(json.loads(json.dumps(stopped.state())))
        assert events + steps(resumed, sequence[cut:], cut + 1) == expected
        assert resumed.state() == uninterrupted.state()
        assert resumed.rollback_reason == uninterrupted.rollback_reason


def test_weights_that_are_not_finite_are_no_matter_of_spikes():
    dog = make()
    losses(dog, [*NOISE, 3.0])
    assert dog.is_spiking
    dog.check_state(9, "params/wte")
    assert dog.rollback_reason == "params/wte is not finite after step 9"
    assert not dog.is_spiking
    dog.rolled_back(9)
    dog.check_state(10, None)
    assert dog.rollback_reason is None


def test_a_run_that_ends_in_skips_or_without_a_finite_validation_has_failed():
    dog = make()
    dog.observe(1, OK)
    for losses, failure in (
        ([1.0], None),
        ([], None),
        ([1.0, float("nan")], "the validation loss after the last step is nan"),
    ):
        dog.finish(1, losses)
        assert dog.failure == failure
    dog.observe(2, OK)  # the run was made longer
    assert dog.failure is None
    dog.observe(3, BAD)
    dog.finish(3, [1.0])
    assert dog.failure == "the last 1 steps were not finite and were skipped"
    assert make(json.loads(json.dumps(dog.state()))).failure == dog.failure


def test_a_run_that_ends_with_an_older_state_has_failed():
    dog = make()
    dog.rolled_back(2)
    dog.finish(2, [1.0])
    assert dog.failure == "the run was rolled back after its last step"
    dog.observe(3, OK)
    dog.finish(3, [1.0])
    assert dog.failure is None


def test_the_skips_of_a_loss_scale_are_no_failure_unless_all_steps_were():
    bounds = dataclasses.replace(BOUNDS, max_skips=20, loss_scale_skips=2)
    dog = Watchdog(bounds, LEAVES)
    for step, failed in ((1, False), (2, False), (3, True)):
        dog.observe(step, BAD)
        dog.finish(9, [1.0])
        assert (dog.failure is not None) == failed
    dog = Watchdog(bounds, LEAVES)
    dog.observe(1, BAD)
    dog.finish(1, [1.0])
    assert dog.failure == "no step was finite, so all were skipped"


def first_finding(fn, *args):
    finding = first_nonfinite_operation(fn, *args)
    assert finding is not None
    return finding


def test_the_argument_that_is_not_finite_is_named():
    finding = first_finding(lambda p: p["w"].sum(), {"w": jnp.array([1.0, jnp.inf])})
    assert (finding.operation, finding.path) == ("argument", "0/w")
    assert "1 inf of 2" in finding.result


def bad_log(x):
    with jax.named_scope("bad"):
        return jnp.log(x - 2.0)


def nested(wrap):
    """Two harmless operations, the bad one inside `wrap`, and one that inherits the
    NaN."""
    return lambda x: jnp.sin(wrap(bad_log)(x * 1.0)) * 2.0


@jax.custom_jvp
def with_jvp(x):
    return bad_log(x)


with_jvp.defjvps(lambda t, y, x: t)


@jax.custom_vjp
def with_vjp(x):
    return bad_log(x)


with_vjp.defvjp(lambda x: (bad_log(x), None), lambda _, g: (g,))

WRAPPERS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "donating jit": lambda f: jax.jit(f, donate_argnums=0),
    "remat": jax.checkpoint,
    "custom_jvp": lambda f: with_jvp,
    "custom_vjp": lambda f: with_vjp,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: jax.lax.switch(5, [lambda x: x, f], x),
    "vmap": jax.vmap,
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_the_operation_is_found_inside(wrap):
    finding = first_finding(nested(WRAPPERS[wrap]), jnp.ones(3))
    assert finding.operation == "log"
    assert "bad" in finding.path
    assert "test_watchdog.py" in finding.source
    assert "float32[3] with 3 nan of 3" in finding.result
    assert finding.operands == ("float32[3] |x| <= 1",)
    assert str(finding).startswith("log in ")
    assert "\n" not in str(finding)


def test_the_iteration_of_a_scan_is_named_counted_from_the_front():
    def body(carry, x):
        return carry - 1.0, jnp.log(carry) + x

    for reverse, where in ((False, "scan[3]"), (True, "scan[1]")):
        finding = first_finding(
            lambda c, r=reverse: jax.lax.scan(body, c, jnp.ones(5), reverse=r)[1],
            jnp.float32(2.5),
        )
        assert (finding.operation, finding.path) == ("log", where)


def test_the_backward_pass_is_searched_too():
    # The square root is finite at 0, its derivative is not.
    finding = first_finding(
        jax.jit(jax.value_and_grad(lambda x: jnp.sqrt(x).sum())), jnp.array([0.0, 1.0])
    )
    assert finding.operation == "div"
    assert "inf" in finding.result


def test_a_mask_of_minus_infinity_is_no_finding():
    def attention(scores):
        return jax.nn.softmax(
            jnp.where(jnp.tril(jnp.ones((3, 3), bool)), scores, -jnp.inf)
        ).sum()

    assert first_nonfinite_operation(attention, jnp.ones((3, 3))) is None


def test_float8_integers_and_keys_are_understood():
    def fn(x, n, key):
        noise = jax.random.normal(key, x.shape)
        return (x.astype(jnp.float32) + noise * n) / 0.0

    finding = first_finding(
        fn, jnp.ones(2, jnp.float8_e4m3fn), jnp.int32(3), jax.random.key(0)
    )
    assert finding.operation == "div"


def test_the_halvings_of_a_first_loss_scale_are_not_too_many_skips():
    settings = compose_config([]).watchdog
    propagate, dog = (
        build_watchdog(settings, scaling, LEAVES, None)
        for scaling in ("propagate", "loss_scale")
    )
    assert propagate.bounds.max_skips == settings.max_skips
    assert dog.bounds.max_skips == settings.max_skips + 15
    scale = first_loss_scale()
    for step in range(15):
        dog.observe(step + 1, BAD)
        scale = next_loss_scale(scale, (), jnp.bool(False))
    assert (float(scale.value), dog.rollback_reason) == (1.0, None)
