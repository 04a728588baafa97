"""Mixtures of prepared texts in given shares, in stages.

The source of a sample is a pure function of seed and step. The samples of a stage come
in blocks; the last block ends with the stage. At the end of each block, the number of
samples that a source has given differs from its share by at most one. A keyed
permutation orders the samples of a block. So shares hold in any thousand batches, not
only on average. Each source counts its own samples, and reads its windows like a
`ShardLoader` of its own.

Legend: K sources, B sequences of the global batch, b those of this process.
"""

import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from trainer.data.loader import Batch, ShardLoader, validation_rows
from trainer.data.permutation import permute
from trainer.data.shards import Manifest, Shard, Split
from trainer.errors import UserError

# Samples of a block; more if the smallest share would get fewer than two.
MIN_BLOCK = 256
# A block has at least 2 / share samples, so this bounds its length.
MIN_SHARE = 1e-4

Ints = npt.NDArray[np.int64]


class MixtureStage(NamedTuple):
    """The weights of the sources from a step on; they need not sum to 1."""

    step: int
    weights: tuple[float, ...]


def parse_stages(
    weights: Sequence[float], later: Sequence[Sequence[float]], names: Sequence[str]
) -> tuple[MixtureStage, ...]:
    """Return the stages of a configuration.

    Args:
      weights: the weights of the sources from step 0 on.
      later: the first step and the weights of each further stage.
      names: the names of the sources.

    Raises:
      UserError: a wrong number of weights, a weight that is not positive (later stages
        may leave a source out), or steps that do not increase.
    """
    if not all(later) or any(row[0] != int(row[0]) for row in later):
        raise UserError(
            "data.stages: expected [[STEP,WEIGHT,...],...], each with a whole number of"
            " steps first"
        )
    stages = [MixtureStage(0, tuple(weights))]
    # A list of a configuration may hold whole numbers as floats.
    stages += [MixtureStage(int(row[0]), tuple(row[1:])) for row in later]
    for stage in stages:
        check_stage(stage, names)
    for previous, stage in itertools.pairwise(stages):
        if stage.step <= previous.step:
            raise UserError(
                f"data.stages: step {stage.step} comes after {previous.step}; give"
                " increasing steps above 0"
            )
    return tuple(stages)


def check_stage(stage: MixtureStage, names: Sequence[str]) -> None:
    """Raise UserError for weights of a stage that cannot be used."""
    step, weights = stage
    key = f"data.stages from step {step} on" if step else "data.weights"
    if len(weights) != len(names):
        raise UserError(
            f"{key} has {len(weights)} weights; expected one for each of"
            f" {len(names)} sources: {', '.join(names)}"
        )
    total_weight, bad, small = sum(weights), [], []
    for name, weight in zip(names, weights, strict=True):
        is_valid = math.isfinite(weight) and weight >= 0
        if not is_valid or (weight == 0 and step == 0):
            bad.append(name)
        elif 0 < weight < MIN_SHARE * total_weight:
            small.append(name)
    if bad:
        raise UserError(
            f"{key}: the weight of {', '.join(bad)} must be above 0; or leave the"
            " source out"
        )
    if not total_weight:
        raise UserError(
            f"{key}: all weights are 0; give at least one source a weight above 0"
        )
    if small:
        raise UserError(
            f"{key}: the share of {small[0]} is below {MIN_SHARE:.2%}; give it"
            " more, or leave it out"
        )


class Sampler(Protocol):
    """Assigns the samples of a run to the sources of a mixture."""

    def assign(self, sample: Ints) -> tuple[Ints, Ints]:
        """Return the source of each sample [b] of the run, and its index among the
        samples of that source.
        """

    def samples_per_source(self, step: int) -> Ints:
        """Return the samples of each source in the first `step` steps, [K]."""


class StageBlocks:
    """The blocks of one stage. Samples are counted from the start of the stage.

    Args:
      weights: the weights of the sources.
      samples: number of samples of the stage.
      seed: the seed of the order inside blocks.
    """

    def __init__(self, weights: Sequence[float], samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        # Element k is the share of sources 0 to k - 1, [K + 1].
        cumulative_shares = np.cumsum([0.0, *shares_of(weights)])
        # A rounded sum below 1 would leave a sample without a source.
        cumulative_shares[-1] = 1.0
        self._cumulative_shares = cumulative_shares
        # Rounded cumulative counts may give a source two samples too few: a block is so
        # long that its share is two.
        min_size = math.ceil(2 / min(filter(None, np.diff(cumulative_shares))))
        self._block_size = max(MIN_BLOCK, min_size)
        full_blocks, remainder = divmod(samples, self._block_size)
        # A remainder that is too short for all sources belongs to the block before it.
        has_short_block = remainder >= min_size
        self._last_block = max(0, full_blocks - 1 + has_short_block)

    def cumulative_counts(self, samples: npt.ArrayLike) -> Ints:
        """Return cumulative counts over sources, [..., K + 1].

        Element k is the number of samples of sources 0 to k - 1 among the first
        `samples`, a number of whole blocks.
        """
        column = np.asarray(samples, np.float64)[..., None]
        # Sums of shares are rounded, and not each share: so counts add up to the
        # samples.
        return np.floor(column * self._cumulative_shares + 0.5).astype(np.int64)

    def samples_per_source(self, samples: int) -> Ints:
        """Return the samples of each source among the first `samples`, [K]."""
        # Whole blocks are counted by a formula, and only the rest sample by sample.
        start = min(samples // self._block_size, self._last_block) * self._block_size
        sources, _ = self.assign(np.arange(start, samples, dtype=np.int64))
        counts = np.diff(self.cumulative_counts(start))
        return counts + np.bincount(sources, minlength=len(counts))

    def assign(self, sample: Ints) -> tuple[Ints, Ints]:
        """Return the source of each sample [b] of the stage, and its index among the
        samples of that source.
        """
        block = np.minimum(sample // self._block_size, self._last_block)
        start = block * self._block_size
        end = start + self._block_size
        end[block == self._last_block] = self._samples
        position, size = sample - start, end - start
        # `permute` takes one length, and the last block has its own.
        slot = np.empty_like(sample)
        for n in np.unique(size):
            rows = size == n
            # The number of the block is the epoch of the permutation: each block has an
            # order of its own.
            slot[rows] = permute(self._seed, block[rows], position[rows], int(n))
        # In a block, source k has the slots from slot_bounds[k] to slot_bounds[k + 1].
        at_start = self.cumulative_counts(start)  # [b, K + 1]
        slot_bounds = self.cumulative_counts(end) - at_start
        source = np.sum(slot[:, None] >= slot_bounds[:, 1:], axis=1)
        row = np.arange(len(sample))
        in_earlier_blocks = np.diff(at_start, axis=1)[row, source]
        return source, in_earlier_blocks + slot - slot_bounds[row, source]


class StageSampler:
    """A sampler that draws each source by its weight in the stage.

    Args:
      stages: the stages, the first of which starts at step 0.
      batch_size: B.
      seed: the seed of the order inside blocks.
    """

    def __init__(
        self, stages: Sequence[MixtureStage], batch_size: int, seed: int
    ) -> None:
        self._batch_size = batch_size
        # The first sample of each stage.
        self._starts = np.array([stage.step * batch_size for stage in stages], np.int64)
        # The last stage has no end: stages do not know the steps of the run.
        lengths = [*np.diff(self._starts).tolist(), np.iinfo(np.int64).max]
        self._stages = [
            # With one seed, all stages would begin with the same order.
            StageBlocks(stage.weights, length, seed + i)
            for i, (stage, length) in enumerate(zip(stages, lengths, strict=True))
        ]
        # The samples of each source before each stage, [stages, K].
        self._earlier_samples = np.zeros(
            (len(stages), len(stages[0].weights)), np.int64
        )
        for i, length in enumerate(lengths[:-1]):
            # What the stage takes, and not its whole blocks: a stage goes on where the
            # one before left a source.
            counts = np.diff(self._stages[i].cumulative_counts(length))
            self._earlier_samples[i + 1] = self._earlier_samples[i] + counts

    def assign(self, sample: Ints) -> tuple[Ints, Ints]:
        """See `Sampler`."""
        stage = self._stage_of(sample)
        source, index = np.empty_like(sample), np.empty_like(sample)
        for i in np.unique(stage):
            rows = stage == i
            sources, indices = self._stages[i].assign(sample[rows] - self._starts[i])
            source[rows] = sources
            index[rows] = self._earlier_samples[i][sources] + indices
        return source, index

    def samples_per_source(self, step: int) -> Ints:
        """See `Sampler`."""
        end = step * self._batch_size
        stage = int(self._stage_of(end))
        in_stage = end - int(self._starts[stage])
        counts = self._stages[stage].samples_per_source(in_stage)
        return self._earlier_samples[stage] + counts

    def _stage_of(self, sample: npt.ArrayLike) -> Ints:
        return np.searchsorted(self._starts, sample, side="right") - 1


class ReplicaSampler:
    """A sampler for DiLoCo replicas that each read one source.

    A micro-batch has K equal parts, and part k is of source k.

    Args:
      replicas: K.
      batch_size: B.
      grad_accum_steps: number of micro-batches of a batch, which are consecutive rows.
    """

    def __init__(self, replicas: int, batch_size: int, grad_accum_steps: int) -> None:
        self._replicas, self._batch_size = replicas, batch_size
        self._micro_batch = batch_size // grad_accum_steps
        self._replica_rows = self._micro_batch // replicas

    def assign(self, sample: Ints) -> tuple[Ints, Ints]:
        """See `Sampler`."""
        micro_batch, row = np.divmod(sample, self._micro_batch)
        source, replica_row = np.divmod(row, self._replica_rows)
        return source, micro_batch * self._replica_rows + replica_row

    def samples_per_source(self, step: int) -> Ints:
        """See `Sampler`."""
        count = step * self._batch_size // self._replicas
        return np.full(self._replicas, count, np.int64)


class ValidationSampler:
    """A sampler for validation, the same for every seed.

    Each source reads its windows in their order. Among the first n samples, for any n,
    each source has its share, to within a sample or two.

    Args:
      weights: the weights of the sources.
      batch_size: B.
      batches: number of batches, after which they repeat.
    """

    def __init__(self, weights: Sequence[float], batch_size: int, batches: int) -> None:
        samples = batch_size * batches
        shares = shares_of(weights)
        # Rounded up, so that they are at least `samples` in all.
        counts = np.ceil(samples * shares).astype(np.int64)
        source = np.repeat(np.arange(len(counts)), counts)
        index = np.concatenate([np.arange(count) for count in counts])
        # A source with share s gives a sample every 1 / s samples.
        order = np.argsort((index + 0.5) / shares[source], kind="stable")[:samples]
        self._source, self._index = source[order], index[order]
        self._batch_size, self._sources = batch_size, len(counts)

    def assign(self, sample: Ints) -> tuple[Ints, Ints]:
        """See `Sampler`."""
        sample = sample % len(self._source)
        return self._source[sample], self._index[sample]

    def samples_per_source(self, step: int) -> Ints:
        """See `Sampler`."""
        sources = self._source[: step * self._batch_size]
        return np.bincount(sources, minlength=self._sources)


@dataclass(frozen=True)
class MixedManifest(Manifest):
    """The manifest of several prepared directories as if they were one.

    `directory` is the first one's.
    """

    manifests: tuple[Manifest, ...]

    @classmethod
    def merge(cls, manifests: Mapping[str, Manifest]) -> Self:
        """Return one manifest for those of several sources, by source name.

        Raises:
          UserError: the directories were not made with one tokenizer.
        """
        first_name, first = next(iter(manifests.items()))
        for name, manifest in manifests.items():
            if manifest.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise UserError(
                    f"data.sources: {name} was made with tokenizer"
                    f" {manifest.tokenizer}, {first_name} with {first.tokenizer};"
                    " prepare them with one"
                )
        digest = hashlib.blake2b(digest_size=16)
        for name, manifest in manifests.items():
            digest.update(f"{name}\0{manifest.fingerprint}\0".encode())
        sources = {name: manifest.source for name, manifest in manifests.items()}
        fields = vars(first) | {
            "fingerprint": digest.hexdigest(),
            "source": {"kind": "mix", "sources": sources},
            "skipped": sum(manifest.skipped for manifest in manifests.values()),
            "splits": {
                split: sum_of_splits(
                    [manifest.splits[split] for manifest in manifests.values()]
                )
                for split in first.splits
            },
        }
        return cls(**fields, manifests=tuple(manifests.values()))

    @property
    def shards(self) -> list[Shard]:
        """The shards of all manifests."""
        return [shard for manifest in self.manifests for shard in manifest.shards]

    @property
    def byte_counts(self) -> list[int]:
        """The bytes of each split's text in each manifest."""
        return [count for manifest in self.manifests for count in manifest.byte_counts]


def shares_of(weights: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return weights divided by their sum."""
    return np.array(weights) / math.fsum(weights)


def samples_per_epoch(sources: Mapping[str, ShardLoader], stage: MixtureStage) -> int:
    """Return the samples of a stage until the first source is exhausted."""
    return int(
        min(
            source.windows / share
            for source, share in zip(
                sources.values(), shares_of(stage.weights), strict=True
            )
            # A source that the stage leaves out is never exhausted.
            if share
        )
    )


def sum_of_splits(splits: Sequence[Split]) -> Split:
    """Return the sum of splits; their shards are in many directories."""
    return Split(
        sum(s.documents for s in splits),
        sum(s.tokens for s in splits),
        sum(s.bytes for s in splits),
        tuple(shard for s in splits for shard in s.shards),
    )


class Mixture:
    """A `Loader` of one split of several prepared directories.

    Args:
      sources: loaders of the split by source name.
      manifest: the manifest of all sources.
      sampler: assigns samples to sources.
      shares: the shares of the sources in `documents`.
      batch_size: B.
      steps_per_epoch: full batches until the first source is exhausted; at least 1.
    """

    def __init__(
        self,
        sources: Mapping[str, ShardLoader],
        manifest: Manifest,
        sampler: Sampler,
        shares: Sequence[float],
        *,
        batch_size: int,
        steps_per_epoch: int,
    ) -> None:
        self.sources, self.manifest, self.sampler = dict(sources), manifest, sampler
        first_source = next(iter(sources.values()))
        self.context = first_source.context
        self.document_mask = first_source.document_mask
        self.batch_size, self.steps_per_epoch = batch_size, steps_per_epoch
        self.tokens = sum(source.tokens for source in sources.values())
        self._shares = list(shares)

    @classmethod
    def for_training(
        cls,
        sources: Mapping[str, ShardLoader],
        manifest: Manifest,
        stages: Sequence[MixtureStage],
        *,
        seed: int,
        sampler: ReplicaSampler | None = None,
    ) -> Self:
        """Return the training batches of stages.

        Args:
          sources: loaders of training by source name.
          manifest: the manifest of all sources.
          stages: the stages of `parse_stages`.
          seed: the seed of `StageSampler`.
          sampler: assigns samples to sources in equal shares; None: `stages` do.
        """
        batch_size = next(iter(sources.values())).batch_size
        shares = np.mean(
            [shares_of(stage.weights) for stage in stages], axis=0
        ).tolist()
        if sampler is not None:
            shares = [1 / len(sources)] * len(sources)
        samples = samples_per_epoch(sources, stages[-1])
        return cls(
            sources,
            manifest,
            sampler or StageSampler(stages, batch_size, seed),
            shares,
            batch_size=batch_size,
            steps_per_epoch=max(1, samples // batch_size),
        )

    @classmethod
    def for_validation(
        cls,
        sources: Mapping[str, ShardLoader],
        manifest: Manifest,
        stage: MixtureStage,
        *,
        batch_size: int,
        row_multiple: int = 1,
    ) -> Self:
        """Return the validation batches of a stage, the same for every seed.

        Args:
          sources: loaders of validation by source name.
          manifest: the manifest of all sources.
          stage: its shares hold at all steps.
          batch_size: rows of a training batch.
          row_multiple: see `validation_rows`.

        Raises:
          UserError: too little text for a batch.
        """
        # No source reads a window twice, which would weigh more in the loss.
        samples = samples_per_epoch(sources, stage)
        rows = validation_rows(
            samples, batch_size, row_multiple, "the validation of data=mix"
        )
        steps = max(1, samples // rows)
        return cls(
            sources,
            manifest,
            ValidationSampler(stage.weights, rows, steps),
            shares_of(stage.weights).tolist(),
            batch_size=rows,
            steps_per_epoch=steps,
        )

    def documents(self, tokens: int) -> list[npt.NDArray[np.int64]]:
        """See `Loader`. Sources are interleaved by their mean shares over stages."""
        documents = []
        for share, source in zip(self._shares, self.sources.values(), strict=True):
            if not share:
                continue
            position = 0
            for document in source.documents(round(tokens * share)):
                # A document begins at this place of the whole text, if all sources grow
                # by their shares.
                documents.append((position / share, document))
                position += len(document)
        documents.sort(key=operator.itemgetter(0))
        return [document for _, document in documents]

    def validation_bytes_per_token(self, steps: int) -> float:
        """See `Loader`. Sources count as often as the first batches read them."""
        means = [
            source.validation_bytes_per_token(steps) for source in self.sources.values()
        ]
        samples = self.sampler.samples_per_source(steps)
        return float(np.average(means, weights=samples))

    def batch(self, step: int) -> Batch:
        """See `Loader`."""
        source, index = self.sampler.assign(
            step * self.batch_size + np.arange(self.batch_size)
        )
        tokens = np.empty((self.batch_size, self.context + 1), np.int32)
        segments = np.empty_like(tokens) if self.document_mask else None
        for k, loader in enumerate(self.sources.values()):
            source_rows = np.flatnonzero(source == k)
            if len(source_rows):
                batch = loader.samples(index[source_rows])
                tokens[source_rows] = batch.tokens
                if segments is not None and batch.segments is not None:
                    segments[source_rows] = batch.segments
        return Batch(tokens, segments)

    def source_progress(self, counts: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return the share and the epochs of each source, of which `counts` were read.

        `share` is its part of all samples; `epochs` is the number of passes over it.
        """
        # Before the first step all counts are 0.
        total = max(1, sum(counts))
        return {
            name: {
                "share": float(count) / total,
                "epochs": float(count) / source.windows,
            }
            for (name, source), count in zip(self.sources.items(), counts, strict=True)
        }
