"""Try a GPU for the first time, stage by stage: tests, speed, profile, memory.

    python -m scripts.studies.gpu stage=smoke out=runs/gpu

    smoke       ten steps in every precision, a run that is resumed, bit by bit, and
                the tests of a GPU
    bench124    speed of 124M, with all peers; bench774 and bench1558 of those sizes
    precompile  compiles what bench1558 needs, in the background
    parity      the losses of 124M in FP8 against bf16's
    profile     the time of 774M by class of kernel
    memory      the allocator's peak, beside the plan that stage plan made on a
                machine without a GPU

A stage ends by itself after `seconds`, writes its results as it goes, and continues
when it is called again. `size=toy platform=cpu` rehearses all of them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.arguments import argument, run_script
from trainer.errors import UserError
from trainer.observe.records import read_rows
from trainer.text import merge_overrides, nearest

ROOT = Path(__file__).resolve().parents[2]
FLAGSHIP = "scalify_fp8_fp16"
TOGETHER = 4  # trainers that share a GPU


@dataclass(frozen=True)
class Arguments:
    """Settings of the stages; see `--help`."""

    stage: str = argument("one of those above, or plan")
    out: str = argument("the directory of all results", "runs/gpu")
    size: str = argument("full, or toy: to rehearse", "full")
    platform: str = argument("gpu, or cpu: to rehearse", "gpu")
    seconds: float = argument("in which the stage ends", 570.0)
    text: str = argument(
        "files that parity trains on; empty: the Python sources of the installed"
        " packages",
        "",
    )
    tokenizer: str = argument(
        "their tokenizer: byte, or a directory with vocab.bpe and encoder.json", "byte"
    )
    compile_cache: str = argument(
        "the directory of compiled programs; empty: OUT/xla", ""
    )
    target: str = argument("with stage=plan, the GPU that is planned for", "h100")


class Size(NamedTuple):
    """The models and cases of each stage, at one size of the study."""

    model: tuple[str, ...]
    presets: tuple[str, ...]
    tests: tuple[str, ...]
    bench: Mapping[str, tuple[str, ...]]
    timed: tuple[str, ...]
    profiled: str
    planned: str
    plan: tuple[str, ...]
    parity: tuple[str, ...]


def cases(model: str, *precisions: str) -> tuple[str, ...]:
    """Return cases of `scripts.bench`; the others are compared with the first."""
    return tuple(f"{model}:{precision}" for precision in precisions)


TINY = ("model.n_layer=1", "model.d_model=32", "model.n_head=1", "model.context=16")
# what the same bits cost
FREE = (f"{FLAGSHIP}:deterministic=false", "bf16:deterministic=false")
# what the loss's logits in 16 bits save
NARROW = (f"{FLAGSHIP}:logits=compute", "bf16:logits=compute")
PRESETS = (
    FLAGSHIP,
    "bf16",
    "scalify_fp8_fp8",
    "scalify_fp8",
    "fp8_delayed",
    "fp8_current",
    "scalify_fp16",
)
SIZES = {
    "full": Size(
        model=(
            "model=gpt2_124m",
            "model.n_layer=2",
            "model.vocab_size=50257",
            "train.batch_tokens=8192",
        ),
        presets=(*PRESETS, "fp16_loss_scaled", "bf16_pure", "fp32"),
        tests=(),
        bench={
            "bench124": cases(
                "gpt2_124m",
                FLAGSHIP,
                "bf16",
                "torch",
                "fp8_delayed",
                "fp8_current",
                *NARROW,
                *FREE,
            ),
            "bench774": cases("gpt2_774m", FLAGSHIP, "bf16", "torch", "fp8_delayed"),
            "bench1558": cases("gpt2_1558m", "bf16", FLAGSHIP),
        },
        timed=("rounds=7",),
        profiled="gpt2_774m",
        planned="gpt2_124m",
        plan=("model.vocab_size=50257", "micro_batch=8", "search=yes"),
        parity=(
            "model=gpt2_124m",
            "steps=1000",
            "batch_tokens=32768",
            "evaluations=10",
            "eval_batches=8",
            "last=2",
        ),
    ),
    "toy": Size(
        model=("model=gpt2_nano", *TINY, "train.batch_tokens=64"),
        presets=(FLAGSHIP,),
        tests=("-k", "random_bits"),
        bench=dict.fromkeys(
            ("bench124", "bench774", "bench1558"), ("gpt2_nano:fp32:batch=1",)
        ),
        timed=("rounds=1", "steps=1", "sequence=16"),
        profiled="gpt2_nano",
        planned="gpt2_nano",
        plan=(*TINY, "model.vocab_size=256", "micro_batch=1", "search=no"),
        parity=(
            "model=gpt2_nano",
            "steps=2",
            "batch_tokens=64",
            "evaluations=1",
            "eval_batches=1",
            "last=1",
        ),
    ),
}


@dataclass(frozen=True)
class GpuCommand:
    """A command of a stage.

    Attributes:
      name: key of its result, and of its output file.
      command: arguments of the Python interpreter.
      check: inspects the command's files; returns text for the result, or raises
          UserError, which counts as a failure.
      may_fail: whether a failure is an answer too.
      detached: whether it outlives the call.
      environment: variables added to those of this process.
    """

    name: str
    command: tuple[str, ...]
    check: Callable[[], Any] | None = None
    may_fail: bool = False
    detached: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Study:
    """The stages, each as lists of jobs, one list after the other."""

    def __init__(self, args: Arguments) -> None:
        self.args, self.out = args, Path(args.out)
        for key, choices in (("size", list(SIZES)), ("platform", ["gpu", "cpu"])):
            if getattr(args, key) not in choices:
                raise UserError(
                    f"{key}={getattr(args, key)};"
                    f" {nearest(getattr(args, key), choices)}"
                )
        self.size = SIZES[args.size]
        self.cache = Path(args.compile_cache or self.out / "xla").absolute()
        self.stages: dict[str, Callable[[], list[list[GpuCommand]]]] = {
            "smoke": self.smoke,
            **{
                name: lambda name=name: [[self.bench(name)]] for name in self.size.bench
            },  # type: ignore[misc]
            "precompile": self.precompile,
            "parity": self.parity,
            "profile": self.profile,
            "memory": self.memory,
            "plan": self.plan,
        }
        if args.stage not in self.stages:
            raise UserError(
                f"stage={args.stage}; {nearest(args.stage, list(self.stages))}"
            )

    def trainer(self, name: str, precision: str, steps: int, **more: Any) -> GpuCommand:
        """Return a short run of the trainer in OUT/smoke/NAME."""
        settings = (
            "data.tokenizer=byte",
            "tracker=jsonl",
            "metrics.numerics_every=0",
            "sample.max_new_tokens=0",
        )
        settings += (
            "train.eval_batches=2",
            "train.final_eval_batches=2",
            f"data.cache_dir={self.out / 'data'}",
        )
        settings += (
            f"compile_cache={self.cache}",
            f"run_dir={self.out / 'smoke' / name}",
            "parallel.data=1",
        )
        words = (
            *self.size.model,
            *settings,
            f"precision={precision}",
            f"train.steps={steps}",
            "checkpoint.every=10",
        )
        return GpuCommand(name, ("-m", "trainer", *words), **more)

    def smoke(self) -> list[list[GpuCommand]]:
        """Return the tests, ten steps of every preset, and a run that is repeated and
        resumed.
        """
        tests = GpuCommand(
            "tests",
            (
                "-m",
                "pytest",
                "-W",
                "default",
                "-p",
                "no:cacheprovider",
                "tests/gpu",
                *self.size.tests,
            ),
        )
        share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}
        first, *others = (
            self.trainer(preset, preset, 10, environment=share)
            for preset in self.size.presets
        )
        reference = self.trainer("whole", FLAGSHIP, 20)
        repeated = self.trainer(
            "again", FLAGSHIP, 20, check=lambda: self.same_rows("again")
        )
        resumed = self.trainer(
            "resumed", FLAGSHIP, 20, check=lambda: self.same_rows("resumed")
        )
        # The first prepares the data for all. The tests, which cannot go on where they
        # were, come last.
        return [[first], others, [reference], [repeated], [resumed], [tests]]

    def before_resumed(self) -> None:
        """Copy the reference run to OUT/smoke/resumed, without its last checkpoint."""
        source, resumed = self.out / "smoke" / "whole", self.out / "smoke" / "resumed"
        if not resumed.exists():
            shutil.copytree(source, resumed)
            shutil.rmtree(resumed / "checkpoints" / "20")

    def same_rows(self, name: str) -> str:
        """Compare a run's losses and norms with the reference run's.

        Raises:
          UserError: they differ; the message names the first step that does.
        """
        figures = []
        for run_dir in ("whole", name):
            rows = read_rows(self.out / "smoke" / run_dir / "metrics.jsonl")
            figures.append(
                [
                    (r["step"], r["train/loss"], r["grad_norm"])
                    for r in rows
                    if "train/loss" in r
                ]
            )
        if figures[0] != figures[1]:
            step = next(
                (a[0] for a, b in zip(*figures, strict=False) if a != b),
                "the number of steps",
            )
            raise UserError(
                f"{name}: other bits than the run as a whole, from step {step} on"
            )
        return f"the same bits in {len(figures[0])} steps"

    def bench(
        self, name: str, *more: str, only: tuple[str, ...] = (), **settings: Any
    ) -> GpuCommand:
        """Return a call of `scripts.bench`."""
        where = (
            f"platform={self.args.platform}",
            f"compile_cache={self.cache}",
            f"out={self.out / name}.json",
        )
        # `compare.GRACE` lies behind
        minutes = f"minutes={max(self.args.seconds - 100, 60) / 60:g}"
        listed = f"cases={','.join(only or self.size.bench[name])}"
        # Two of 1558M share the device's memory, most of which they may have.
        environment = (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"} if name == "bench1558" else {}
        )
        words = merge_overrides((listed, *where, minutes), self.size.timed, more)
        return GpuCommand(
            name, ("-m", "scripts.bench", *words), environment=environment, **settings
        )

    def precompile(self) -> list[list[GpuCommand]]:
        """Return the command that fills the compilation cache for bench1558."""
        job = self.bench(
            "bench1558",
            "compile_only=true",
            "minutes=25",
            detached=self.args.platform == "gpu",
        )
        return [[replace(job, name="precompile")]]

    def parity(self) -> list[list[GpuCommand]]:
        """Return the parity study: paired runs on real text."""
        toy, packages = self.args.size == "toy", Path(sysconfig.get_path("purelib"))
        text = self.args.text or str(
            Path(json.__file__).parent / "*.py" if toy else packages / "**" / "*.py"
        )
        data = (
            f"data=text data.paths=['{text}'] data.tokenizer={self.args.tokenizer}"
            " data.max_documents=15000"
        )
        data += (
            f" data.cache_dir={self.out / 'data'} parallel.data=1"
            + f" {' '.join(TINY)}" * toy
        )
        presets = FLAGSHIP if toy else f"{FLAGSHIP},fp8_delayed"
        words = (
            "base=bf16",
            f"presets={presets}",
            "seeds=1",
            *self.size.parity,
            f"out={self.out / 'parity'}",
        )
        overrides = f"overrides={data} compile_cache={self.cache}"
        return [
            [GpuCommand("parity", ("-m", "scripts.studies.parity", *words, overrides))]
        ]

    def profile(self) -> list[list[GpuCommand]]:
        """Return the profiles of bf16 and the flagship."""
        model, toy = self.size.profiled, self.args.size == "toy"
        cases = f"{model}:fp32:batch=1" if toy else f"{model}:bf16,{model}:{FLAGSHIP}"
        words = (
            f"cases={cases}",
            f"out={self.out / 'profile.json'}",
            f"platform={self.args.platform}",
        )
        words += (
            f"compile_cache={self.cache}",
            *(("sequence=16", "steps=1") if toy else ()),
        )
        return [[GpuCommand("profile", ("-m", "scripts.bench.profiling", *words))]]

    def plan(self) -> list[list[GpuCommand]]:
        """Return the plans of the cases whose memory is measured; needs no GPU."""
        words = (
            "-m",
            "trainer",
            "plan",
            f"model={self.size.planned}",
            *self.size.plan,
            "data.tokenizer=byte",
        )
        words += (f"target={self.args.target}", "gpus=1", "compare=no", "json=yes")
        return [
            [GpuCommand(f"plan_{p}", (*words, f"precision={p}"))]
            for p in self.planned_of
        ]

    @property
    def planned_of(self) -> tuple[str, ...]:
        """Return the precisions whose memory is measured."""
        return ("fp32",) if self.args.size == "toy" else (FLAGSHIP, "bf16")

    def planned(self, precision: str) -> dict[str, Any]:
        """Read the plan of a precision from its job's output. UserError without one."""
        path = self.out / f"plan_{precision}.txt"
        if not path.exists():
            raise UserError(
                f"{path} is missing: first stage=plan out={self.out}, on any machine,"
                " then bring it here"
            )
        text = path.read_text()
        return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]

    def memory(self) -> list[list[GpuCommand]]:
        """Return cases of three micro-batches: the plan's, the largest that it lets
        fit, and one that it does not.
        """
        jobs = []
        for precision in self.planned_of:
            plan = self.planned(precision)
            fits = plan["max_micro_batch"]
            beyond = round(1.1 * (plan["max_micro_batch_bound"] or fits)) + 1
            for size, may_fail in (
                (plan["micro_batch"], False),
                (fits, False),
                (beyond, True),
            ):
                case = f"{self.size.planned}:{precision}:batch={size}"
                name = f"memory_{precision}_{size}"
                jobs.append(
                    [
                        self.bench(
                            name, "rounds=1", "steps=2", only=(case,), may_fail=may_fail
                        )
                    ]
                )
        return jobs

    def run(self) -> list[str]:
        """Run the unfinished jobs of the stage; return those that failed or had no
        time.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{self.args.stage}_jobs.json"
        done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        end, open_ = time.monotonic() + self.args.seconds, list[str]()
        for group in self.stages[self.args.stage]():
            todo = [job for job in group if not done.get(job.name, {}).get("ok")]
            for job in group:
                if job not in todo:
                    print(f"{job.name}: done before", flush=True)
            with ThreadPoolExecutor(TOGETHER) as pool:
                for job, result in zip(
                    todo, pool.map(lambda job: self.take(job, end), todo), strict=True
                ):
                    done[job.name] = result
                    open_ += [] if result["ok"] else [job.name]
                    path.write_text(json.dumps(done, indent=1) + "\n")
                    print(
                        f"{job.name}: {'ok' if result['ok'] else 'FAILED'},"
                        f" {result['said']}",
                        flush=True,
                    )
        return open_

    def take(self, job: GpuCommand, end: float) -> dict[str, Any]:
        """Run a job, with its output in OUT/NAME.txt; return its result."""
        left, start = end - time.monotonic(), time.monotonic()
        if left <= 0:
            return {"ok": False, "said": "not started: no time was left"}
        if job.name == "resumed":
            self.before_resumed()
        environment = dict(os.environ) | {
            "PYTHONUNBUFFERED": "1",
            "SCALIFY_TEST_PLATFORM": self.args.platform,
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        }
        environment |= (
            {"JAX_PLATFORMS": "cpu"}
            if self.args.platform == "cpu" or self.args.stage == "plan"
            else {}
        )
        log = self.out / f"{job.name}.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *job.command],
                env=environment | dict(job.environment),
                cwd=ROOT if job.name == "tests" else None,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if job.detached:
                return {
                    "ok": True,
                    "said": f"goes on as process {process.pid}, see {log}",
                }
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return {
                    "ok": False,
                    "said": f"ended after {left:.0f} s; the same command goes on",
                }
        lines = log.read_text(errors="replace").strip().splitlines()
        last_line = lines[-1][:300] if lines else ""
        try:
            answer = job.check() if job.check is not None and code == 0 else None
        except UserError as error:
            return {"ok": False, "said": str(error)}
        ok = code == 0 or job.may_fail
        last_line = answer if isinstance(answer, str) else last_line
        return {
            "ok": ok,
            "code": code,
            "seconds": round(time.monotonic() - start),
            "said": last_line,
        }


def main(args: Arguments) -> None:
    """Run a stage. UserError names what failed, or had no time."""
    study = Study(args)
    if failed := study.run():
        raise UserError(
            f"{args.stage}: {', '.join(failed)} failed; see {study.out}/NAME.txt; what"
            " is done is kept"
        )


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.gpu", __doc__ or "", main))
