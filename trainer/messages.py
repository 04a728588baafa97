"""What a run says of itself at its start and at its end."""

import shlex
from typing import Any

from trainer.flops import flops_per_token
from trainer.loop import Run
from trainer.metrics import GIB
from trainer.workload import Workload


def describe(
    w: Workload, *, model: str, precision: str, compute: str, batch_tokens: int, accum: int, step: Any = None
) -> list[str]:
    """What is about to be trained, a line each; with the memory that a compiled step needs.

    Args:
      w: the objects.
      model, precision: names of the presets; `compute` is the matmuls' format.
      batch_tokens: tokens a step, in `accum` micro-batches.
      step: the compiled step.
    """
    spec, flops = w.model.spec, flops_per_token(w.model.spec)
    lines = [
        f"model {model}: {w.parameters:,} parameters, {spec.n_layer} layers, width {spec.d_model}, "
        f"context {spec.context}, vocabulary {spec.vocab_size:,}",
        f"data {w.data.directory}: {w.data.manifest.tokens('train'):,} training and "
        f"{w.data.manifest.tokens('val'):,} validation tokens",
        f"batch {batch_tokens // spec.context} x {spec.context} = {batch_tokens:,} tokens; micro-batches: {accum}; "
        f"devices: {w.mesh.size} x {w.mesh.devices.flat[0].device_kind}",
        f"precision {precision}: matmuls in {compute}; {flops * batch_tokens:.3e} FLOPs a step",
    ]
    memory = step.memory_analysis() if step is not None else None
    if memory is not None:
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        lines.append(
            f"memory per device {(held + memory.temp_size_in_bytes) / GIB:.2f} GiB: state and batch {held / GIB:.2f}, "
            f"activations and workspace {memory.temp_size_in_bytes / GIB:.2f}"
        )
    return lines


def farewell(run: Run, code: int, overrides: list[str]) -> None:
    """Where everything is, and what to do next. `overrides`: the command line's, which a longer run must repeat."""
    say, where = run.display.message, shlex.quote(str(run.run_dir))
    if code:
        say(f"stopped after step {run.step} of {run.steps}; the same command with run_dir={where} goes on from there")
        return
    kept = [shlex.quote(o) for o in overrides if not o.startswith(("run_dir=", "train.steps=", "-"))]
    longer = " ".join([*kept, f"run_dir={where}", f"train.steps={2 * run.steps}"])
    say(f"done: {run.step} steps. Everything is in {where}: metrics.jsonl, samples.txt, checkpoints/, config.yaml")
    say(f"sample more:  python -m scripts.generate run_dir={where} prompt='And God said'")
    say(f"train longer: python -m trainer {longer}")
