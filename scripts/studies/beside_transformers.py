"""Compare a run with its export under `transformers`: greedy tokens, likelihoods, and
seconds.

    python -m scripts.studies.beside_transformers run_dir=runs/mine \\
        python=ENVIRONMENT/bin/python

The run is exported, and another interpreter, which has PyTorch and transformers, reads
the export. Both continue passages of the validation text greedily, and both score the
choices of the task `word_order`, in turns. The first answers include compilation and
are timed apart.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trainer.assembly.saved_model import restore_run, restore_training
from trainer.cli.arguments import argument, run_script
from trainer.cli.export import Arguments as Export
from trainer.cli.export import main as export
from trainer.errors import UserError
from trainer.models.sampling import Generator
from trainer.tasks.eval_model import EvalModel
from trainer.tasks.offline import BYTES, ITEMS, items_of
from trainer.tasks.scoring import Question, cut

WORDS = 12  # of a prompt


@dataclass(frozen=True)
class Arguments:
    """Settings of the comparison; see `--help`."""

    run_dir: str = argument("the run's directory")
    python: str = argument(
        "an interpreter that has torch and transformers", sys.executable
    )
    prompts: int = argument("passages that both write on after", 20)
    max_new_tokens: int = argument("tokens of each", 32)
    items: int = argument("items of word_order, of four choices each", ITEMS)
    batch: int = argument("sequences at once", 16)
    rounds: int = argument("times that both score all choices, in turns", 5)


class Other:
    """The export in the other interpreter."""

    def __init__(self, python: str, exported: Path) -> None:
        here = Path(__file__).with_name("in_transformers.py")
        try:
            self._process = subprocess.Popen(
                [python, str(here), str(exported)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UserError(
                f"python={python} cannot be started: {error.strerror}"
            ) from error
        self.threads = self._answer(python)["ready"]

    def _answer(self, python: str = "") -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(
                f"python={python or 'the other one'} ended; it needs torch and"
                " transformers, see above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: Any) -> tuple[list[Any], float]:
        """Send a request; return the answer and its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._answer()
        return reply["answer"], reply["seconds"]

    def end(self) -> None:
        """Close its input, and wait until it exits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def prompts_of(text: str, count: int) -> list[str]:
    """Return consecutive passages of WORDS words. UserError where there are too few."""
    words = text.split()
    passages = [
        " ".join(words[i : i + WORDS]) for i in range(0, len(words) - WORDS + 1, WORDS)
    ][:count]
    if len(passages) < count:
        raise UserError(
            f"prompts={count}: the validation text has words for {len(passages)}"
            " prompts; ask for fewer"
        )
    return passages


def main(args: Arguments) -> None:
    """Export the run, ask both sides, and print answers and times."""
    run_dir = Path(args.run_dir)
    model = restore_run(run_dir)
    c, w, training = restore_training(run_dir)
    text = w.data.beginning(BYTES)
    prompts = [
        model.tokenizer.encode(prompt) for prompt in prompts_of(text, args.prompts)
    ]
    room = model.spec.context - args.max_new_tokens
    eval_model = EvalModel(w.task, w.data.tokenizer, args.batch).at(
        training.state.params, training.state.scaling
    )
    pairs = [
        (item.context, choice)
        for item in items_of("word_order", text, args.items)
        for choice in item.choices
    ]
    with tempfile.TemporaryDirectory() as scratch:
        export(Export(args.run_dir, scratch))
        other = Other(args.python, Path(scratch))
        compare_texts(args, model, [prompt[-room:] for prompt in prompts], other)
        compare_scores(
            args, eval_model, [eval_model.question(*pair) for pair in pairs], other
        )
        other.end()
    print(
        f"precision {c.precision.name}; {jax.device_count()} device of ours,"
        f" {other.threads} threads of PyTorch"
    )


def compare_texts(
    args: Arguments, model: Any, prompts: Sequence[Sequence[int]], other: Other
) -> None:
    """Print for how many prompts both sides write the same tokens."""
    generator = Generator(model.bind, model.spec)
    ours = [
        generator(
            model.params, prompt, max_new_tokens=args.max_new_tokens, temperature=0.0
        )
        for prompt in prompts
    ]
    theirs, _ = other.ask(
        prompts=[list(prompt) for prompt in prompts], max_new_tokens=args.max_new_tokens
    )
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(
        f"the same {args.max_new_tokens} greedy tokens: {same} of {len(prompts)}"
        " prompts",
        flush=True,
    )
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            first = next(j for j in range(args.max_new_tokens) if a[j] != b[j])
            print(
                f"  prompt {i + 1}: token {first + 1} is {a[first]} here, {b[first]}"
                " there",
                flush=True,
            )


def compare_scores(
    args: Arguments, eval_model: EvalModel, questions: Sequence[Question], other: Other
) -> None:
    """Print the largest difference of the likelihoods, and the ratio of the times."""
    request = {
        "pairs": [cut(question, eval_model.context) for question in questions],
        "batch": args.batch,
    }

    def score_here() -> tuple[list[float], float]:
        started = time.perf_counter()
        answers = [answer.logprob for answer in eval_model.answers(questions)]
        return answers, time.perf_counter() - started

    ours, compiling = score_here()
    theirs, warming = other.ask(**request)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(
        f"{len(questions)} likelihoods: at most {apart:.2g} nats apart, {worst:.2g} of"
        " the value",
        flush=True,
    )
    rounds = []
    for i in range(args.rounds):
        turns = [score_here, lambda: other.ask(**request)]
        seconds = {
            turn: turns[turn]()[1] for turn in ((0, 1) if i % 2 == 0 else (1, 0))
        }
        rounds.append((seconds[0], seconds[1]))
        print(
            f"  round {i + 1}: {seconds[0]:.2f} s here, {seconds[1]:.2f} s there",
            flush=True,
        )
    ratios = sorted(b / a for a, b in rounds)
    print(
        f"first answers: {compiling:.2f} s here, compiling included, {warming:.2f} s"
        " there"
    )
    print(
        f"speed over that of transformers: {statistics.median(ratios):.2f}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs, batch"
        f" {args.batch})"
    )
    gain = statistics.median(b - a for a, b in rounds)
    more = (compiling - warming) / gain if gain > 0 else math.inf
    print(f"compiling is made up for after {max(0.0, more):.0f} such rounds")


if __name__ == "__main__":
    sys.exit(run_script(Arguments, "studies.beside_transformers", __doc__ or "", main))
