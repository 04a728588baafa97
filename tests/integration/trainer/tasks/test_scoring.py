"""Log-likelihoods of what follows: those of the validation's forward pass, whatever the
batch and the precision."""

import jax
import numpy as np
import pytest
from precisions import SPEC, workload

from scalify_core import asarray
from trainer.tasks.batching import LENGTHS, Sized, make_batches
from trainer.tasks.scoring import Question, Scorer, cut
from trainer.tasks.writing import Writer
from trainer.workload import first_state

CONTEXT = SPEC.context
EPS = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}


def questions():
    rng = np.random.default_rng(0)

    def ids(high):
        return rng.integers(0, SPEC.vocab_size, int(rng.integers(1, high))).tolist()

    return [Question(ids(22), ids(CONTEXT + 1)) for _ in range(21)]


def test_what_is_too_long_loses_its_beginning():
    question = Question(range(10), [20, 21, 22])
    assert cut(question, 16) == ([*range(10), 20, 21], [20, 21, 22])
    assert cut(question, 5) == ([7, 8, 9, 20, 21], [20, 21, 22])
    for context, continuation in (([], [1]), ([1], []), ([1], [2] * 6)):
        with pytest.raises(ValueError, match="expected 1 or more, and 1 to 5"):
            cut(Question(context, continuation), 5)


@pytest.mark.parametrize("context", [1000, 1024])  # 1000 is no multiple of 16
def test_batches_hold_all_rows_in_few_shapes(context):
    rng = np.random.default_rng(0)
    lengths = [int(t) for t in rng.integers(1, context + 1, 500)]
    sizes = [Sized(t, int(rng.integers(1, t + 1))) for t in lengths]
    actual = make_batches(sizes, 8, context)
    assert sorted(row for part in actual for row in part.rows) == list(range(500))
    for part in actual:
        assert len(part.rows) <= 8
        for row in part.rows:
            assert sizes[row].tokens <= part.length <= context
            assert sizes[row].scored <= part.scored <= part.length
    tails = {min(part.scored, context - 1) for part in actual}
    shapes = {(part.length, part.scored) for part in actual}
    assert len(shapes) <= LENGTHS * len(tails)
    assert sum(8 * part.length for part in actual) < 1.25 * sum(lengths)


def test_a_batch_has_no_more_rows_than_there_are_sequences(monkeypatch):
    """Others are only padding, which may fill the memory."""
    task = workload("fp32")
    scorer, writer = Scorer(task, 60_000), Writer(task, 60_000)
    shapes = []

    def record(program):
        def call(params, *arguments):
            shapes.append(next(x.shape for x in arguments if hasattr(x, "shape")))
            return program(params, *arguments)

        return call

    monkeypatch.setattr(scorer, "_score", record(scorer._score))
    monkeypatch.setattr(writer, "_prefill", record(writer._prefill))
    state = first_state(task, 0)
    assert len(scorer(state.params, state.scaling, [Question([1], [2])] * 3)) == 3
    writer(asarray(state.params), [[1]], max_new_tokens=1, ended=lambda ids: bool(ids))
    assert [shape[0] for shape in shapes] == [4, 1]


# One of each way to scale; the step of the others: test_precision.py.
@pytest.mark.parametrize("preset", ["fp32", "scalify_fp8_fp16", "fp8_delayed"])
def test_answers_are_those_of_the_loss(preset):
    """The mean over a row's tokens is the validation's loss of it; sums are in another
    order, of rounded logits."""
    task = workload(preset)
    state = first_state(task, 0)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, SPEC.vocab_size, (16, CONTEXT + 1)).astype(np.int32)
    answers = Scorer(task, 16)(
        state.params, state.scaling, [Question(row[:1], row[1:]) for row in rows]
    )
    loss = jax.jit(task.model.eval_loss)(state, rows, None)
    mean = -np.mean([answer.logprob for answer in answers]) / CONTEXT
    assert mean == pytest.approx(float(loss), rel=4 * EPS[task.model.policy.compute])


def test_the_batch_and_the_order_change_nothing():
    task = workload("fp32")
    state = first_state(task, 0)
    prompts = questions()
    one, many = (Scorer(task, n)(state.params, (), prompts) for n in (1, 8))
    back = Scorer(task, 8)(state.params, (), prompts[::-1])[::-1]
    for a, b, c in zip(one, many, back, strict=True):
        assert [b.logprob, c.logprob] == pytest.approx([a.logprob] * 2, rel=1e-5)
        assert a.greedy == b.greedy == c.greedy


def test_greedy_is_that_each_token_is_the_likeliest():
    task = workload("fp32")
    state = first_state(task, 0)
    sharp = jax.tree.map(lambda p: 30 * p, asarray(state.params))
    logits = jax.jit(lambda ids_1xT: task.model.training.bind(sharp)(ids_1xT)[0])
    ids = [3, 1, 4]
    for _ in range(4):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(logits(padded)[len(ids) - 1].argmax()))
    wrong = [*ids[3:6], (ids[6] + 1) % SPEC.vocab_size]
    score = Scorer(task, 2)
    actual = score(sharp, (), [Question(ids[:3], ids[3:]), Question(ids[:3], wrong)])
    assert [answer.greedy for answer in actual] == [True, False]
    assert actual[0].logprob > actual[1].logprob
