"""Tabulate what was checked of each family of models, on tiny models of this machine.

    python -m scripts.studies.families out=families.md families=qwen3 precisions=bf16

For each family: the largest difference of its logits from those of transformers,
relative to the largest logit, over the models of tests/data/families; the training loss
after three steps in each precision; and that of scanned and recomputed layers, of fully
sharded parameters, and of heads split over two of four devices, beside the plain run.
Each run is a JSON line beside the table; called again, the table continues.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scripts.studies import rows
from trainer.cli.arguments import argument, run_script, split
from trainer.files import write_atomically
from trainer.models import huggingface
from trainer.models.registry import SPECS
from trainer.models.weight_files import config_beside, read_object

DATA = Path(__file__).parents[2] / "tests" / "data" / "families"
PRESETS = {
    "gpt2": "gpt2_nano",
    "llama": "llama_nano",
    "mistral": "mistral_7b",
    "qwen2": "qwen25_0_5b",
    "qwen3": "qwen3_0_6b",
    "smollm3": "smollm3_3b",
    "olmo2": "olmo2_1b",
}
PRECISIONS = (
    "fp32", "bf16", "bf16_pure", "fp16_loss_scaled", "scalify_fp16", "scalify_fp8",
    "scalify_fp8_fp16", "scalify_fp8_fp8", "fp8_current", "fp8_delayed",
)  # fmt: skip
LAYOUTS = {
    "scan": ["model.scan_layers=true"],
    "remat": ["model.remat=block"],
    "fsdp": ["parallel=fsdp"],
    "tensor": ["parallel.tensor=2"],
}
SIZES = [
    "data=embedded", "data.tokenizer=byte", "train.steps=3", "train.batch_tokens=512",
    "model.n_layer=4", "model.d_model=64", "model.n_head=4", "model.d_mlp=128",
    "model.context=64", "model.vocab_size=null", "tracker=jsonl",
    "sample.max_new_tokens=8",
]  # fmt: skip
ROTARY = ["model.n_kv_head=2", "model.head_dim=32"]


@dataclass(frozen=True)
class Arguments:
    """Settings of the table; see `--help`."""

    out: str = argument("the table, Markdown; its runs are beside it as .jsonl")
    families: str = argument(f"of {', '.join(PRESETS)}", ",".join(PRESETS))
    precisions: str = argument(f"of {', '.join(PRECISIONS)}", ",".join(PRECISIONS))
    layouts: str = argument(f"of {', '.join(LAYOUTS)}", ",".join(LAYOUTS))


def main(args: Arguments) -> None:
    """Make the missing runs, and write the table after each."""
    out = Path(args.out)
    lines = out.with_suffix(".jsonl")
    done = {row["name"]: row for row in rows.read(lines)}
    families, precisions = split(args.families), split(args.precisions)
    checks = {f"precision={name}": [f"precision={name}"] for name in precisions}
    checks |= {
        name: ["precision=scalify_fp8_fp16", *LAYOUTS[name]]
        for name in split(args.layouts)
    }
    for family in families:
        for check, overrides in checks.items():
            name = f"{family} {check}"
            if name not in done:
                done[name] = {"name": name, **train(family, overrides)}
                rows.append(lines, done[name])
                print(name, done[name], flush=True)
                write_atomically(out, markdown(families, checks, done))
    write_atomically(out, markdown(families, checks, done))
    print(out.read_text())


def train(family: str, overrides: list[str]) -> dict[str, Any]:
    """Train a tiny model; return its loss and FP8 layers, or the message of a refusal.

    Any other end is an error.
    """
    settings = [] if family == "gpt2" else list(ROTARY)
    if family == "mistral":
        settings.append("model.window=16")
    flags = "--xla_force_host_platform_device_count=4"
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "run")
        result = subprocess.run(
            [
                sys.executable, "-m", "trainer", f"model={PRESETS[family]}", *SIZES,
                *settings, *overrides, f"run_dir={run_dir}",
            ],
            capture_output=True,
            text=True,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        if result.returncode == 2:
            return {"refused": result.stderr.strip().splitlines()[-1]}
        if result.returncode:
            raise RuntimeError(f"{family} {overrides}: {result.stderr[-2000:]}")
        logged = rows.read(run_dir / "metrics.jsonl")
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    layers = re.search(r"(\d+) of (\d+) linear layers", result.stdout + result.stderr)
    return {"loss": losses[-1], "fp8": layers[0] if layers else "none"}


def beside_transformers(family: str) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    worst = math.nan
    for directory in sorted(path for path in DATA.iterdir() if path.is_dir()):
        if read_object(config_beside(directory))["model_type"] != family:
            continue
        spec, params = huggingface.load(directory, SPECS[family](vocab_size=1))
        reference = np.load(directory / "reference.npz")
        model = huggingface.family_at(directory)
        assert model is not None
        bound = model.build(spec).bind
        logits = jax.jit(lambda p, ids, bind=bound: bind(p)(ids))(
            params, reference["ids"]
        )
        difference = np.abs(logits - reference["logits"]).max()
        worst = np.fmax(worst, difference / np.abs(reference["logits"]).max())
    return float(worst)


def markdown(
    families: list[str], checks: dict[str, list[str]], done: dict[str, Any]
) -> str:
    """Format the table: losses, and for a layout the difference from the plain run."""
    head = ["family", "logits", "FP8 layers", *checks]
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for family in families:
        plain = done.get(f"{family} precision=scalify_fp8_fp16", {})
        cells = [family, f"{beside_transformers(family):.1e}", plain.get("fp8", "-")]
        for check in checks:
            row = done.get(f"{family} {check}", {})
            if "refused" in row:
                cells.append("refused")
            elif "loss" not in row:
                cells.append("-")
            elif check in LAYOUTS and "loss" in plain:
                cells.append(f"{row['loss'] - plain['loss']:+.1e}")
            else:
                cells.append(f"{row['loss']:.4f}")
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.families", __doc__ or "", main))
