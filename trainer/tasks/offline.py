"""Tasks made of a validation text, which need no download: last word and word order.

An item is a passage of the text. `last_word`: which word ends it (as in LAMBADA)?
`word_order`: which of four orders of its last words is the author's? Both depend on the
text alone, so that every model gets the same items, whatever its tokenizer.
`write_for_harness` writes them for lm-evaluation-harness.
"""

import hashlib
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.files import write_atomically
from trainer.tasks.eval_model import EvalModel

PASSAGE = 32  # words
TAIL = 8  # last words of a passage, whose order is asked for
CHOICES = 4
ITEMS = 200  # by default
BYTES = 1 << 20  # of the text's start, which items are made of


class Score(NamedTuple):
    """A metric's mean over the items, and its standard error (NaN: none)."""

    value: float
    error: float


Scores = dict[str, Score]  # by metric


class Item(NamedTuple):
    """A passage's start and its possible continuations; `gold` indexes the true one."""

    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class OfflineTask:
    """A task of this module.

    Attributes:
      items: yields the items of a text.
      score: scores an EvalModel on items.
      harness: the task's settings for lm-evaluation-harness.
    """

    items: Callable[[str], Iterator[Item]]
    score: Callable[[EvalModel, Sequence[Item]], Scores]
    harness: dict[str, Any]


def passages(text: str) -> Iterator[list[re.Match[str]]]:
    """Yield consecutive passages of about `PASSAGE` words.

    Each ends with a word that starts with four letters or more.
    """
    words: list[re.Match[str]] = []
    for word in re.finditer(r"\S+", text):
        words.append(word)
        # Letters of any script: `\w` without digits and the underscore.
        if len(words) >= PASSAGE and re.match(r"[^\W\d_]{4,}", word[0]):
            yield words
            words = []


def last_words(text: str) -> Iterator[Item]:
    """Yield the first letters of each passage's last word, after all its words."""
    for words in passages(text):
        letters = re.match(r"[^\W\d_]{4,}", words[-1][0])
        assert letters is not None
        end = words[-2].end()
        space = text[end : words[-1].start()]
        # The space belongs to the continuation, as tokens hold the space before a word.
        yield Item(text[words[0].start() : end], (space + letters[0],), 0)


def word_orders(text: str) -> Iterator[Item]:
    """Yield the last words of each passage in their order and in random orders.

    The passage itself is the seed. The very last word is left to `last_words`: where
    two tasks ask about the same text, the harness's `hf` takes the likelihood of one
    for the other's.
    """
    for *words, _ in passages(text):
        start, end = words[0].start(), words[-TAIL - 1].end()
        tail = [word[0] for word in words[-TAIL:]]
        passage = text[start : words[-1].end()].encode()
        # `random` seeds by the bytes, and not by Python's hash, which differs in each
        # process.
        draw = random.Random(hashlib.blake2b(passage, digest_size=8).digest())
        others: set[str] = set()
        # Without a break: `gold` comes after a fixed number of draws, and another
        # number would make other items than those of earlier evaluations.
        for _ in range(10 * CHOICES):
            shuffled = " ".join(draw.sample(tail, TAIL))
            if shuffled != " ".join(tail) and len(others) < CHOICES - 1:
                others.add(shuffled)
        if len(others) < CHOICES - 1:
            continue  # too few different words
        gold = draw.randrange(CHOICES)
        # A set of texts has another order in each process.
        choices = sorted(others)
        choices.insert(gold, " ".join(tail))
        yield Item(text[start:end], tuple(f" {choice}" for choice in choices), gold)


def score_words(eval_model: EvalModel, items: Sequence[Item]) -> Scores:
    """Return the last word's perplexity, and how often it is the likeliest."""
    answers = eval_model.likelihoods(
        [(item.context, item.choices[0]) for item in items]
    )
    nats = mean_of([-answer.logprob for answer in answers])
    # math.exp raises OverflowError from 709.8 on.
    perplexity = math.exp(min(nats.value, 700.0))
    return {
        "acc": mean_of([float(answer.greedy) for answer in answers]),
        # The error of exp(x) is exp(x) times that of x, to first order.
        "perplexity": Score(perplexity, perplexity * nats.error),
    }


def score_orders(eval_model: EvalModel, items: Sequence[Item]) -> Scores:
    """Return the share of items whose true order is the likeliest.

    All orders have the same characters, so likelihoods need no normalization.
    """
    answers = iter(
        eval_model.likelihoods(
            [(item.context, choice) for item in items for choice in item.choices]
        )
    )
    right = []
    for item in items:
        logprobs = [next(answers).logprob for _ in item.choices]
        right.append(float(logprobs.index(max(logprobs)) == item.gold))
    return {"acc": mean_of(right)}


def mean_of(values: Sequence[float]) -> Score:
    """Return the mean of items and its standard error."""
    error = math.nan
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return Score(math.fsum(values) / len(values), error)


def metric(name: str, aggregation: str, *, higher: bool) -> dict[str, Any]:
    """Return an entry of the harness's `metric_list`."""
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher}


ACCURACY = metric("acc", "mean", higher=True)
TASKS = {
    "last_word": OfflineTask(
        last_words,
        score_words,
        {
            "output_type": "loglikelihood",
            "doc_to_target": "{{choices[0]}}",
            "metric_list": [metric("perplexity", "perplexity", higher=False), ACCURACY],
        },
    ),
    "word_order": OfflineTask(
        word_orders,
        score_orders,
        {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [ACCURACY],
        },
    ),
}


def items_of(name: str, text: str, limit: int) -> list[Item]:
    """Return the first `limit` items of a task; UserError for fewer than ten."""
    items = list(itertools.islice(TASKS[name].items(text), limit))
    if len(items) < min(10, limit):
        raise UserError(
            f"tasks: {name} has {len(items)} items in the validation text, a passage of"
            f" {PASSAGE} words each; expected 10 or more: use more text, or another"
            " task"
        )
    return items


def write_for_harness(name: str, items: Sequence[Item], directory: Path) -> Path:
    """Write a task's files for lm-evaluation-harness, and return the YAML file.

    It runs with `--tasks FILE`.
    """
    import yaml

    directory.mkdir(parents=True, exist_ok=True)
    # The harness may be started in another directory.
    rows = directory.resolve() / f"{name}.jsonl"
    lines = (json.dumps(item._asdict(), ensure_ascii=False) for item in items)
    write_atomically(rows, "".join(f"{line}\n" for line in lines))
    tree = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        # The continuations begin with their space; the default adds one.
        "target_delimiter": "",
        **TASKS[name].harness,
        "metadata": {"version": 1.0},
    }
    path = directory / f"{name}.yaml"
    write_atomically(path, yaml.safe_dump(tree, sort_keys=False))
    return path
