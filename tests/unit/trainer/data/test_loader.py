import threading
from types import SimpleNamespace

import numpy as np
import pytest

from trainer.assembly import callbacks
from trainer.assembly.evaluation import validation_text
from trainer.data import ShardLoader, TextSource, prefetch, prepare
from trainer.data.dataset import Dataset
from trainer.data.loader import segments
from trainer.errors import UserError


@pytest.fixture(scope="module")
def directory(jsonl, tmp_path_factory):
    """Several shards per split, so that windows cross from one to the next."""
    cache = tmp_path_factory.mktemp("cache")
    source = TextSource((str(jsonl),))
    return prepare(source, "byte", cache, val_fraction=0.2, shard_bytes=30_000)


def stream(loader, split):
    return np.concatenate(loader.manifest.open(split)).astype(np.int32)


def test_an_epoch_holds_every_window_once_and_the_next_one_in_another_order(directory):
    context, batch_size = 64, 7
    loader = ShardLoader(
        directory, "train", context=context, batch_size=batch_size, seed=1
    )
    tokens = stream(loader, "train")
    n = (len(tokens) - 1) // context
    assert loader.windows == n
    assert len(loader.manifest.splits["train"].shards) > 5
    windows = np.stack([tokens[i * context : (i + 1) * context + 1] for i in range(n)])
    steps = -(-3 * n // batch_size)
    drawn = np.concatenate([loader.batch(step).tokens for step in range(steps)])[
        : 3 * n
    ].reshape(3, n, -1)
    order = lambda rows: rows[np.lexsort(rows.T)]
    for epoch in drawn:
        assert np.array_equal(order(epoch), order(windows))
    assert not np.array_equal(drawn[0], drawn[1])


def test_a_batch_depends_on_seed_and_step_alone(directory):
    settings = {"context": 32, "batch_size": 8, "document_mask": True}
    first = ShardLoader(directory, "train", seed=1, **settings)
    wanted = [first.batch(step).tokens for step in range(20)]
    second = ShardLoader(directory, "train", seed=1, **settings)
    for step in reversed(range(20)):
        assert np.array_equal(second.batch(step).tokens, wanted[step])
    other = ShardLoader(directory, "train", seed=2, **settings)
    assert not np.array_equal(other.batch(0).tokens, wanted[0])
    batch = first.batch(11)
    assert batch.tokens.dtype == batch.segments.dtype == np.int32
    assert batch.tokens.shape == batch.segments.shape == (8, 33)


def test_validation_covers_its_split_in_order(directory):
    loader = ShardLoader(
        directory, "val", context=50, batch_size=3, shuffle=False, seed=9
    )
    inputs = np.concatenate(
        [loader.batch(step).tokens[:, :-1] for step in range(loader.steps_per_epoch)]
    )
    assert np.array_equal(inputs.ravel(), stream(loader, "val")[: inputs.size])
    assert inputs.size > loader.tokens - 1 - 50 * 3


def test_an_end_of_text_belongs_to_the_document_it_ends():
    tokens = np.array([[5, 0, 6, 7, 0, 0, 8], [0, 1, 1, 1, 1, 1, 0]], np.int32)
    assert segments(tokens, 0).tolist() == [
        [0, 0, 1, 1, 1, 2, 3],
        [0, 1, 1, 1, 1, 1, 1],
    ]


def test_a_split_shorter_than_one_window_is_an_error_that_says_how_much_it_needs(
    directory,
):
    loader = ShardLoader(directory, "val", context=8, batch_size=1)
    ShardLoader(directory, "val", context=loader.tokens - 1, batch_size=1).batch(5)
    with pytest.raises(
        UserError, match=rf"val part of .* has {loader.tokens} tokens, one window needs"
    ):
        ShardLoader(directory, "val", context=loader.tokens, batch_size=1)


def test_a_split_of_fewer_windows_than_the_batch_repeats_them(directory):
    few = ShardLoader(directory, "val", context=4_000, batch_size=999, shuffle=False)
    assert few.steps_per_epoch == 1
    rows = few.batch(0).tokens
    assert np.array_equal(rows[: few.windows], rows[few.windows : 2 * few.windows])


def test_no_window_counts_twice_in_a_validation(directory):
    tokens = ShardLoader(directory, "val", context=8, batch_size=1).tokens
    settings = {"seed": 0, "context": (tokens - 1) // 5, "batch_size": 16}
    val = Dataset.open(directory, row_multiple=2, **settings).val
    assert (val.windows, val.batch_size, val.steps_per_epoch) == (5, 4, 1)
    assert callbacks.tokens_read(val, 9) == 4 * val.context
    with pytest.raises(UserError, match=r"has 5 windows .* fewer than the 8 parts"):
        Dataset.open(directory, row_multiple=8, **settings)


def test_prefetch_gives_the_loader_s_batches_in_order(directory):
    loader = ShardLoader(directory, "train", context=16, batch_size=4)
    actual = list(prefetch(loader, 3, 12, depth=3))
    assert [step for step, _ in actual] == list(range(3, 12))
    for step, batch in actual:
        assert np.array_equal(batch.tokens, loader.batch(step).tokens)
    assert list(prefetch(loader, 5, 5)) == []


def test_an_error_surfaces_at_its_step_and_the_thread_ends():
    def batch(step):
        if step == 2:
            raise OSError("the disk is gone")
        return step

    batches = prefetch(SimpleNamespace(batch=batch), 0, 10)
    assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


def test_closing_early_ends_the_thread(directory):
    batches = prefetch(
        ShardLoader(directory, "train", context=16, batch_size=4), 0, 1_000_000
    )
    next(batches)
    assert "prefetch" in [thread.name for thread in threading.enumerate()]
    batches.close()
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


def test_bytes_per_token_are_of_the_batches_that_were_read(directory):
    data = Dataset.open(directory, seed=0, context=64, batch_size=2)
    size = np.mean(data.val.batch(0).tokens[:, 1:] != data.manifest.eot)
    assert size != pytest.approx(data.bytes_per_token, abs=1e-3)
    text = validation_text(
        SimpleNamespace(data=data, model=SimpleNamespace(loss_boundary_id=None)), 1
    )
    assert text.bytes_per_token == pytest.approx(size)


def test_the_validation_text_is_that_of_the_first_tokens_over_all_shards(directory):
    data = Dataset.open(directory, seed=0, context=8, batch_size=2)
    ids = stream(data.val, "val")
    assert len(data.manifest.open("val")[0]) < 35_000 < len(ids)
    for count in (100, 35_000, 10 * len(ids)):
        expected = data.tokenizer.decode(
            [int(i) for i in ids[:count] if i != data.manifest.eot]
        )
        assert data.validation_text(count) == expected
