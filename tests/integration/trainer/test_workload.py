"""The first state: how much is compiled for it."""

import dataclasses

import jax
import pytest
from precisions import SPEC, workload

from trainer.workload import first_state


@pytest.fixture
def compiled():
    """The number of lines of every program that is compiled."""
    client, sizes = jax.devices()[0].client, []
    known = set(client.live_executables())

    def record(event, seconds, **_):
        if event != "/jax/core/compile/backend_compile_duration":
            return
        for executable in set(client.live_executables()) - known:
            known.add(executable)
            modules = executable.hlo_modules()
            sizes.append(sum(len(m.to_string().splitlines()) for m in modules))

    jax.monitoring.register_event_duration_secs_listener(record)
    yield sizes
    jax.monitoring.unregister_event_duration_listener(record)


@pytest.mark.parametrize(
    ("preset", "width"),  # each has widths of its own, so that nothing is compiled yet
    [("fp32", 40), ("scalify_fp8_fp8", 56)],
)
def test_a_deeper_model_takes_no_more_and_no_larger_programs_for_its_first_state(
    preset, width, compiled
):
    # The first depth compiles what all of them share. The others, which no other test
    # has, compile kernels of another standard deviation, and operations on the keys of
    # their layers.
    sizes = []
    for n_layer in (1, 5, 7):
        compiled.clear()
        spec = dataclasses.replace(SPEC, n_layer=n_layer, d_model=width)
        first_state(workload(preset, spec=spec), seed=n_layer)
        sizes.append(sorted(compiled))
    assert len(sizes[2]) == len(sizes[1]) < len(sizes[0]), sizes
    assert max(sizes[2]) == max(sizes[1]), sizes
