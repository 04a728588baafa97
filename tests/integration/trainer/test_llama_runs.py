"""Llama and its relatives from the command line: each precision, remat, layers that are
unrolled and scanned, alone and split."""

import logging
import math

import pytest
from command import CACHE, values
from families import quick

from trainer.cli.train import main
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import SPECS

SMALL = [
    CACHE,
    "run_dir=A",
    "model.n_layer=2",
    "model.n_head=4",
    "model.n_kv_head=2",
    "model.d_model=64",
    "model.context=32",
    "train.batch_tokens=512",
    "train.steps=3",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.final_eval_batches=1",
    "checkpoint.every=0",
    "sample.max_new_tokens=0",
    "metrics.numerics_every=0",
    "tracker=jsonl",
    "optimizer.lr=1e-2",
]
SCAN, FSDP, TENSOR = "model.scan_layers=true", "parallel=fsdp", "parallel.tensor=2"
# Each setting occurs in one run; a step of every precision is in test_precision.py.
LLAMAS = {
    "bf16": ["model.remat=elementwise", "parallel.data=1", SCAN],
    "fp16_loss_scaled": [TENSOR, SCAN],
    "scalify_fp16": ["model.remat=dots_saveable", TENSOR],
    "scalify_fp8": [FSDP, SCAN, "model.tied=false"],
    "scalify_fp8_fp8": [
        "model.remat=block",
        FSDP,
        SCAN,
        "parallel.reduce=fp8",
        "model.mlp=smooth_swiglu",
    ],
    "fp8_delayed": ["model.remat=nothing_saveable", "parallel.data=1", SCAN],
}
# The families that are nearly Llama: a run each, with what they add.
RELATIVES = {
    "mistral": ["model=mistral_7b", "model.window=8", TENSOR],
    "qwen2": ["model=qwen25_0_5b", FSDP],
    "qwen3": ["model=qwen3_0_6b", "model.head_dim=16", TENSOR, SCAN],
    "smollm3": ["model=smollm3_3b", "model.unrotated_every=2", SCAN, FSDP],
    "olmo2": ["model=olmo2_1b", FSDP, "model.remat=block"],
}


def check_learns(folder, monkeypatch, *args):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(logging.root, "handlers", [])
    assert main([*SMALL, *args]) == 0
    losses = [row["train/loss"] for row in values(folder / "A")]
    # that of a uniform guess
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow  # a run of Llama: below; the families: unit/trainer/models
@pytest.mark.parametrize("family", RELATIVES)
def test_its_relatives_learn(tmp_path, monkeypatch, family):
    specs = {name for name, spec in SPECS.items() if issubclass(spec, LlamaSpec)}
    assert specs == {"llama", *RELATIVES}
    sizes = ["model.d_mlp=128", "model.vocab_size=null"]
    precision = "precision=scalify_fp8_fp16"
    check_learns(tmp_path, monkeypatch, precision, *sizes, *RELATIVES[family])


@pytest.mark.parametrize("precision", quick(LLAMAS, "bf16"))
def test_a_llama_learns(tmp_path, monkeypatch, precision):
    keys = ["model=llama_nano", f"precision={precision}", *LLAMAS[precision]]
    check_learns(tmp_path, monkeypatch, *keys)
