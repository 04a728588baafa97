import json
import math
import resource

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.gpt2.huggingface import load_gpt2, save_gpt2
from trainer.models.gpt2.model import functional
from trainer.models.gpt2.spec import GPT2Spec
from trainer.models.registry import family_of
from trainer.models.weight_files import write_file

V, T, D, L, H = 100, 24, 32, 3, 4
CONFIG = {
    "model_type": "gpt2",
    "n_head": H,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}


def tensors(prefix="transformer.", dtype=np.float32):
    """A random GPT-2 under Hugging Face's names. No tensor is all 0 or 1: each must be
    in its place."""
    rng = np.random.default_rng(0)
    shapes = {
        "wte.weight": (V, D),
        "wpe.weight": (T, D),
        "ln_f.weight": (D,),
        "ln_f.bias": (D,),
    }
    for i in range(L):
        for name, shape in {
            "ln_1": (D,),
            "attn.c_attn": (D, 3 * D),
            "attn.c_proj": (D, D),
            "ln_2": (D,),
            "mlp.c_fc": (D, 4 * D),
            "mlp.c_proj": (4 * D, D),
        }.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {
        prefix + name: (0.2 * rng.normal(size=shape)).astype(dtype)
        for name, shape in shapes.items()
    }


def write(directory, weights, config=CONFIG):
    directory.mkdir(parents=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def reference_logits(w, tokens):
    """GPT-2's forward pass in float64 NumPy, one sequence and one head at a time."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred
            / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def dense(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu_new(x):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    w = {
        name.removeprefix("transformer."): tensor.astype(np.float64)
        for name, tensor in w.items()
    }
    logits = []
    for ids in tokens:
        x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
        for i in range(L):
            q, k, v = np.split(
                dense(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1
            )
            heads = []
            for h in range(H):
                part = slice(h * D // H, (h + 1) * D // H)
                scores = q[:, part] @ k[:, part].T / math.sqrt(D // H)
                scores[np.triu_indices(len(ids), 1)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            x = x + dense(np.concatenate(heads, -1), f"h.{i}.attn.c_proj")
            x = x + dense(
                gelu_new(dense(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")),
                f"h.{i}.mlp.c_proj",
            )
        logits.append(norm(x, "ln_f") @ w["wte.weight"].T)
    return np.stack(logits)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_logits_equal_a_hugging_face_gpt2_to_1e_4(tmp_path, prefix):
    weights = tensors(prefix)
    spec, params = load_gpt2(write(tmp_path / "gpt2", weights))
    assert spec == GPT2Spec(vocab_size=V, context=T, n_layer=L, n_head=H, d_model=D)
    tokens = np.random.default_rng(1).integers(0, V, (2, T))
    bind = functional(spec).bind
    logits = jax.jit(lambda p, t: bind(p)(t))(params, tokens)
    np.testing.assert_allclose(
        logits, reference_logits(weights, tokens), atol=1e-4, rtol=0
    )


def test_export_is_the_same_file_again(tmp_path):
    source = write(tmp_path / "gpt2", tensors())
    spec, params = load_gpt2(source)
    (out,) = save_gpt2(tmp_path / "out", spec, params, eot=7)
    assert out.read_bytes() == (source / "model.safetensors").read_bytes()
    # as readable as the files beside it
    assert out.stat().st_mode == (tmp_path / "out" / "config.json").stat().st_mode
    loaded, _ = load_gpt2(tmp_path / "out")
    assert loaded == spec
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    )


def test_half_precision_files_keep_their_bits(tmp_path):
    source = write(tmp_path / "gpt2", tensors(dtype=ml_dtypes.bfloat16))
    (out,) = save_gpt2(tmp_path / "out", *load_gpt2(source))
    assert out.read_bytes() == (source / "model.safetensors").read_bytes()


def test_mask_buffers_and_a_tied_head_are_ignored(tmp_path):
    weights = tensors("")
    extra = {
        "h.0.attn.bias": np.tri(T, dtype=np.float32)[None, None],
        "h.1.attn.masked_bias": np.float32([-1e4]),
    }
    spec, params = load_gpt2(
        write(
            tmp_path / "gpt2",
            weights | extra | {"lm_head.weight": weights["wte.weight"]},
        )
    )
    out = load_file(save_gpt2(tmp_path / "out", spec, params)[0])
    assert set(out) == {f"transformer.{name}" for name in weights}
    assert all(
        np.array_equal(out[f"transformer.{name}"], tensor)
        for name, tensor in weights.items()
    )


def test_scanned_layers_export_the_same_file(tmp_path):
    source = write(tmp_path / "gpt2", tensors())
    spec, params = load_gpt2(source)
    scanned = GPT2Spec(**{**vars(spec), "scan_layers": True})
    (out,) = huggingface.save(
        tmp_path / "out", scanned, family_of(spec).stack_layers(params)
    )
    assert out.read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_value_gain_which_is_no_part_of_the_parameters_exports_the_same_file(
    tmp_path,
):
    source = write(tmp_path / "gpt2", tensors())
    spec, params = load_gpt2(source)
    gained = GPT2Spec(**{**vars(spec), "value_gain": 4096.0})
    (out,) = save_gpt2(tmp_path / "out", gained, params)
    assert out.read_bytes() == (source / "model.safetensors").read_bytes()


def test_loaded_vocabulary_padding_is_zero_and_stays_out_of_the_logits(tmp_path):
    spec, params = load_gpt2(write(tmp_path / "gpt2", tensors()))
    assert params["wte"]["embedding"].shape == (128, D)
    assert not params["wte"]["embedding"][V:].any()
    assert functional(spec)[1](params)(jnp.zeros((1, T), jnp.int32)).shape == (1, T, V)


def test_file_without_config_needs_the_number_of_heads(tmp_path):
    file = write(tmp_path / "gpt2", tensors(), config=None) / "model.safetensors"
    assert load_gpt2(file, n_head=H)[0].n_head == H
    with pytest.raises(UserError, match=r"no config\.json tells the number of heads"):
        load_gpt2(file)


def broken(change):
    weights = tensors()
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (tensors(), CONFIG | {"model_type": "llama"}, "model_type='llama'"),
        (
            tensors(),
            CONFIG | {"activation_function": "relu"},
            "activation_function='relu'",
        ),
        (tensors(), CONFIG | {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        (
            tensors(),
            CONFIG | {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True",
        ),
        (
            broken(lambda w: w.pop("transformer.h.1.ln_2.bias")),
            CONFIG,
            r"tensor h\.1\.ln_2\.bias \(32,\) is missing",
        ),
        (
            broken(lambda w: w.pop("transformer.wpe.weight")),
            CONFIG,
            r"no matrix wpe\.weight",
        ),
        (
            broken(lambda w: w.update(adapter=np.zeros(3))),
            CONFIG,
            "unknown tensors adapter",
        ),
        (
            broken(
                lambda w: w.update(
                    {"transformer.h.0.attn.c_proj.bias": np.zeros(5, np.float32)}
                )
            ),
            CONFIG,
            r"h\.0\.attn\.c_proj\.bias has shape \(5,\), expected \(32,\)",
        ),
        (
            broken(
                lambda w: w.update({"lm_head.weight": np.zeros((V, D), np.float32)})
            ),
            CONFIG,
            "tied head",
        ),
    ],
)
def test_what_is_not_this_gpt2_is_refused_by_name(tmp_path, weights, config, message):
    with pytest.raises(UserError, match=message):
        load_gpt2(write(tmp_path / "gpt2", weights, config))


def test_config_and_model_must_agree_about_heads(tmp_path):
    with pytest.raises(UserError, match=r"n_head=4 in config\.json, not 8"):
        load_gpt2(write(tmp_path / "gpt2", tensors()), n_head=8)


def test_damaged_or_absent_files_are_named(tmp_path):
    file = write(tmp_path / "gpt2", tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_gpt2(tmp_path / "gpt2")
    with pytest.raises(UserError, match="does not exist"):
        load_gpt2(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_gpt2(tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "[1]", '{"n_head": "four"}', "\xff"])
def test_a_broken_config_json_is_named(tmp_path, text):
    write(tmp_path / "gpt2", tensors())
    (tmp_path / "gpt2" / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        UserError, match=r"config\.json is not .*; download or copy it again"
    ):
        load_gpt2(tmp_path / "gpt2")


def test_export_refuses_swiglu_and_an_occupied_directory(tmp_path):
    spec, params = load_gpt2(write(tmp_path / "gpt2", tensors()))
    with pytest.raises(UserError, match="only gelu"):
        save_gpt2(tmp_path / "out", GPT2Spec(vocab_size=V, mlp="swiglu"), params)
    with pytest.raises(UserError, match="exists"):
        save_gpt2(tmp_path / "gpt2", spec, params)


def test_weights_that_a_full_disk_refuses_leave_no_part_of_a_file(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    path = tmp_path / "model.safetensors"
    try:
        with pytest.raises(UserError, match=rf"cannot write {path}: .*; make room"):
            write_file({"x": np.zeros(1000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
