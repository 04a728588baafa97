"""DiLoCo: replicas train independently for a round, then exchange a narrow outer
gradient.

For every tensor a replica sends `outer weights - its weights + its earlier rounding
error`. The tensor is divided by a power of two that all replicas share, and rounded
stochastically to a narrow format. FP8 sends one byte an element, and one byte a tensor
for the exponent of the scale.

Each replica owns one piece of every tensor. By an all-to-all the owner receives its
piece from all replicas, adds the pieces in FP32 in the order of the replicas, and
all-gathers the mean, rounded again. Error feedback: a replica adds the error of its own
rounding to its next outer gradient, and an owner also that of the mean. So rounding
errors do not accumulate.

Random bits depend on the indices of replicas and pieces, so results do not depend on
which device has which replica.

Legend: K replicas, R of them on a device, N elements of all tensors, m of a piece.

References: "DiLoCo", https://arxiv.org/abs/2311.08105; "Streaming DiLoCo",
https://arxiv.org/abs/2501.18512; "Towards federated learning with FP8 communication",
https://arxiv.org/abs/2407.02610.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scalify_core.numerics.formats import (
    E4M3,
    E5M2,
    FP16,
    FP32,
    FloatFormat,
    bits_of_words,
    counter_words,
    pow2_floor,
)
from trainer.parallel.mesh import REPLICA, STEP_AXES
from trainer.parallel.reduction import as_bits, from_bits, top_binade_scale

# Not OCP's E2M1, where code 7 stands for 6.0. Here code 7 is NaN, so that a nonfinite
# outer gradient arrives as NaN.
FP4_WITH_NAN = FloatFormat(2, 1, infinities=False)
FORMATS = {
    "fp32": FP32,
    "bf16": FloatFormat.parse("bf16"),
    "fp16": FP16,
    "fp8": E4M3,
    "fp8_e5m2": E5M2,
    "fp4": FP4_WITH_NAN,
}
# Formats of the mean. In FP4 its rounding error would exceed the contribution of one
# replica.
MEAN_FORMATS = FORMATS | {"fp4": E4M3}
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, np.nan], np.float32)  # by code
# Constants that keep streams of random bits apart. Replica k trains with the seed
# `seed ^ (k * REPLICA_STREAM mod 2^32)`: no other constant may equal such a product.
REPLICA_STREAM, SENT_STREAM = 0x9E3779B1, 0xB5297A4D
PIECE_STREAM, PARTICIPANT_STREAM = 0x85EBCA77, 0x27D4EB2F
# More than the arrays of any model: the counters of random bits, `replica index *
# MAX_ARRAYS + tensor index`, are different for all tensors of all replicas.
MAX_ARRAYS = 2**16


class DiLoCoSettings(NamedTuple):
    """Settings of the replicas and of the outer optimizer.

    Attributes:
      num_replicas: K.
      sync_every: number of steps between two syncs of a fragment.
      format: format of sent data, a key of FORMATS.
      lr, momentum: settings of the outer optimizer, SGD with Nesterov momentum. With 1
        and 0 the outer weights become the mean of the replicas' weights.
      feedback: whether rounding errors are added to the next outer gradient.
      fragments: number of parts of the parameters, synced one after another in a
        round.
      participants: number of replicas that train in a round, drawn for each round.
      last_step: the last step, after which all fragments are synced.
    """

    num_replicas: int
    sync_every: int
    format: str
    lr: float
    momentum: float
    feedback: bool
    fragments: int
    participants: int
    last_step: int

    def due(self, step: int) -> list[int]:
        """Return the fragments that are synced after `step` steps; all after the
        last step.
        """
        if step == self.last_step:
            return list(range(self.fragments))
        return [
            fragment
            for fragment in range(self.fragments)
            # Evenly spaced, which spreads the traffic of the syncs over the round.
            if step % self.sync_every == fragment * self.sync_every // self.fragments
        ]

    def participating(self, seed: Any, step: Any) -> jax.Array:
        """Return which replicas train in the step after `step` steps, booleans [K].

        They are the same for all steps of a round.
        """
        if self.participants == self.num_replicas:
            return jnp.ones(self.num_replicas, bool)
        words = counter_words(
            seed,
            step // self.sync_every + PARTICIPANT_STREAM,
            jnp.arange(self.num_replicas),
        )[:, 0]
        # Ranks, not a threshold on the words: exactly `participants` are drawn, also if
        # two words are equal.
        rank = jnp.argsort(jnp.argsort(words))
        return rank < self.participants


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Partition arrays of these sizes into `count` groups of about equal sums.

    Each array, the largest first, goes to the group with the smallest sum.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    # The partition follows from sizes alone, so a resumed run forms the same groups and
    # no checkpoint has to store them.
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        smallest = sums.index(min(sums))
        groups[smallest].append(i)
        sums[smallest] += sizes[i]
    return [sorted(group) for group in groups]


def common_scales(tensors: Sequence[jax.Array], fmt: FloatFormat) -> jax.Array:
    """Return the power of two that puts each tensor's amax over all devices into the
    top binade of a format, FP32 [tensors].

    Devices send one byte a tensor, the exponent. The scale is 2^-126 for zeros, and 1
    for nonfinite values, which are kept. It is 1 for FP32 data.
    """
    if fmt is FP32:
        return jnp.ones(len(tensors), jnp.float32)
    # `initial`: an array without elements has no maximum, and JAX raises an error.
    amax = jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in tensors])
    # The exponent of infinity is 255, the largest: it wins the maximum, so a NaN or an
    # infinity on one device is known on all of them.
    scales = jnp.where(jnp.isfinite(amax), top_binade_scale(amax, fmt), jnp.inf)
    exponents = lax.pmax(
        (lax.bitcast_convert_type(scales, jnp.uint32) >> 23).astype(jnp.uint8),
        (REPLICA, *STEP_AXES),
    )
    bits = exponents.astype(jnp.uint32) << 23
    return jnp.where(
        exponents == 255, jnp.float32(1), lax.bitcast_convert_type(bits, jnp.float32)
    )


def encode(x: jax.Array, fmt: FloatFormat, words: jax.Array) -> jax.Array:
    """Round FP32 [..., m] stochastically, and return the data to send.

    The result has integers of the format's width, or bytes of two FP4 numbers each, for
    which m must be even. FP32 is returned as it is. `words` are counter words of the
    random bits.
    """
    if fmt is FP32:
        return x
    rounded = fmt.stochastic_round(x, bits_of_words(x.shape, words))
    if fmt.dtype is not None:
        return as_bits(rounded)
    magnitude = jnp.abs(rounded)
    # A comparison with NaN is false, so NaN gets the code 0 here; the next statement
    # sets it to 7.
    code = sum((magnitude >= number).astype(jnp.uint8) for number in FP4_VALUES[1:7])
    code = jnp.where(jnp.isnan(rounded), jnp.uint8(7), code) | (
        jnp.signbit(rounded).astype(jnp.uint8) << 3
    )
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode(sent: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the numbers of encoded data, FP32 [..., m]."""
    if fmt is FP32:
        return sent
    if fmt.dtype is not None:
        return from_bits(sent, fmt.dtype).astype(jnp.float32)
    # The low half of a byte is the first number, as `encode` packs them.
    code = jnp.stack([sent & 15, sent >> 4], axis=-1).reshape(*sent.shape[:-1], -1)
    magnitude = jnp.asarray(FP4_VALUES)[code & 7]
    return jnp.where(code >= 8, -magnitude, magnitude)


class SyncResult(NamedTuple):
    """The result of a sync on a device, by tensor.

    Attributes:
      means: FP32, the same on every device.
      residuals: FP32 [R, ...]: the rounding error if the replica participated, else its
        whole outer gradient; None without `feedback`.
      scales: FP32 [tensors], the divisors of the tensors.
    """

    means: list[jax.Array]
    residuals: list[jax.Array | None]
    scales: jax.Array


def sync(
    tensors: Sequence[jax.Array],
    settings: DiLoCoSettings,
    seed: jax.Array,
    step: jax.Array,
    tensor_indices: Sequence[int],
) -> SyncResult:
    """Return the mean over the participating replicas; inside `shard_map` over all mesh
    axes.

    Args:
      tensors: FP32 [R, ...] of this device's replicas.
      settings: the participants and the format.
      seed: seed of the random bits.
      step: number of steps taken. The participants are those of the last step taken,
        whose index is `step - 1`. Random bits differ by step, replica, piece and
        tensor.
      tensor_indices: the index of each tensor among all trained tensors, so that
        fragments have different random bits.
    """
    fmt = FORMATS[settings.format]
    local_replicas = settings.num_replicas // lax.axis_size(REPLICA)
    first_replica = lax.axis_index(REPLICA) * local_replicas
    replica_indices = first_replica + jnp.arange(local_replicas, dtype=jnp.uint32)
    all_participating = settings.participating(seed, step - 1)
    participating = lax.dynamic_slice_in_dim(
        all_participating, first_replica, local_replicas
    )

    def only_participating(x: jax.Array) -> jax.Array:
        # Not a product with 0 or 1: a NaN of a replica that rests would pass through
        # it.
        return jnp.where(jnp.expand_dims(participating, range(1, x.ndim)), x, 0)

    def random_words(stream: int, tensor_index: int) -> jax.Array:
        counters = replica_indices * MAX_ARRAYS + tensor_index
        return counter_words(seed ^ jnp.uint32(stream), step, counters)

    contributions = [only_participating(x) for x in tensors]
    scales = common_scales(contributions, fmt)

    def encode_tensor(tensor: int, x: jax.Array) -> jax.Array:
        # The reciprocal of a power of two is exact, so this multiplication is a
        # division.
        flat = x.reshape(local_replicas, -1) * (1 / scales[tensor])
        if fmt is FP4_WITH_NAN:  # two numbers share a byte
            flat = jnp.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))
        return encode(flat, fmt, random_words(SENT_STREAM, tensor_indices[tensor]))

    # All tensors go in one all-to-all and one all-gather: small tensors would each pay
    # the latency of a collective.
    sent = [encode_tensor(i, x) for i, x in enumerate(contributions)]
    mean_flat, mean_error = mean_of_pieces(
        jnp.concatenate(sent, axis=1),
        settings,
        all_participating,
        # A piece may span tensors, so its random bits take one index. The fragment's
        # first tensor tells it from fragments that are synced after the same step.
        random_words(PIECE_STREAM, tensor_indices[0]),
    )
    means: list[jax.Array] = []
    residuals: list[jax.Array | None] = []
    start = 0
    for x, codes, scale in zip(tensors, sent, scales, strict=True):
        sent_values = decode(codes, fmt)
        size = math.prod(x.shape[1:])
        columns = slice(start, start + size)
        # The width of the decoded data, not `size`: FP4 has a column of padding behind
        # an odd number of elements.
        start += sent_values.shape[1]
        means.append(mean_flat[columns].reshape(x.shape[1:]) * scale)
        residual = None
        if settings.feedback:
            # The sum of the replica's own rounding error, `x - sent_values * scale`,
            # and the mean's error, which is nonzero only in this replica's piece.
            correction = mean_error[:, columns] - sent_values[:, :size]
            residual = x + correction.reshape(x.shape) * scale
        residuals.append(residual)
    return SyncResult(means, residuals, scales)


def mean_of_pieces(
    sent: jax.Array,
    settings: DiLoCoSettings,
    participating: jax.Array,
    words: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of the sent data, FP32 [N], and its rounding error, FP32 [R, N].

    The device of replica j adds up piece j of K and all-gathers its mean. The rounding
    error of that piece, times the number of participants, goes to the residual of
    replica j, so that the next mean contains it once. All values are in units of the
    scaled data.

    Args:
      sent: encoded data of this device's replicas [R, N].
      settings: the participants and the format.
      participating: which replicas participate, booleans [K].
      words: counter words of the random bits that round this device's pieces.
    """
    fmt = FORMATS[settings.format]
    mean_fmt = MEAN_FORMATS[settings.format]
    local_replicas = sent.shape[0]
    # Every replica owns a piece of the same size, so zeros fill up the last one.
    padded = jnp.pad(sent, ((0, 0), (0, -sent.shape[1] % settings.num_replicas)))
    sent_RxKxm = padded.reshape(local_replicas, settings.num_replicas, -1)
    received_KxRxm = lax.all_to_all(
        sent_RxKxm, REPLICA, split_axis=1, concat_axis=0, tiled=True
    )
    summands = [
        jnp.where(participating[k], decode(received_KxRxm[k], fmt), 0)
        for k in range(settings.num_replicas)
    ]
    # Added in the order of the replicas. A compiler may order a sum over an axis
    # otherwise, and the result would depend on where replicas lie.
    mean = functools.reduce(jnp.add, summands) * jnp.float32(1 / settings.participants)
    local_indices = jnp.arange(local_replicas)
    replica_indices = lax.axis_index(REPLICA) * local_replicas + local_indices
    # The mean of FP4 data is rounded to E4M3: move it to the top of that range.
    mean_scale = pow2_floor(mean_fmt.max / fmt.max)
    piece = encode(mean * mean_scale, mean_fmt, words)
    pieces = lax.all_gather(piece, REPLICA, axis=0, tiled=True)
    piece_error = mean - decode(piece, mean_fmt) * (1 / mean_scale)
    mean_error = jnp.zeros(
        (local_replicas, settings.num_replicas, mean.shape[1]), jnp.float32
    )
    mean_error = mean_error.at[local_indices, replica_indices].set(
        piece_error * settings.participants
    )
    all_means = decode(pieces, mean_fmt) * (1 / mean_scale)
    return all_means.reshape(-1), mean_error.reshape(local_replicas, -1)


def bytes_of_sync(elements: int, tensors: int, settings: DiLoCoSettings) -> float:
    """Return the bytes that each of K replicas sends in a sync.

    Args:
      elements: number of elements of all tensors.
      tensors: number of tensors.
      settings: the replicas and the format.
    """
    fmt = FORMATS[settings.format]
    formats = fmt, MEAN_FORMATS[settings.format]
    bits = sum(1 + f.exponent_bits + f.mantissa_bits for f in formats)
    # An all-reduce of one byte a tensor is a reduce-scatter and an all-gather.
    scales = 0 if fmt is FP32 else 2 * tensors
    replicas = settings.num_replicas
    # A replica keeps its share of each exchange: its piece is summed where it lies.
    return (replicas - 1) / replicas * (elements * bits / 8 + scales)
