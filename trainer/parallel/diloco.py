"""DiLoCo: replicas train independently for a round, then exchange a narrow outer
gradient.

For every tensor a replica sends `outer weights - its weights + its earlier rounding
error`. It is divided by a power of two that all replicas share, and rounded
stochastically to a narrow format: one byte for a tensor's largest exponent, and in FP8
one byte an element. An all-to-all brings each owner its piece of every replica's
tensor. The owner adds the pieces in FP32 in the order of the replicas, and hands on the
mean, narrow again. Rounding errors are fed back: each replica adds those of its first
rounding to its next outer gradient, and each owner those of the mean. So nothing is
lost in the end.

The bits do not depend on which device has which replica: random bits count replicas and
pieces.

Legend: K replicas, R of them on a device, N elements of all tensors, m of a piece of
them.

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
from trainer.parallel.reduction import as_bits, from_bits

# Not OCP's E2M1: its code 7 is 6. Here it is NaN, so that an outer gradient that is
# not finite arrives as such.
FP4_WITH_NAN = FloatFormat(2, 1, infinities=False)
FORMATS = {
    "fp32": FP32,
    "bf16": FloatFormat.parse("bf16"),
    "fp16": FP16,
    "fp8": E4M3,
    "fp8_e5m2": E5M2,
    "fp4": FP4_WITH_NAN,
}
# Formats of the mean. In four bits its rounding error would exceed a replica's part.
MEAN_FORMATS = FORMATS | {"fp4": E4M3}
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, np.nan], np.float32)  # by code
# Constants that keep streams of random bits apart. Replica k trains with the seed ^ k *
# REPLICA_STREAM (mod 2^32): no other may be that of a number of a replica.
REPLICA_STREAM, SENT_STREAM = 0x9E3779B1, 0xB5297A4D
PIECE_STREAM, DRAW_STREAM = 0x85EBCA77, 0x27D4EB2F
# Replica number * MAX_ARRAYS + array number is one counter for both.
MAX_ARRAYS = 2**16


class DiLoCoSettings(NamedTuple):
    """Settings of the replicas and of the outer optimizer.

    Attributes:
      replicas: K.
      steps: between two exchanges of a fragment.
      format: of what is sent, a key of FORMATS.
      lr, momentum: of the outer optimizer, SGD with Nesterov momentum; 1 and 0 average
        the weights.
      feedback: whether rounding errors are sent later.
      fragments: parts of the parameters that are exchanged one after another in a
        round.
      participants: replicas that train in a round, drawn for each round.
      last: the step after which all fragments are exchanged.
    """

    replicas: int
    steps: int
    format: str
    lr: float
    momentum: float
    feedback: bool
    fragments: int
    participants: int
    last: int

    def due(self, step: int) -> list[int]:
        """Return the fragments that are exchanged after `step` steps; all after the
        last step.
        """
        if step == self.last:
            return list(range(self.fragments))
        places = [
            fragment * self.steps // self.fragments
            for fragment in range(self.fragments)
        ]
        return [
            fragment
            for fragment, place in enumerate(places)
            if step % self.steps == place
        ]

    def participating(self, seed: Any, step: Any) -> jax.Array:
        """Return which replicas train in the step after `step` steps, booleans [K].

        They are the same for all steps of a round.
        """
        if self.participants == self.replicas:
            return jnp.ones(self.replicas, bool)
        words = counter_words(
            seed, step // self.steps + DRAW_STREAM, jnp.arange(self.replicas)
        )[:, 0]
        return jnp.argsort(jnp.argsort(words)) < self.participants


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Partition arrays of these sizes into `count` groups of about equal sums, the
    largest first.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = sums.index(min(sums))
        groups[least].append(i)
        sums[least] += sizes[i]
    return [sorted(group) for group in groups]


def shared_scales(amax: jax.Array, fmt: FloatFormat, axes: Sequence[str]) -> jax.Array:
    """Return the power of two that puts each tensor's amax into the upper octave of a
    format, FP32 [tensors].

    A byte each is sent: the exponent. The scale is 2^-126 for zeros, and 1 for values
    that are not finite, which stay so.
    """
    top = min(fmt.max, FP16.max)  # BF16 data gets the place of FP16 data, not 2^127
    power = jnp.where(jnp.isfinite(amax), pow2_floor(amax * (2 / top)), jnp.inf)
    exponents = lax.pmax(
        (lax.bitcast_convert_type(power, jnp.uint32) >> 23).astype(jnp.uint8),
        tuple(axes),
    )
    bits = exponents.astype(jnp.uint32) << 23
    return jnp.where(
        exponents == 255, jnp.float32(1), lax.bitcast_convert_type(bits, jnp.float32)
    )


def encode(x: jax.Array, fmt: FloatFormat, bits: jax.Array | None) -> jax.Array:
    """Round FP32 [..., m] stochastically and return it as it is sent; m is even.

    Bytes, words, or two numbers of four bits a byte. `bits`: random bits; None: FP32 is
    sent.
    """
    if bits is None:
        return x
    rounded = fmt.stochastic_round(x, bits)
    if fmt.dtype is not None:
        return as_bits(rounded)
    magnitude = jnp.abs(rounded)
    code = sum((magnitude >= number).astype(jnp.uint8) for number in FP4_VALUES[1:7])
    code = jnp.where(jnp.isnan(rounded), jnp.uint8(7), code) | (
        jnp.signbit(rounded).astype(jnp.uint8) << 3
    )
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode(sent: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Return the numbers that were sent, FP32 [..., m]."""
    if fmt is FP32:
        return sent
    if fmt.dtype is not None:
        return from_bits(sent, fmt.dtype).astype(jnp.float32)
    code = jnp.stack([sent & 15, sent >> 4], axis=-1).reshape(*sent.shape[:-1], -1)
    magnitude = jnp.asarray(FP4_VALUES)[code & 7]
    return jnp.where(code >= 8, -magnitude, magnitude)


class ExchangeResult(NamedTuple):
    """The result of an exchange on a device, by tensor.

    Attributes:
      means: FP32, the same on every device.
      residuals: FP32 [R, ...]: the rounding error, or all of what was not sent.
      scales: FP32 [tensors], what the tensors were divided by.
    """

    means: list[jax.Array]
    residuals: list[jax.Array]
    scales: jax.Array


def exchange(
    tensors: Sequence[jax.Array],
    diloco: DiLoCoSettings,
    seed: jax.Array,
    step: jax.Array,
    numbers_in_model: Sequence[int],
    axes: Sequence[str] = (REPLICA, *STEP_AXES),
) -> ExchangeResult:
    """Return the mean over the participating replicas; inside `shard_map` over `axes`.

    Args:
      tensors: FP32 [R, ...] of this device's replicas.
      diloco: who takes part, and the format.
      seed: of the random bits.
      step: steps taken. The round that ends here is that of `step - 1`. Random bits
        differ by step, replica, piece and tensor.
      numbers_in_model: the number of each tensor among all trained ones, so that
        fragments have different bits.
      axes: of the mesh: all that hold parts of a tensor, REPLICA among them.
    """
    fmt, replicas = FORMATS[diloco.format], diloco.replicas
    here = replicas // lax.axis_size(REPLICA)
    numbers = lax.axis_index(REPLICA) * here + jnp.arange(here, dtype=jnp.uint32)
    all_participating = diloco.participating(seed, step - 1)
    participating = lax.dynamic_slice_in_dim(
        all_participating, lax.axis_index(REPLICA) * here, here
    )

    def only_participating(x: jax.Array) -> jax.Array:
        return jnp.where(participating.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    if fmt is FP32:
        scales = jnp.ones(len(tensors), jnp.float32)
    else:
        amax = jnp.stack(
            [jnp.max(jnp.abs(only_participating(x)), initial=0.0) for x in tensors]
        )
        scales = shared_scales(amax, fmt, axes)

    def narrow(tensor: int, x: jax.Array) -> jax.Array:
        flat = only_participating(x).reshape(here, -1) * (1 / scales[tensor])
        flat = jnp.pad(
            flat, ((0, 0), (0, flat.shape[1] % 2 if fmt is FP4_WITH_NAN else 0))
        )
        if fmt is FP32:
            return flat
        words = counter_words(
            seed ^ jnp.uint32(SENT_STREAM),
            step,
            numbers * MAX_ARRAYS + numbers_in_model[tensor],
        )
        return encode(flat, fmt, bits_of_words(flat.shape, words))

    sent = [narrow(i, x) for i, x in enumerate(tensors)]
    mean_flat, lost = mean_of_pieces(
        jnp.concatenate(sent, axis=1),
        diloco,
        all_participating,
        seed,
        step,
        numbers_in_model[0],
    )
    means, residuals, start = list[jax.Array](), list[jax.Array](), 0
    for i, (x, codes) in enumerate(zip(tensors, sent, strict=True)):
        sent_values = decode(codes, fmt)
        part = slice(start, start + math.prod(x.shape[1:]))
        start += sent_values.shape[1]
        means.append(mean_flat[part].reshape(x.shape[1:]) * scales[i])
        if diloco.feedback:
            error = (lost[:, part] - sent_values[:, : part.stop - part.start]).reshape(
                x.shape
            )
            residuals.append(x + error * scales[i])
    return ExchangeResult(means, residuals, scales)


def mean_of_pieces(
    sent: jax.Array,
    diloco: DiLoCoSettings,
    participating: jax.Array,
    seed: jax.Array,
    step: jax.Array,
    first: int,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of what was sent, FP32 [N], and its rounding error, FP32 [R, N].

    The owner of replica j adds up piece j of K, and hands it on. The rounding error of
    the piece is given to that replica, times the number of participants: so the next
    mean contains it once. All is in the units of the sent data, [R, N].

    Args:
      sent: data of this device's replicas [R, N].
      diloco: who takes part, and the format.
      participating: which replicas take part [K].
      seed: of the random bits.
      step: of the random bits.
      first: number of the fragment's first tensor, for the random bits.
    """
    fmt, mean_fmt = FORMATS[diloco.format], MEAN_FORMATS[diloco.format]
    here = sent.shape[0]
    sent = jnp.pad(sent, ((0, 0), (0, -sent.shape[1] % diloco.replicas))).reshape(
        here, diloco.replicas, -1
    )
    # [K, R, m]
    received = lax.all_to_all(sent, REPLICA, split_axis=1, concat_axis=0, tiled=True)
    summands = [
        jnp.where(participating[k], decode(received[k], fmt), 0)
        for k in range(diloco.replicas)
    ]
    mean = functools.reduce(jnp.add, summands) * jnp.float32(1 / diloco.participants)
    numbers = lax.axis_index(REPLICA) * here + jnp.arange(here)
    words = counter_words(
        seed ^ jnp.uint32(PIECE_STREAM),
        step,
        numbers.astype(jnp.uint32) * MAX_ARRAYS + first,
    )
    factor = pow2_floor(mean_fmt.max / fmt.max)
    piece = encode(
        mean * factor,
        mean_fmt,
        None if mean_fmt is FP32 else bits_of_words(mean.shape, words),
    )
    pieces = lax.all_gather(piece, REPLICA, axis=0, tiled=True)
    lost = (mean - decode(piece, mean_fmt) * (1 / factor)) * diloco.participants
    width = lost.shape[1]
    lost_by_replica = jnp.zeros((here, diloco.replicas, width), jnp.float32)
    lost_by_replica = (
        lost_by_replica.at[jnp.arange(here), numbers].set(lost).reshape(here, -1)
    )
    return (decode(pieces, mean_fmt) * (1 / factor)).reshape(-1), lost_by_replica


def bits_per_number(fmt: FloatFormat) -> int:
    """Return the bits of a number in a format."""
    return 1 + fmt.exponent_bits + fmt.mantissa_bits


def bytes_of_exchange(elements: int, tensors: int, diloco: DiLoCoSettings) -> float:
    """Return the bytes that each of K replicas sends in an exchange.

    Args:
      elements: of all tensors.
      tensors: number of tensors.
      diloco: the format.
    """
    bits = bits_per_number(FORMATS[diloco.format]) + bits_per_number(
        MEAN_FORMATS[diloco.format]
    )
    scales = 0 if FORMATS[diloco.format] is FP32 else 2 * tensors
    return (diloco.replicas - 1) / diloco.replicas * (elements * bits / 8 + scales)
