"""Several prepared texts in given shares, in stages: which text a sample is of is a
pure function of seed and step.

The samples of a stage come in blocks. A block holds each source in its share, to within
one sample over all blocks so far, in an order that a keyed permutation gives; so shares
hold in any thousand batches, not only on average. Each source counts its own samples,
and goes through its own windows as if it were alone (`Loader`).

Legend: K sources, B sequences of the whole batch, b those of this process.
"""

import dataclasses
import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trainer.data.loader import Batch, Loader
from trainer.data.permutation import permute
from trainer.data.shards import Manifest, Split
from trainer.errors import UserError

# samples; more where a share is so small that a block would hold fewer than two of it
BLOCK = 256
SMALLEST = 1e-4  # share

Ints = npt.NDArray[np.int64]


class MixtureStage(NamedTuple):
    """From a step on, the weights of the sources; their sum does not matter."""

    step: int
    weights: tuple[float, ...]


def stages_of(
    weights: Sequence[float], later: Sequence[Sequence[float]], names: Sequence[str]
) -> tuple[MixtureStage, ...]:
    """The stages of a configuration.

    Args:
      weights: from step 0 on.
      later: of each further stage its first step, and its weights.
      names: of the sources.

    Raises:
      UserError: another number of weights than of sources, a weight that is not
        positive (from the start; later stages may leave a source out), or steps that do
        not rise.
    """
    found = [
        MixtureStage(0, tuple(weights)),
        *(MixtureStage(int(row[0]), tuple(row[1:])) for row in later if row),
    ]
    if len(found) <= len(later) or any(row[0] != int(row[0]) for row in later):
        raise UserError(
            "data.stages: expected [[STEP,WEIGHT,...],...], of each a whole number of"
            " steps first"
        )
    count = f"{len(names)} sources: {', '.join(names)}"
    for before, (step, of) in zip(
        [MixtureStage(-1, ()), *found[:-1]], found, strict=True
    ):
        where = f"data.stages from step {step} on" if step else "data.weights"
        if len(of) != len(names):
            raise UserError(
                f"{where} has {len(of)} weights; expected one for each of {count}"
            )
        if step <= before.step:
            raise UserError(
                f"data.stages: step {step} comes after {before.step}; give rising steps"
                " above 0"
            )
        bad = [
            name
            for name, weight in zip(names, of, strict=True)
            if not (math.isfinite(weight) and weight >= 0)
        ]
        bad += [
            name
            for name, weight in zip(names, of, strict=True)
            if weight == 0 and step == 0
        ]
        if bad or not sum(of):
            raise UserError(
                f"{where}: the weight of {', '.join(bad) or 'any source'} is not above"
                " 0; leave it out"
            )
        small = [
            name
            for name, weight in zip(names, of, strict=True)
            if 0 < weight < SMALLEST * sum(of)
        ]
        if small:
            raise UserError(
                f"{where}: the share of {small[0]} is below {SMALLEST:.2%}; give it"
                " more, or leave it out"
            )
    return tuple(found)


class Shares:
    """Which source each sample is of, and which of that source's samples it is.

    Args:
      stages: the first from step 0 on.
      batch_size: B.
      seed: of the order inside blocks.
    """

    def __init__(
        self, stages: Sequence[MixtureStage], batch_size: int, seed: int
    ) -> None:
        self._seed, self._batch_size = seed, batch_size
        self._starts = np.array([stage.step * batch_size for stage in stages], np.int64)
        self._bounds = [
            np.cumsum([0.0, *(w / math.fsum(stage.weights) for w in stage.weights)])
            for stage in stages
        ]
        for bounds in self._bounds:
            bounds[-1] = 1.0
        smallest = [min(filter(None, np.diff(bounds))) for bounds in self._bounds]
        self._blocks = [max(BLOCK, math.ceil(2 / share)) for share in smallest]
        # Of each source, the samples that earlier stages took: of whole blocks, the
        # last of which may be cut short.
        taken = [np.zeros(len(stages[0].weights), np.int64)]
        for i, (start, end) in enumerate(itertools.pairwise(self._starts)):
            blocks = -(-(end - start) // self._blocks[i])
            taken.append(taken[-1] + np.diff(self._before(i, blocks * self._blocks[i])))
        self._taken = taken

    def _before(self, stage: int, samples: npt.ArrayLike) -> Ints:
        """Of so many samples of a stage, how many are of sources before each one and of
        all, [..., K + 1].
        """
        return np.floor(
            np.asarray(samples, np.float64)[..., None] * self._bounds[stage] + 0.5
        ).astype(np.int64)

    def place(self, sample: Ints) -> tuple[Ints, Ints]:
        """Source and number within it of samples [b] of the run."""
        stage = np.searchsorted(self._starts, sample, side="right") - 1
        source, index = np.empty_like(sample), np.empty_like(sample)
        for i in np.unique(stage):
            of = stage == i
            source[of], index[of] = self._place(int(i), sample[of] - self._starts[i])
        return source, index

    def _place(self, stage: int, sample: Ints) -> tuple[Ints, Ints]:
        size = self._blocks[stage]
        block, position = np.divmod(sample, size)
        first = self._before(stage, block * size)  # [b, K + 1]
        inside = self._before(stage, (block + 1) * size) - first
        slot = permute(self._seed + stage, block, position, size)
        source = np.sum(slot[:, None] >= inside[:, 1:], axis=1)
        rows = np.arange(len(sample))
        before = np.diff(first, axis=1)[rows, source]
        return source, self._taken[stage][source] + before + slot - inside[rows, source]

    def count(self, step: int) -> Ints:
        """How many samples of each source the first `step` steps take, [K]."""
        counts = np.zeros(len(self._taken[0]), np.int64)
        end = step * self._batch_size
        for i, (start, after) in enumerate(itertools.pairwise([*self._starts, end])):
            samples = min(int(after), end) - int(start)
            if samples > 0:
                whole = samples // self._blocks[i] * self._blocks[i]
                rest, _ = self._place(i, np.arange(whole, samples, dtype=np.int64))
                counts += np.diff(self._before(i, whole)) + np.bincount(
                    rest, minlength=len(counts)
                )
        return counts


class OfReplicas:
    """The same where each replica reads a source of its own: of K equal parts of a
    micro-batch, part k is of source k.

    Args:
      replicas: K.
      batch_size: B.
      accum: micro-batches of a batch, one after the other in it.
    """

    def __init__(self, replicas: int, batch_size: int, accum: int) -> None:
        self._replicas, self._batch_size = replicas, batch_size
        self._micro, self._rows = batch_size // accum, batch_size // accum // replicas

    def place(self, sample: Ints) -> tuple[Ints, Ints]:
        """Source and number within it of samples [b] of the run."""
        micro, row = np.divmod(sample, self._micro)
        source, place = np.divmod(row, self._rows)
        return source, micro * self._rows + place

    def count(self, step: int) -> Ints:
        """How many samples of each source the first `step` steps take, [K]."""
        return np.full(
            self._replicas, step * self._batch_size // self._replicas, np.int64
        )


@dataclass(frozen=True)
class MixedManifest(Manifest):
    """Of several prepared directories, `parts`, as if they were one; `directory` is
    that of the first.
    """

    parts: tuple[Manifest, ...]

    @classmethod
    def of(cls, parts: Mapping[str, Manifest]) -> Self:
        """Of directories by the names of their sources. UserError where they were not
        made with one tokenizer.
        """
        name, first = next(iter(parts.items()))
        for other, part in parts.items():
            if part.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise UserError(
                    f"data.sources: {other} was made with tokenizer {part.tokenizer},"
                    f" {name} with {first.tokenizer}; prepare them with one"
                )
        digest = hashlib.blake2b(digest_size=16)
        for name, part in parts.items():
            digest.update(f"{name}\0{part.fingerprint}\0".encode())
        fields = {
            field.name: getattr(first, field.name)
            for field in dataclasses.fields(Manifest)
        }
        return cls(
            **fields
            | {
                "fingerprint": digest.hexdigest(),
                "source": {
                    "kind": "mix",
                    "sources": {name: part.source for name, part in parts.items()},
                },
                "skipped": sum(part.skipped for part in parts.values()),
                "splits": {
                    split: total([part.splits[split] for part in parts.values()])
                    for split in first.splits
                },
            },
            parts=tuple(parts.values()),
        )

    def open(self, split: str) -> list[npt.NDArray[np.unsignedinteger]]:
        """The shards of all, those of one after those of another."""
        return [shard for part in self.parts for shard in part.open(split)]


def total(splits: Sequence[Split]) -> Split:
    """What they hold together; their shards are not named, since each is in a directory
    of its own.
    """
    return Split(
        sum(s.documents for s in splits),
        sum(s.tokens for s in splits),
        sum(s.bytes for s in splits),
        (),
    )


class Mixture(Loader):
    """Batches of one split of several prepared directories.

    Args:
      parts: loaders of the split by the names of their sources.
      manifest: of all.
      stages: of `stages_of`.
      seed: of the order of the sources.
      shares: which source each sample is of; None: `Shares` of the stages.
    """

    def __init__(
        self,
        parts: Mapping[str, Loader],
        manifest: Manifest,
        split: str,
        stages: Sequence[MixtureStage],
        seed: int,
        shares: OfReplicas | None = None,
    ) -> None:
        self.parts = dict(parts)
        first = next(iter(parts.values()))
        self.manifest, self.context, self.batch_size = (
            manifest,
            first.context,
            first.batch_size,
        )
        self.document_mask = first.document_mask
        self.tokens = manifest.tokens(split)
        self.windows = sum(part.windows for part in parts.values())
        self.shares = shares or Shares(stages, self.batch_size, seed)
        last = np.array(stages[-1].weights) / math.fsum(stages[-1].weights)
        bytes_of = [
            part.manifest.bytes(split) / part.manifest.tokens(split)
            for part in parts.values()
        ]
        self._bytes_per_token = float(last @ np.array(bytes_of))
        every = [np.array(stage.weights) / math.fsum(stage.weights) for stage in stages]
        self._shares = (
            [1 / len(parts)] * len(parts) if shares else np.mean(every, axis=0).tolist()
        )
        sizes = [
            part.windows / share
            for part, share in zip(parts.values(), last, strict=True)
            if share
        ]
        self._whole = max(1, int(min(sizes)) // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches until one of the sources comes round; at least 1."""
        return self._whole

    def bytes_per_token(self, split: str) -> float:
        """See Loader: of the tokens that the last stage takes of each source, not of
        all that they have.
        """
        return self._bytes_per_token

    def documents(self, split: str, tokens: int) -> list[npt.NDArray[np.int64]]:
        """See Loader: of every source its share, on average over the stages, in turns
        as the shares are.
        """
        found = []
        for share, part in zip(self._shares, self.parts.values(), strict=True):
            before = 0
            for document in (
                part.documents(split, round(tokens * share)) if share else ()
            ):
                found.append((before / share, document))
                before += len(document)
        return [document for _, document in sorted(found, key=operator.itemgetter(0))]

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """See Loader."""
        sample = (
            step * self.batch_size + np.arange(self.batch_size)[rows or slice(None)]
        )
        source, index = self.shares.place(sample)
        tokens = np.empty((len(sample), self.context + 1), np.int32)
        segments = np.empty_like(tokens) if self.document_mask else None
        for k, part in enumerate(self.parts.values()):
            of = np.flatnonzero(source == k)
            if len(of):
                found = part.samples(index[of])
                tokens[of] = found.tokens
                if segments is not None and found.segments is not None:
                    segments[of] = found.segments
        return Batch(tokens, segments)

    def seen(self, step: int) -> dict[str, dict[str, float]]:
        """Of each source, `share` of the samples of the first `step` steps, and
        `epochs` that they are of it.
        """
        counts = self.shares.count(step)
        total = max(1, int(counts.sum()))
        return {
            name: {"share": float(count) / total, "epochs": float(count) / part.windows}
            for (name, part), count in zip(self.parts.items(), counts, strict=True)
        }
