"""Scale propagation for JAX programs: narrow floating point without loss scaling or
amax histories.

These names are enough to train a model of your own:

    params = as_scaled_array(params, dtype=jnp.float16)
    tx = scaled_state(optax.adamw(1e-3), mu=jnp.float16, nu=jnp.float16, seed=0)
    state = tx.init(params)
    grads = scalify(jax.grad(loss))(params, batch)  # gradients are taken inside
    updates, state = tx.update(grads, state, params)
    params = apply_updates(params, updates)

`explain(f)(...)` and `check_scalify` say where a format loses something. Beside them
are modules: `functional` (layers with gradients of their own), `optim` and `weights`
(state and parameters in narrow formats), `tree`, and `static` (scales by hand).
"""

from scalify_core import optim, static
from scalify_core.array import tree
from scalify_core.array.scaled_array import ScaledArray, as_scaled_array, asarray
from scalify_core.debug.explain import explain
from scalify_core.debug.testing import check_scalify
from scalify_core.interpreter.transform import scalify
from scalify_core.numerics.precision_warnings import PrecisionWarning
from scalify_core.ops import functional
from scalify_core.ops.matmul import fp8_dot_general
from scalify_core.optim import scaled_state, weights
from scalify_core.optim.weights import apply_updates

__all__ = [
    "PrecisionWarning",
    "ScaledArray",
    "apply_updates",
    "as_scaled_array",
    "asarray",
    "check_scalify",
    "explain",
    "fp8_dot_general",
    "functional",
    "optim",
    "scaled_state",
    "scalify",
    "static",
    "tree",
    "weights",
]
