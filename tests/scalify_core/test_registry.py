"""What happens without a rule."""

import warnings

import jax.numpy as jnp
import numpy as np

from scalify_core import as_scaled_array, asarray, composite, scalify


def test_each_composite_without_a_rule_is_named_in_a_warning_at_the_line_of_the_call():
    @composite(name="halved_root")
    def first(x):
        return jnp.sqrt(x) / 2

    @composite(name="doubled_root")
    def second(x):
        return jnp.sqrt(x) * 2

    x = as_scaled_array(jnp.asarray([4.0, 16.0]), 4.0)
    for fun, name in ((first, "halved_root"), (second, "doubled_root")):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            out = scalify(lambda x, fun=fun: fun(x))(x)
        np.testing.assert_array_equal(asarray(out), fun(jnp.asarray([4.0, 16.0])))
        (warning,) = found
        assert f"composite '{name}'" in str(warning.message)
        assert warning.filename == __file__
