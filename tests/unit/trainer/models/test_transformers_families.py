"""Families that are nearly Llama compute what transformers computes.

`scripts/studies/family_references.py` wrote the models and their logits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configurations import configured
from family_files import DATA, config_of
from safetensors.numpy import load_file
from small_models import matmul_flops

from trainer.errors import UserError
from trainer.files import read_object
from trainer.models import huggingface
from trainer.models.blocks import stack_layers
from trainer.models.flops import forward_flops_per_token, param_count
from trainer.models.registry import SPECS, family_of

CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def loaded(name):
    return huggingface.family_at(DATA / name).huggingface.load(DATA / name, None)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    """In one pass of unrolled layers, and in pieces with a cache of scanned ones."""
    reference = np.load(DATA / name / "reference.npz")
    ids, expected = reference["ids"], reference["logits"]
    spec, params = loaded(name)
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    family, close = family_of(spec), 1e-5 * np.abs(expected).max()
    bind = family.build(spec).bind
    actual = jax.jit(lambda p: bind(p)(ids))(params)
    np.testing.assert_allclose(actual, expected, atol=close, rtol=0)
    scanned = family.build(dataclasses.replace(spec, scan_layers=True)).bind

    @jax.jit
    def decoded(p):
        bound = scanned(p)
        cache, parts = bound.init_cache(2, ids.shape[1]), []
        for start, end in ((0, 17), (17, 18), (18, 24)):
            h, cache = bound.decode(ids[:, start:end], cache, start)
            parts.append(h)
        h_NxD = jnp.concatenate(parts, axis=1).reshape(-1, spec.d_model)
        return bound.logits(h_NxD).reshape(expected.shape)

    actual = decoded(jax.jit(stack_layers)(params))
    np.testing.assert_allclose(actual, expected, atol=close, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_same_tensors_and_an_equal_config(name, tmp_path):
    """Scanned layers, a gain of values and a smoothed MLP leave no trace."""
    spec, params = loaded(name)
    how = {"value_gain": 4096.0} if name == "gpt2" else {"mlp": "smooth_swiglu"}
    ours = dataclasses.replace(spec, scan_layers=True, **how)
    stacked = jax.jit(stack_layers)(params)
    (file,) = huggingface.save(tmp_path, ours, stacked, eot=7)
    written, given = load_file(file), {}
    for file in (DATA / name).glob("*.safetensors"):
        given |= load_file(file)
    assert written.keys() == given.keys()
    for key, tensor in given.items():
        assert written[key].dtype == tensor.dtype
        np.testing.assert_array_equal(written[key], tensor)
    other = SPECS["gpt2" if name != "gpt2" else "llama"](vocab_size=61)
    reloaded, _ = huggingface.load(tmp_path, other)  # what the files say counts
    assert dataclasses.replace(reloaded, init_std=spec.init_std) == spec
    config = read_object(tmp_path / "config.json")
    assert config["eos_token_id"] == 7
    theirs = config_of(name, bos_token_id=7, eos_token_id=7)
    assert {k: v for k, v in config.items() if theirs.get(k, v) != v} == {}


@pytest.mark.parametrize("name", sorted(set(CASES) - {"mistral_window"}))
def test_flops_are_those_of_the_traced_products(name):
    """A window's products are traced whole, and counted as they need be."""
    spec, params = loaded(name)
    spec = dataclasses.replace(spec, context=24)
    tokens = np.zeros((1, 24), np.int32)
    if name == "gpt2":
        params["wpe"]["embedding"] = params["wpe"]["embedding"][:24]
    bind = family_of(spec).build(spec).bind
    traced = jax.make_jaxpr(lambda p: bind(p)(tokens))(params)
    assert matmul_flops(traced.jaxpr) == 24 * forward_flops_per_token(spec)


def test_olmo2_is_not_split_by_heads():
    spec, _ = loaded("olmo2")
    family_of(spec).check_tensor(spec, 1, 1)
    with pytest.raises(UserError, match=r"over all\s+heads.*set parallel.tensor=1"):
        family_of(spec).check_tensor(spec, 2, 1)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_350m", 354_823_168),
        ("gpt2_774m", 774_030_080),
        ("gpt2_1558m", 1_557_611_200),
        ("llama2_7b", 6_738_415_616),
        ("smollm2_135m", 134_515_008),
        ("llama32_1b", 1_235_814_400),
        ("mistral_7b", 7_241_732_096),
        ("qwen25_0_5b", 494_032_768),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("smollm3_3b", 3_075_098_624),
        ("olmo2_1b", 1_484_916_736),
        ("llama31_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, published):
    # tracing many unrolled layers takes seconds
    for scan in ("false", "true") if published < 2e8 else ("true",):
        keys = (f"model={preset}", f"model.scan_layers={scan}")
        model = configured(*keys, "train.batch_tokens=131072").model
        assert param_count(model.spec(model.vocab_size or 50257)) == published
