"""Programs as a GPU would get them, compiled without one."""

import pathlib

import jax
from jax.experimental import topologies


def compiled_for_a_gpu(step, args):
    """As an H200 would get it."""
    target = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    device = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x8"
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    # Without a device to tune on; quickly: the machine code is thrown away.
    quickly = {
        "xla_backend_optimization_level": 0,
        "xla_gpu_disable_gpuasm_optimizations": True,
    }
    return step.lower(*args).compile(
        compiler_options={"xla_gpu_autotune_level": 0, **quickly}
    )
