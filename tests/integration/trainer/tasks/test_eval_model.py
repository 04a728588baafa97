"""Texts to tokens and back, as the harness does it with other models; and the tasks
made of a text."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from precisions import workload

from trainer.assembly.callbacks import build_tasks
from trainer.data import get_tokenizer
from trainer.errors import UserError
from trainer.models.gpt2.spec import GPT2Spec
from trainer.tasks.choose import choose_tasks
from trainer.tasks.eval_model import EvalModel, GenerationRequest, before_first
from trainer.tasks.harness import request_of
from trainer.tasks.offline import TASKS, items_of, write_for_harness
from trainer.tasks.scoring import Answer, Question
from trainer.tasks.writing import LIKELIEST, DecodingParams
from trainer.workload import first_state

SPEC = GPT2Spec(vocab_size=256, context=32, n_layer=1, n_head=2, d_model=32)
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "iota", "kappa"]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 2000).tolist())


@functools.cache
def eval_model():
    task = workload("fp32", 1, SPEC)
    state = first_state(task, 0)
    return EvalModel(task, get_tokenizer("byte"), 8).at(state.params, state.scaling)


def ids(text):
    return list(text.encode())


def test_a_context_and_its_continuation_in_tokens():
    question = eval_model().question
    assert question("one", " two") == Question(ids("one"), ids(" two"))
    # a space belongs to the word behind it
    assert question("one ", "two") == Question(ids("one"), ids(" two"))
    assert question("", "two") == Question([0], ids("two"))
    # no text begins with the end of a document
    assert question("", "\0two") == Question([0], ids("\ufffdtwo"))
    assert question("  ", "two") == Question([0], ids("  two"))


def test_a_rolling_text_scores_each_token_once_with_as_much_before_it_as_fits():
    text = "".join(chr(97 + i % 26) for i in range(75))
    actual = list(eval_model().windows(text))
    assert [i for window in actual for i in window.continuation] == ids(text)
    assert [len(w.context) + len(w.continuation) - 1 for w in actual] == [32] * 3
    assert actual[0].context == [0]
    total = sum(answer.logprob for answer in eval_model().answers(actual))
    assert eval_model().rolling(["", text]) == [0, pytest.approx(total)]


def test_a_continuation_that_cannot_be_scored_is_refused_in_a_line():
    for pair, count in ((("one", ""), 0), (("one", "x" * 33), 33)):
        message = f"a continuation of {count} tokens cannot be scored; expected 1 to 32"
        with pytest.raises(UserError, match=message):
            eval_model().likelihoods([pair])
    # before the first step
    settings = SimpleNamespace(tasks=["word_order"], limit=2, batch_size=8)
    data = SimpleNamespace(
        first_documents=lambda _: TEXT, tokenizer=get_tokenizer("byte")
    )
    run = SimpleNamespace(task=workload("fp32", 1, SPEC), data=data)
    with pytest.raises(UserError, match="cannot be scored; expected 1 to 32"):
        build_tasks(SimpleNamespace(eval=settings), run)


def test_texts_end_before_what_ends_them():
    request = GenerationRequest("some context that is longer than what fits", (), 12)
    [text] = eval_model().texts([request])
    [cut] = eval_model().texts([request._replace(until=(text[3:5],))])
    assert cut == text[: text.index(text[3:5])]
    message = "asks for 32 new tokens, the model's context is 32"
    with pytest.raises(UserError, match=message):
        eval_model().texts([GenerationRequest("one", (), 32)])
    assert before_first("one. two; three", ("; ", ". ")) == "one"


def test_items_are_the_text_s_own_and_always_the_same():
    words, orders = (items_of(name, TEXT, 50) for name in ("last_word", "word_order"))
    assert len(words) == len(orders) == 50
    for item in words:
        assert item.context + item.choices[0] in TEXT
        assert item.choices[0].strip().isalpha()
    for item in orders:
        texts = [item.context + choice for choice in item.choices]
        assert [text in TEXT for text in texts].count(True) == 1
        assert texts[item.gold] in TEXT
        assert len(set(item.choices)) == 4
        assert len({"".join(sorted(choice)) for choice in item.choices}) == 1
    assert {item.gold for item in orders} == {0, 1, 2, 3}
    assert items_of("word_order", TEXT, 50) == orders
    # The draws are those of every machine and version: scores compare.
    assert [item.gold for item in orders[:8]] == [0, 1, 3, 1, 3, 3, 0, 2]
    with pytest.raises(UserError, match="last_word has 4 items in the validation text"):
        items_of("last_word", TEXT[:800], 50)


def test_who_knows_the_text_scores_full_marks():
    def likelihoods(pairs):
        known = [context + text in TEXT for context, text in pairs]
        return [Answer(0.0 if knows else -1.0, knows) for knows in known]

    tasks = choose_tasks(
        ["last_word", "word_order"], lambda size: TEXT[:size], limit=30
    )
    actual = tasks.scores(SimpleNamespace(likelihoods=likelihoods))
    assert actual["last_word"] == {"acc": (1.0, 0.0), "perplexity": (1.0, 0.0)}
    assert actual["word_order"] == {"acc": (1.0, 0.0)}
    guess = lambda pairs: [Answer(-math.log(4), False) for _ in pairs]
    actual = tasks.scores(SimpleNamespace(likelihoods=guess))
    assert actual["last_word"]["perplexity"].value == pytest.approx(4)
    assert actual["word_order"]["acc"].value < 0.6


def test_the_harness_is_given_the_same_items(tmp_path):
    for name in TASKS:
        items = items_of(name, TEXT, 12)
        tree = yaml.safe_load(write_for_harness(name, items, tmp_path).read_text())
        text = Path(tree["dataset_kwargs"]["data_files"]["test"]).read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert [(r["context"], tuple(r["choices"]), r["gold"]) for r in rows] == items
        assert tree["task"] == name
        assert tree["target_delimiter"] == ""


def test_what_a_task_asks_of_a_generation():
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 3}
    for settings, expected in (
        ({"until": "\n", "max_gen_toks": 5}, (("\n",), 5, LIKELIEST)),
        (
            {"until": ["x"], "do_sample": False, "temperature": 0.7},
            (("x",), 256, LIKELIEST),
        ),
        (sampled, ((), 3, DecodingParams(0.7, 0, 0.9))),
    ):
        assert request_of("a", settings) == GenerationRequest("a", *expected)
    with pytest.raises(UserError, match="asks for generation with num_beams; known"):
        request_of("a", {"num_beams": 4})
