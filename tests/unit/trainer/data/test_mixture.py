"""Samples of several sources: in their shares over any stretch, each once an epoch,
from seed and step alone."""

import numpy as np
import pytest
from corpora import rows, write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.data import Manifest, ShardLoader, TextSource, prepare
from trainer.data.mixture import (
    MixedManifest,
    Mixture,
    MixtureStage,
    ReplicaSampler,
    StageSampler,
    ValidationSampler,
    parse_stages,
)
from trainer.errors import UserError

NAMES = ["web", "code", "books"]


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(
    "weights", [(1,), (0.7, 0.3), (0.5, 0.3, 0.2), (0.989, 0.01, 0.001)]
)
def test_any_thousand_batches_hold_the_wanted_shares(weights, batch_size):
    sampler = StageSampler([MixtureStage(0, weights)], batch_size, seed=3)
    wanted = np.array(weights) / sum(weights)
    for start in (0, 317, 123_456_789):
        source, _ = sampler.assign(
            np.arange(start * batch_size, (start + 1000) * batch_size)
        )
        actual = np.bincount(source, minlength=len(weights)) / len(source)
        # A block that is cut holds its share only to the error of a sample without
        # replacement.
        assert abs(actual - wanted).max() < (0.005 if batch_size == 16 else 0.03)


# The second stage has 36 blocks and three samples, too few for five sources.
@example([1.0, 1.0, 2.0, 1.0, 5.0], 0, [1, 440], 21)
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.lists(st.integers(1, 2000), max_size=2, unique=True),
    st.integers(1, 24),
)
def test_each_source_counts_its_samples_without_a_gap_or_a_repetition(
    weights, seed, borders, batch_size
):
    stages = [
        MixtureStage(0, tuple(weights)),
        *(MixtureStage(step, tuple(reversed(weights))) for step in sorted(borders)),
    ]
    sampler = StageSampler(stages, batch_size, seed)
    steps = max(borders, default=0) + 10_000 // batch_size
    source, index = sampler.assign(np.arange(steps * batch_size))
    for k in range(len(weights)):
        taken = index[source == k]
        assert len(np.unique(taken)) == len(taken)
        # The block in which the samples looked at end is not taken to its end.
        most = max(256, int(np.ceil(2 * sum(weights) / min(weights))))
        assert taken.max(initial=0) < len(taken) + most
        for border in borders:
            earlier = index[: border * batch_size][source[: border * batch_size] == k]
            assert sorted(earlier) == list(range(len(earlier)))
    for step in (0, 1, steps // 3, steps):
        np.testing.assert_array_equal(
            sampler.samples_per_source(step),
            np.bincount(source[: step * batch_size], minlength=len(weights)),
        )


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=1, max_size=5).filter(any),
    st.integers(1, 24),
    st.integers(1, 60),
)
def test_a_validation_holds_each_share_after_any_number_of_samples(
    weights, batch_size, batches
):
    sampler = ValidationSampler(weights, batch_size, batches)
    source, index = sampler.assign(np.arange(batch_size * batches))
    wanted = np.array(weights) / sum(weights)
    for count in range(1, len(source) + 1):
        actual = np.bincount(source[:count], minlength=len(weights))
        assert abs(actual - count * wanted).max() < len(weights)
    for k in range(len(weights)):
        np.testing.assert_array_equal(
            index[source == k], np.arange((source == k).sum())
        )
    np.testing.assert_array_equal(
        sampler.samples_per_source(batches), np.bincount(source, minlength=len(weights))
    )


def test_each_block_has_another_order():
    sampler = StageSampler([MixtureStage(0, (0.5, 0.5))], 16, 0)
    source, _ = sampler.assign(np.arange(512))
    assert (source[:256] != source[256:]).any()


def test_stages_of_other_weights_begin_where_they_should():
    stages = parse_stages((3, 1, 0.5), [[100, 1, 0, 3]], NAMES)
    sampler = StageSampler(stages, 8, 0)
    earlier, _ = sampler.assign(np.arange(100 * 8))
    after, _ = sampler.assign(np.arange(100 * 8, 1100 * 8))
    assert set(earlier) == {0, 1, 2}
    assert set(after) == {0, 2}
    assert abs(np.mean(after == 2) - 0.75) < 0.005


@pytest.mark.parametrize(
    ("weights", "later", "words"),
    [
        ((1, 2), [], "2 weights; expected one for each of 3 sources: web, code, books"),
        ((1, float("nan"), 1), [], "weight of code must be above 0"),
        ((1, 1e-6, 1), [], "share of code is below 0.01%"),
        ((1, 1, 1), [[5, 1, 1, 1], [5, 1, 1, 2]], "step 5 comes after 5"),
        ((1, 1, 1), [[0, 1, 1, 1]], "step 0 comes after 0"),
        ((1, 1, 1), [[5, 0, 0, 0]], "all weights are 0"),
        ((1, 1, 1), [[2.5, 1, 1, 1]], "a whole number of steps"),
        ((1, 1, 1), [[]], "expected"),
    ],
)
def test_weights_that_make_no_mixture_are_named(weights, later, words):
    with pytest.raises(UserError, match=words):
        parse_stages(weights, later, NAMES)


def text_of(letters):
    rng = np.random.default_rng(len(letters))
    return "".join(rng.choice(list(letters), 9000))


@pytest.fixture
def parts(tmp_path):
    """Two prepared texts, of letters that tell which one a window is of."""
    texts = {"lower": text_of("abcdefgh"), "upper": text_of("ABCDEFGHIJ")}
    return made(tmp_path, {f"{name}.txt": text for name, text in texts.items()})


def made(tmp_path, files, tokenizer="byte", **settings):
    """Prepare files, and return the directories by their names."""
    write(tmp_path, files)
    return {
        name.partition(".")[0]: prepare(
            TextSource((f"{tmp_path}/{name}",)),
            tokenizer,
            tmp_path / "cache",
            **settings,
        )
        for name in files
    }


def loaders(parts, split, **settings):
    given = {"context": 16, "batch_size": 8, "seed": 1, **settings}
    return {
        name: ShardLoader(directory, split, **given)
        for name, directory in parts.items()
    }


def manifests_of(parts):
    return {name: Manifest.load(directory) for name, directory in parts.items()}


def mixture(parts, split="train", *weights, seed=1, **settings):
    stages = enumerate(weights or [(0.75, 0.25)])
    return Mixture.for_training(
        loaders(parts, split, **settings),
        MixedManifest.merge(manifests_of(parts)),
        [MixtureStage(i, stage) for i, stage in stages],
        seed=seed,
    )


def test_batches_are_windows_of_the_sources_in_their_shares(parts):
    mixed, alone = mixture(parts), loaders(parts, "train")
    seen = {"lower": 0, "upper": 0}
    windows = {
        tuple(row)
        for loader in alone.values()
        for row in loader.samples(np.arange(loader.windows)).tokens
    }
    for step in range(500):
        batch = mixed.batch(step)
        for row in batch.tokens:
            assert tuple(row) in windows
            seen["lower" if row[0] >= ord("a") else "upper"] += 1
    actual = mixed.source_progress(mixed.sampler.samples_per_source(500).tolist())
    assert abs(actual["lower"]["share"] - 0.75) < 0.01
    epochs = seen["upper"] / alone["upper"].windows
    assert actual["upper"]["epochs"] == pytest.approx(epochs)
    assert mixed.batch(7).segments is None
    assert mixture(parts, document_mask=True).batch(7).segments.shape == (8, 17)


def test_the_bytes_of_a_token_are_those_of_the_sources_as_they_are_read(tmp_path):
    write(tmp_path, {"vocab.bpe": "a b\nab ab\n"})
    texts = {"a.jsonl": "ababab" * 150, "b.jsonl": "xyz" * 300}
    files = {
        name: rows(text[: 900 - i] for i in range(40)) for name, text in texts.items()
    }
    parts = made(tmp_path, files, str(tmp_path), val_fraction=0.5)
    for shares in ((0.25, 0.75), (1.0, 0.0)):
        mixed = mixture(parts, "val", shares)
        sizes = [part.validation_bytes_per_token(3) for part in mixed.sources.values()]
        assert sizes[0] - sizes[1] > 0.2
        samples = mixed.sampler.samples_per_source(3)
        mean = samples @ sizes / samples.sum()
        assert mixed.validation_bytes_per_token(3) == pytest.approx(mean)


def test_no_window_counts_twice_in_the_validation_of_a_mixture(parts):
    validation = Mixture.for_validation(
        loaders(parts, "val"),
        MixedManifest.merge(manifests_of(parts)),
        MixtureStage(0, (0.75, 0.25)),
        batch_size=1024,
        row_multiple=4,
    )
    windows = validation.batch(0).tokens
    assert 0 < len(windows) < 1024
    assert len(windows) % 4 == 0
    assert len(np.unique(windows, axis=0)) == len(windows)


def test_a_manifest_of_several_is_their_sum_and_refuses_two_tokenizers(parts, tmp_path):
    manifests, merge = manifests_of(parts), MixedManifest.merge
    mixed = merge(manifests)
    for count in ("token_count", "byte_count"):
        counts = [getattr(m, count)("val") for m in manifests.values()]
        assert getattr(mixed, count)("val") == sum(counts)
    assert mixed.fingerprint != merge(dict(reversed(manifests.items()))).fingerprint
    edited = text_of("abcdefgh")[:-1] + "!"  # of the same length
    other = manifests_of(made(tmp_path, {"lower.txt": edited}))
    assert merge(manifests | other).validation_content != mixed.validation_content
    write(tmp_path, {"vocab.bpe": "a b"})
    other = manifests_of(made(tmp_path, {"other.txt": edited}, str(tmp_path)))
    with pytest.raises(UserError, match="prepare them with one"):
        merge(manifests | other)


@pytest.mark.parametrize("accum", [1, 2])
def test_each_replica_reads_its_source_in_order_and_no_sample_twice(accum):
    replicas, batch_size, steps = 4, 16, 6
    sampler = ReplicaSampler(replicas, batch_size, accum)
    seen = [[] for _ in range(replicas)]
    for step in range(steps):
        source, index = sampler.assign(step * batch_size + np.arange(batch_size))
        # The rows of replica k, as the step splits each micro-batch.
        rows = source.reshape(accum, replicas, -1)
        np.testing.assert_array_equal(
            rows, np.broadcast_to(np.arange(replicas)[None, :, None], rows.shape)
        )
        for k in range(replicas):
            seen[k] += index[source == k].tolist()
    assert seen == [list(range(steps * batch_size // replicas))] * replicas
    np.testing.assert_array_equal(
        sampler.samples_per_source(steps), list(map(len, seen))
    )


def test_documents_are_of_every_source_in_turns_as_the_shares_are(tmp_path):
    # ten tokens each, with their end
    files = {
        f"{name}.jsonl": rows(f"{name[0]}{i:08}" for i in range(800))
        for name in ("web", "code")
    }
    parts = made(tmp_path, files)

    def letters(*weights):
        documents = mixture(parts, "val", *weights).documents(80)
        return "".join(chr(document[0]) for document in documents)

    assert letters((0, 1)) == "c" * 8
    assert letters((1, 1)) == letters((1, 0), (0, 1)) == "wc" * 4
    assert letters((3, 1)) == "wcwwwcww"
