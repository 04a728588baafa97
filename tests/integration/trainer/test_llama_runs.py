"""Llama, and what is nearly Llama, from the command line: every precision, every way to compute again, unrolled
and scanned, alone and split."""

import logging
import math

import pytest
from command import CACHE, values
from families import slow

from trainer.cli.train import main
from trainer.models.llama.spec import LlamaSpec
from trainer.models.registry import SPECS

SMALL = [
    *(
        "model=llama_nano",
        "model.n_layer=2",
        "model.n_head=4",
        "model.n_kv_head=2",
        "model.d_model=64",
    ),
    *(
        "model.context=32",
        "train.batch_tokens=512",
        "train.steps=3",
        "train.eval_every=0",
    ),
    *(
        "train.eval_batches=1",
        "train.final_eval_batches=1",
        "checkpoint.every=0",
        "sample.max_new_tokens=0",
        "metrics.numerics_every=0",
    ),
    *("tracker=jsonl", "optimizer.lr=1e-2"),
]
SCAN, FSDP, TENSOR = "model.scan_layers=true", "parallel=fsdp", "parallel.tensor=2"
# With the precision and what is computed again in the name: each setting in one run.
# A step of every precision is in test_precision.py.
RUNS = {
    "fp32-none": ["parallel.data=1"],
    "bf16-elementwise": ["parallel.data=1", SCAN],
    "fp16_loss_scaled-none": [TENSOR, SCAN],
    "scalify_fp16-dots_saveable": [TENSOR],
    "scalify_fp8-none": [FSDP, SCAN, "model.tied=false"],
    "scalify_fp8_fp16-elementwise": [TENSOR, "model.mlp=smooth_swiglu"],
    "scalify_fp8_fp8-block": [
        FSDP,
        SCAN,
        "parallel.reduce=fp8",
        "model.mlp=smooth_swiglu",
    ],
    "fp8_delayed-nothing_saveable": ["parallel.data=1", SCAN],
}
# Of make test; of other precisions test_precision.py has a step each, and test_zoo.py a
# Llama whose scales propagate.
FEW = ("bf16-elementwise",)


# Of the families that are nearly Llama, a run each with what is theirs.
RELATIVES = [
    name
    for name, spec in SPECS.items()
    if issubclass(spec, LlamaSpec) and spec is not LlamaSpec
]
THEIRS = {
    "mistral": ["model=mistral_7b", "model.window=8", TENSOR],
    "qwen2": ["model=qwen25_0_5b", FSDP],
    "qwen3": ["model=qwen3_0_6b", "model.head_dim=16", TENSOR, SCAN],
    "smollm3": ["model=smollm3_3b", "model.unrotated_every=2", SCAN, FSDP],
    "olmo2": ["model=olmo2_1b", FSDP, "model.remat=block"],
}


@pytest.mark.slow  # a run of Llama: below; the families: unit/trainer/models
@pytest.mark.parametrize("family", RELATIVES)
def test_its_relatives_learn(tmp_path, monkeypatch, family):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    sizes = ["model.d_mlp=128", "model.vocab_size=null"]
    precision = "precision=scalify_fp8_fp16"
    arguments = [CACHE, precision, "run_dir=A", *sizes, *THEIRS[family]]
    assert main([*SMALL[1:], *arguments]) == 0
    losses = [row["train/loss"] for row in values(tmp_path / "A")]
    assert abs(losses[0] - math.log(256)) < 0.1
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("name", [name if name in FEW else slow(name) for name in RUNS])
def test_it_learns(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])
    precision, remat = name.split("-")
    assert (
        main(
            [
                *SMALL,
                CACHE,
                f"precision={precision}",
                f"model.remat={remat}",
                "run_dir=A",
                *RUNS[name],
            ]
        )
        == 0
    )
    losses = [row["train/loss"] for row in values(tmp_path / "A")]
    assert len(losses) == 3
    # Logits of variance 64 * 0.02^2 move the expectation of a uniform guess by half of
    # that.
    assert abs(losses[0] - math.log(256)) < 0.05
    assert losses[2] < losses[1] < losses[0]
