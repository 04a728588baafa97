import jax.numpy as jnp
import pytest

from trainer.models.flops import (
    flop_share,
    flops_per_token,
    forward_flops_per_token,
    linear_sizes,
)
from trainer.models.gpt2.spec import GPT2Spec
from trainer.observe.peaks import peak_flops

GPT2_124M = GPT2Spec(vocab_size=50257)


def test_gpt2_124m_by_hand():
    # 12 layers of 12 * 768^2 weights, the head's 768 * 50257, and 4 * 12 * 1024 * 768
    # for attention.
    assert (
        forward_flops_per_token(GPT2_124M)
        == 2 * 84_934_656 + 2 * 38_597_376 + 37_748_736
        == 284_812_800
    )
    assert flops_per_token(GPT2_124M) == 854_438_400


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", jnp.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", jnp.float8_e4m3fn, 1978.9),
        ("NVIDIA H100 80GB HBM3", jnp.float32, 494.7),
        ("NVIDIA H100 PCIe", jnp.float16, 756),
        ("NVIDIA H200", jnp.float8_e5m2, 1978.9),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, 312),
        ("NVIDIA L4", jnp.bfloat16, 121),
        ("NVIDIA L40S", jnp.bfloat16, 362),
        ("TPU v5 lite", jnp.bfloat16, 197),
        ("TPU v5", jnp.bfloat16, 459),
        ("cpu", jnp.float32, None),
        ("NVIDIA L40", jnp.bfloat16, None),
        ("NVIDIA A100-SXM4-80GB", jnp.float8_e4m3fn, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", jnp.bfloat16, None),
    ],
)
def test_peak_is_the_makers_dense_figure_where_it_is_known(kind, dtype, tera):
    assert peak_flops(kind, dtype) == (tera and tera * 1e12)


def test_the_share_of_some_layers_by_hand():
    # 2 * 84,934,656 of 284,812,800, see above; of the two MLP layers two thirds of
    # that.
    paths = linear_sizes(GPT2_124M)
    share = 2 * 84_934_656 / 284_812_800
    assert flop_share(GPT2_124M, paths) == pytest.approx(share)
    assert flop_share(GPT2_124M, [p for p in paths if ".mlp." in p]) == pytest.approx(
        2 / 3 * share
    )
    scanned = GPT2Spec(vocab_size=50257, scan_layers=True)
    assert flop_share(scanned, linear_sizes(scanned)) == flop_share(GPT2_124M, paths)
