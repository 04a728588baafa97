"""Families that are nearly Llama compute what transformers computes.

`scripts/studies/family_references.py` wrote the models and their logits.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import load_file
from small_models import matmul_flops

from trainer.config.composition import CONFIGS
from trainer.config.fields import from_tree
from trainer.config.inherited import inherit
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.flops import forward_flops_per_token, param_count
from trainer.models.registry import SPECS, family_of
from trainer.models.weight_files import read_object

DATA = Path(__file__).parents[3] / "data" / "families"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())


def loaded(name):
    return huggingface.family_at(DATA / name).huggingface.load(DATA / name, None)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name):
    reference = np.load(DATA / name / "reference.npz")
    ids, expected = reference["ids"], reference["logits"]
    spec, params = loaded(name)
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    family, close = family_of(spec), 1e-5 * np.abs(expected).max()
    for scan in (False, True):
        model = family.build(dataclasses.replace(spec, scan_layers=scan))
        weights = family.stack_layers(params) if scan else params
        actual = jax.jit(lambda p, m=model: m.bind(p)(ids))(weights)
        np.testing.assert_allclose(actual, expected, atol=close, rtol=0)

        @jax.jit
        def decoded(p, model=model):
            bound = model.bind(p)
            cache, parts = bound.init_cache(2, ids.shape[1]), []
            for start, end in ((0, 17), (17, 18), (18, 24)):
                h, cache = bound.decode(ids[:, start:end], cache, start)
                parts.append(h)
            h_NxD = jnp.concatenate(parts, axis=1).reshape(-1, spec.d_model)
            return bound.logits(h_NxD).reshape(expected.shape)

        np.testing.assert_allclose(decoded(weights), expected, atol=close, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_same_tensors_and_an_equal_config(name, tmp_path):
    spec, params = loaded(name)
    files = huggingface.save(tmp_path / "out", spec, params)
    written, given = load_file(files[0]), {}
    for file in (DATA / name).glob("*.safetensors"):
        given |= load_file(file)
    assert written.keys() == given.keys()
    for key, tensor in given.items():
        np.testing.assert_array_equal(written[key], tensor)
    again, _ = huggingface.load(tmp_path / "out", spec)
    assert dataclasses.replace(again, init_std=spec.init_std) == spec
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((DATA / name / "config.json").read_text())
    assert {k: v for k, v in ours.items() if theirs.get(k, v) != v} == {}


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
    weights = OmegaConf.load(Path(CONFIGS, "model", f"{preset}.yaml"))
    base = (
        weights.pop("defaults")[0].removeprefix("/").removesuffix("@_here_") + ".yaml"
    )
    tree = OmegaConf.load(Path(CONFIGS, base))
    if "defaults" in tree:
        tree.pop("defaults")
        tree = OmegaConf.merge(OmegaConf.load(Path(CONFIGS, "base/llama.yaml")), tree)
    keys = OmegaConf.to_container(OmegaConf.merge(tree, weights))
    cls = SPECS[keys["family"]]
    names = {field.name for field in dataclasses.fields(cls)}
    spec = from_tree(cls, {k: v for k, v in keys.items() if k in names})
    assert param_count(spec) == published


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        # layer_types go first, and the file's are full attention
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": None,
            },
            "use_sliding_window=True is not",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "'sliding_attention'"),
        (
            "llama_llama3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "contr",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers=.*is not supp"),
        ("mistral_window", {"sliding_window": "7"}, "sliding_window='7': expected a"),
    ],
)
def test_a_variant_that_the_model_lacks_is_refused(name, change, message):
    config = read_object(DATA / name / "config.json") | change
    cls = SPECS[config["model_type"]]
    with pytest.raises(UserError, match=message):
        cls.of_config(config)


def test_both_places_of_rotary_positions_may_say_the_same():
    config = read_object(DATA / "llama_llama3" / "config.json")
    scaling = dict(config["rope_parameters"])
    del scaling["rope_theta"]
    cls = SPECS["llama"]
    for both in (scaling, config["rope_parameters"]):
        assert cls.of_config(config | {"rope_scaling": both}) == cls.of_config(config)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10**400},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1e400},
    ],
)
def test_rotary_positions_of_odd_numbers_are_a_line(tmp_path, rope):
    config = read_object(DATA / "qwen2" / "config.json") | {"rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        inherit({"name": "from_init"}, str(tmp_path))
    assert "\n" not in str(error.value)
