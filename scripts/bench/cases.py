"""Speed, memory and MFU of whole training steps on a GPU, for any list of cases, each against its peers.

What `python -m scripts.bench cases=...` runs. A case is `model:precision[:key=value...]` with the keys batch (sequences
of a step), remat and scan, or `model:torch[:batch=...]`: GPT-2 in PyTorch with torch.compile and SDPA in bf16, Hugging
Face's where `transformers` is installed. Cases of one model and batch take turns, a few steps each, so that whatever
else the machine does falls on all of them. Needs jax, flax, optax and orbax; torch for the peer, matplotlib for the
picture: neither Hydra, nor data, nor a network.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.bench.racing import figures as speed
from scripts.bench.racing import race, taking, worker
from trainer.config.fields import from_tree
from trainer.errors import UserError
from trainer.text import nearest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
VOCAB = 50257
GIB = 2**30


class Case(NamedTuple):
    """One way to take a step; `precision` may be "torch"."""

    model: str
    precision: str
    batch: int
    remat: str
    scan: bool

    @property
    def name(self) -> str:
        """The name of the case as it is printed."""
        extras = f" remat={self.remat}" * (self.remat != "none") + " scan" * self.scan
        return f"{self.model} {self.precision} B={self.batch}{extras}"


def parse_case(text: str) -> Case:
    """The case that `model:precision[:setting=value]` describes. UserError says what is valid."""
    model, _, rest = text.partition(":")
    precision, *settings = rest.split(":")
    if not precision:
        raise UserError(f"cases: {text!r} has no precision; expected model:precision, such as gpt2_124m:bf16")
    read_group("model", model)
    if precision != "torch":
        read_group("precision", precision)
    found = {"batch": "8", "remat": "none", "scan": "false"}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in found:
            raise UserError(f"cases: unknown key {key!r} in {text!r}; {nearest(key, list(found))}")
        found[key] = value
    if not found["batch"].isdigit() or found["scan"] not in ("true", "false"):
        raise UserError(f"cases: {text!r}: expected a whole number of sequences, and scan=true or scan=false")
    return Case(model, precision, int(found["batch"]), found["remat"], found["scan"] == "true")


def read_group(group: str, name: str) -> dict[str, Any]:
    """A preset of `configs/`, on its base, without Hydra. UserError lists the presets."""
    import yaml  # which Flax and Orbax need too

    known = [path.stem for path in sorted((CONFIGS / group).glob("*.yaml"))]
    if name not in known:
        raise UserError(f"cases: {group} {name!r} is not known; {nearest(name, known)}")
    tree: dict[str, Any] = {}
    own: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    for base in own.pop("defaults"):  # such as /base/gpt2@_here_
        tree |= yaml.safe_load((CONFIGS / f"{base.removesuffix('@_here_').lstrip('/')}.yaml").read_text())
    return tree | own


class Contestant(NamedTuple):
    """A compiled step.

    Attributes:
      take: takes that many steps; seconds.
      figures: known before a step was taken: compile_s, peak_gib, fp8_share.
    """

    take: Callable[[int], float]
    figures: dict[str, float]


def ours(case: Case, context: int | None) -> Contestant:
    """A case of this trainer, compiled. `context`: None: the model's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trainer.compiled.fp8 import Gpu
    from trainer.compiled.hlo import Program, fp8_share
    from trainer.config import schema
    from trainer.parallel.mesh import abstract_batch, make_mesh
    from trainer.step.optimizer import make_optimizer
    from trainer.step.state import from_stored
    from trainer.step.step import Hyper, Tokens
    from trainer.workload import Model, Task, compile_step, first_state

    tree = read_group("model", case.model) | {"remat": case.remat, "scan_layers": case.scan, "vocab_size": VOCAB}
    tree |= {} if context is None else {"context": context}
    spec = from_tree(schema.MODELS[tree["family"]], tree).spec(VOCAB)
    precision = from_tree(schema.Precision, read_group("precision", case.precision))
    mesh = make_mesh(1)
    adamw = make_optimizer("adamw", b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    w = Task(Model.make(spec, precision.policy), "adamw", adamw, mesh)
    state = from_stored(first_state(w, seed=0))
    start = time.perf_counter()
    batch = abstract_batch(1, case.batch, spec.context, document_mask=False, mesh=mesh)
    step = compile_step(w, batch, state)
    compile_s = time.perf_counter() - start
    memory, text = step.memory_analysis(), step.as_text()
    assert memory is not None
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    figures = {"compile_s": compile_s, "peak_gib": (held + memory.temp_size_in_bytes) / GIB}
    if Gpu.of(mesh.devices.flat[0]) is not None and text is not None:
        figures["fp8_share"] = fp8_share(Program(text))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, case.batch, spec.context + 1), dtype=np.int32)
    fed, hyper = Tokens(jnp.asarray(tokens), None), Hyper(np.float32(1e-4), np.int32(0), np.uint32(0))
    fed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), fed, batch)

    take = taking(step, state, fed, hyper)

    return Contestant(take, figures)


def in_torch(case: Case, context: int | None, python: str) -> Contestant:
    """The peer, in a process of its own."""
    tree = read_group("model", case.model)
    sizes = {name: tree[name] for name in ("n_layer", "n_head", "d_model")}
    start = time.perf_counter()
    ask = worker(python)
    ask(sizes | {"context": context or tree["context"], "vocab": VOCAB, "batch": case.batch, "threads": 2, "gpu": True})
    compile_s = time.perf_counter() - start
    return Contestant(lambda steps: float(ask(steps).split()[0]), {"compile_s": compile_s})


def row_of(case: Case, seconds: Sequence[float], figures: dict[str, float], context: int | None) -> dict[str, Any]:
    """The figures of a case: of speed the median and the extremes over the rounds; MFU where the peak is known."""
    import jax
    import jax.numpy as jnp

    from trainer.models.flops import flops_per_token
    from trainer.models.spec import GPT2Spec
    from trainer.observe.metrics import mfu
    from trainer.observe.peaks import peak_flops

    tree = read_group("model", case.model)
    context = context or tree["context"]
    row: dict[str, Any] = {**case._asdict(), **speed(list(seconds), case.batch * context), **figures}
    spec = GPT2Spec(VOCAB, context, tree["n_layer"], tree["n_head"], tree["d_model"])
    # Of all cases against the rate of 16 bits, so that they compare.
    peak = peak_flops(jax.devices()[0].device_kind, jnp.bfloat16)
    row["mfu"] = None if peak is None else mfu(row["tokens_per_s"], flops_per_token(spec), peak, 1)
    return row


def run_cases(
    texts: str, *, rounds: int, steps: int, minutes: float, context: int | None, python: str | None, out: str
) -> list[dict[str, Any]]:
    """All cases, those of one model and batch against each other; what is not reached in time is said to be left out.

    Args:
      texts: of the cases, separated by commas.
      rounds, steps: turns of each case, and steps in a turn.
      minutes: after which no other case is begun.
      context: tokens of a sequence; None: the model's.
      python: an interpreter with torch; None: there is none, and its cases are left out.
      out: the JSON file, written after each group, with a picture beside it; empty: none.
    """
    began, cases = time.perf_counter(), [parse_case(text) for text in texts.split(",")]
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.model, case.batch), []).append(case)
    rows: list[dict[str, Any]] = []
    for group in groups.values():
        contestants: dict[str, Contestant] = {}
        for case in group:
            if time.perf_counter() - began > 60 * minutes:
                print(f"{case.name}: left out, {minutes:g} minutes are over", flush=True)
            elif case.precision == "torch" and python is None:
                print(f"{case.name}: left out, no torch here (torch_python=PATH names an interpreter that has it)")
            else:
                if case.precision == "torch":
                    assert python is not None
                    contestants[case.name] = in_torch(case, context, python)
                else:
                    contestants[case.name] = ours(case, context)
                print(f"{case.name}: ready in {contestants[case.name].figures['compile_s']:.0f} s", flush=True)
        for contestant in contestants.values():
            contestant.take(2)
        seconds = race({name: contestant.take for name, contestant in contestants.items()}, rounds, steps)
        for case in group:
            if case.name in contestants:
                rows.append(row_of(case, seconds[case.name], contestants[case.name].figures, context))
                rows[-1] |= {"seconds": seconds[case.name], "over": faster_than(case, seconds)}
                print(line_of(case, rows[-1]), flush=True)
        if out:
            Path(out).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
            draw(rows, Path(out).with_suffix(".png"))
        del contestants
        gc.collect()
    return rows


def faster_than(case: Case, seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast a case is as each of the others, the median over the rounds."""
    own = seconds[case.name]
    return {
        name: statistics.median(theirs / ours for theirs, ours in zip(found, own, strict=True))
        for name, found in seconds.items()
        if name != case.name
    }


def line_of(case: Case, row: dict[str, Any]) -> str:
    """A row as text."""
    parts = [
        f"{row['tokens_per_s']:,.0f} tokens/s ({row['tokens_per_s_min']:,.0f} to {row['tokens_per_s_max']:,.0f})",
        f"{row['step_ms']:,.1f} ms",
        f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else "",
        f"{row['peak_gib']:.2f} GiB" if "peak_gib" in row else "",
        f"FP8 {row['fp8_share']:.0%} of FLOPs" if row.get("fp8_share") else "",
        f"compiled in {row['compile_s']:.0f} s",
    ]
    against = "".join(f"\n  {ratio:.2f} x {name}" for name, ratio in row["over"].items())
    return f"{case.name}: {', '.join(part for part in parts if part)}{against}"


def machine() -> dict[str, str]:
    """What the figures are of."""
    import jax

    backend = jax.devices()[0].client
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "platform": backend.platform_version}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per second of all rows, medians with extremes; without matplotlib no picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 1 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    medians = [row["tokens_per_s"] for row in rows]
    below = [m - row["tokens_per_s_min"] for m, row in zip(medians, rows, strict=True)]
    above = [row["tokens_per_s_max"] - m for m, row in zip(medians, rows, strict=True)]
    names = [Case(*(row[field] for field in Case._fields)).name for row in rows]
    axes.barh(range(len(rows)), medians, xerr=[below, above], capsize=3)
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second, median of {len(rows[0]['seconds'])} rounds with extremes")
    figure.savefig(path)
