"""Llama from the command line: every precision, every way to compute again, unrolled and scanned, alone and split."""

import json
import math
import os
import subprocess
import sys

import pytest
from command import environment, values
from sampling import that_run

SMALL = [
    *("model=llama_nano", "model.n_layer=2", "model.n_head=4", "model.n_kv_head=2", "model.d_model=64"),
    *("model.context=32", "train.batch_tokens=512", "train.steps=3", "train.eval_every=0"),
    *("train.final_eval_batches=1", "checkpoint.every=0", "sample.max_new=0", "metrics.numerics_every=0"),
    *("tracker=jsonl", "optimizer.lr=1e-2"),
]
SCAN, FSDP, TENSOR = "model.scan_layers=true", "parallel=fsdp", "parallel.tensor=2"
# With the precision and what is computed again in the name: of each pair of settings one run, not of all of them.
RUNS = {
    "fp32-none": ["parallel.data=1"],
    "bf16-elementwise": ["parallel.data=1", SCAN],
    "bf16_pure-block": [FSDP],
    "fp16_loss_scaled-none": [TENSOR, SCAN],
    "scalify_fp16-block": [TENSOR],
    "scalify_fp8-none": [FSDP, SCAN, "model.tied=false"],
    "scalify_fp8_fp16-elementwise": [TENSOR, "model.mlp=smooth_swiglu"],
    "scalify_fp8_fp8-block": [FSDP, SCAN, "parallel.reduce=fp8", "model.mlp=smooth_swiglu"],
    "fp8_delayed-block": ["parallel.data=1", SCAN],
    "fp8_current-elementwise": [FSDP],
    "sim_e3m4-none": ["parallel.data=1"],
    "scalify_fp8_fp8-dots_saveable": ["parallel.data=1", SCAN],
    "scalify_fp8_fp16-nothing_saveable": ["parallel.data=1"],
}
# In a sample: unrolled and split, without and with scales; of the other precisions test_precision.py has a step each.
FEW = ("bf16-elementwise", "scalify_fp8_fp16-elementwise")
CODE = (
    "import json, sys; from trainer.__main__ import main\n"
    "for args in json.loads(sys.argv[1]):\n"
    "    if code := main(args): sys.exit(code)\n"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """One process trains all that is asked for, so that JAX is imported once."""
    folder = tmp_path_factory.mktemp("llama")
    shared = [*SMALL, f"compile_cache={os.environ['SCALIFY_TEST_CACHE']}"]
    commands = []
    for name in sorted(that_run(request, "name")):
        precision, remat = name.split("-")
        commands.append([*shared, f"precision={precision}", f"model.remat={remat}", f"run_dir={name}", *RUNS[name]])
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        cwd=folder,
        env=environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.whole) for name in RUNS]
)
def test_it_learns(runs, name):
    losses = [row["train/loss"] for row in values(runs / name)]
    assert len(losses) == 3
    # Logits of variance 64 * 0.02^2 move the expectation of a uniform guess by half of that.
    assert abs(losses[0] - math.log(256)) < 0.05
    assert losses[2] < losses[1] < losses[0]
