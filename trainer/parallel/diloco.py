"""DiLoCo: replicas train apart for a round, then send each other a narrow outer
gradient.

Of every tensor a replica sends
`outer weights - its weights + what its rounding lost before`, divided by a power of two
that all replicas share and rounded stochastically to a narrow format: one byte of a
tensor's largest exponent, and one byte an element in FP8. The all-to-all brings each
owner its piece of every replica's, it adds them up in FP32 in the order of the
replicas, and hands the mean on, narrow again. What this second rounding loses the owner
sends with its next outer gradient, as every replica does with what the first one lost:
so nothing is lost in the end.

Which bits come out does not depend on which device has which replica: random bits count
replicas and pieces.

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

from scalify_core.formats import (
    E4M3,
    E5M2,
    FP16,
    FP32,
    FloatFormat,
    bits_of_words,
    counter_words,
    pow2_floor,
)
from trainer.parallel.mesh import REPLICA, Sizes
from trainer.parallel.reduction import as_bits, of_bits

# 0, 0.5, 1, 1.5, 2, 3, 4 and NaN: four bits with the sign
E2M1 = FloatFormat(2, 1, infinities=False)
FORMATS = {
    "fp32": FP32,
    "bf16": FloatFormat.parse("bf16"),
    "fp16": FP16,
    "fp8": E4M3,
    "fp8_e5m2": E5M2,
    "fp4": E2M1,
}
# of the mean: what four bits lose of it would be more than a replica sends
BACK = FORMATS | {"fp4": E4M3}
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, np.nan], np.float32)  # of E2M1, by its code
# These keep streams of random bits apart. Replica k trains with the seed ^ k *
# OF_REPLICA: no other may be a multiple.
OF_REPLICA, OF_SENT, OF_PIECE, OF_DRAW = 0x9E3779B1, 0xB5297A4D, 0x85EBCA77, 0x27D4EB2F
# more than a model has arrays: an array's number and the replica's make one of both
OF_NUMBER = 2**16


class DiLoCoSettings(NamedTuple):
    """How replicas train apart and agree.

    Attributes:
      replicas: K.
      steps: between two exchanges of a fragment.
      format: of what is sent, a key of FORMATS.
      lr, momentum: of the outer optimiser, SGD with Nesterov's momentum; 1 and 0 are
          plain averaging.
      feedback: whether what rounding loses is sent later.
      fragments: parts of the parameters that are exchanged one after another in a
          round.
      participants: replicas that train in a round, drawn anew for each.
      last: the step after which all is exchanged.
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
        """The fragments that are exchanged after `step` steps; after the last step all
        are.
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

    def drawn(self, seed: Any, step: Any) -> jax.Array:
        """Which replicas train in the step after `step` steps: booleans [K], the same
        for all steps of a round.
        """
        if self.participants == self.replicas:
            return jnp.ones(self.replicas, bool)
        words = counter_words(
            seed, step // self.steps + OF_DRAW, jnp.arange(self.replicas)
        )[:, 0]
        return jnp.argsort(jnp.argsort(words)) < self.participants


def fragments_of(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of arrays of these sizes, each once, in `count` groups of about equal
    sums: the largest first.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = sums.index(min(sums))
        groups[least].append(i)
        sums[least] += sizes[i]
    return [sorted(group) for group in groups]


def shared_scales(peaks: jax.Array, fmt: FloatFormat, axes: Sequence[str]) -> jax.Array:
    """The power of two that puts each tensor's largest magnitude into the upper octave
    of a format, FP32 [tensors].

    A byte each is sent: the exponent. 2^-126 where all is zero, 1 where something is
    not finite, which stays so.
    """
    top = min(fmt.max, FP16.max)  # BF16 data gets the place of FP16 data, not 2^127
    power = jnp.where(jnp.isfinite(peaks), pow2_floor(peaks * (2 / top)), jnp.inf)
    exponents = lax.pmax(
        (lax.bitcast_convert_type(power, jnp.uint32) >> 23).astype(jnp.uint8),
        tuple(axes),
    )
    bits = exponents.astype(jnp.uint32) << 23
    return jnp.where(
        exponents == 255, jnp.float32(1), lax.bitcast_convert_type(bits, jnp.float32)
    )


def encoded(x: jax.Array, fmt: FloatFormat, bits: jax.Array | None) -> jax.Array:
    """FP32 [..., m] rounded stochastically, as it is sent: bytes, words, or two numbers
    of four bits a byte; m even.
    """
    if bits is None:
        return x
    rounded = fmt.stochastic_round(x, bits)
    if fmt.dtype is not None:
        return as_bits(rounded)
    magnitude = jnp.abs(rounded)
    code = sum((magnitude >= number).astype(jnp.uint8) for number in GRID[1:7])
    code = jnp.where(jnp.isnan(rounded), jnp.uint8(7), code) | (
        jnp.signbit(rounded).astype(jnp.uint8) << 3
    )
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decoded(sent: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The numbers that were sent, FP32 [..., m]."""
    if fmt is FP32:
        return sent
    if fmt.dtype is not None:
        return of_bits(sent, fmt.dtype).astype(jnp.float32)
    code = jnp.stack([sent & 15, sent >> 4], axis=-1).reshape(*sent.shape[:-1], -1)
    magnitude = jnp.asarray(GRID)[code & 7]
    return jnp.where(code >= 8, -magnitude, magnitude)


class Sent(NamedTuple):
    """What came of an exchange on a device, by tensor.

    Attributes:
      means: FP32, as every device has them.
      residuals: FP32 [R, ...]: what rounding lost, and all of what was not sent.
      scales: FP32 [tensors], what the tensors were divided by.
    """

    means: list[jax.Array]
    residuals: list[jax.Array]
    scales: jax.Array


def exchange(
    tensors: Sequence[jax.Array],
    how: DiLoCoSettings,
    seed: jax.Array,
    step: jax.Array,
    of_model: Sequence[int],
    axes: Sequence[str] = (REPLICA, *Sizes._fields),
) -> Sent:
    """The mean over the replicas of the step's round, inside `shard_map` over `axes`,
    of which REPLICA is one.

    Args:
      tensors: FP32 [R, ...] of this device's replicas.
      how: who takes part, and the format.
      seed, step: of the random bits, which also tell replicas, pieces and tensors.
      of_model: the number of each tensor among all that are trained, so that fragments
          have bits of their own.
      axes: of the mesh: all that hold parts of a tensor.
    """
    fmt, replicas = FORMATS[how.format], how.replicas
    here = replicas // lax.axis_size(REPLICA)
    numbers = lax.axis_index(REPLICA) * here + jnp.arange(here, dtype=jnp.uint32)
    every = how.drawn(seed, step - 1)
    drawn = lax.dynamic_slice_in_dim(every, lax.axis_index(REPLICA) * here, here)

    def of_drawn(x: jax.Array) -> jax.Array:
        return jnp.where(drawn.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    if fmt is FP32:
        scales = jnp.ones(len(tensors), jnp.float32)
    else:
        peaks = jnp.stack([jnp.max(jnp.abs(of_drawn(x)), initial=0.0) for x in tensors])
        scales = shared_scales(peaks, fmt, axes)

    def narrow(tensor: int, x: jax.Array) -> jax.Array:
        flat = of_drawn(x).reshape(here, -1) * (1 / scales[tensor])
        flat = jnp.pad(flat, ((0, 0), (0, flat.shape[1] % 2 if fmt is E2M1 else 0)))
        if fmt is FP32:
            return flat
        words = counter_words(
            seed ^ jnp.uint32(OF_SENT), step, numbers * OF_NUMBER + of_model[tensor]
        )
        return encoded(flat, fmt, bits_of_words(flat.shape, words))

    sent = [narrow(i, x) for i, x in enumerate(tensors)]
    everything, lost = mean_of_pieces(
        jnp.concatenate(sent, axis=1), how, every, seed, step, of_model[0]
    )
    means, residuals, start = list[jax.Array](), list[jax.Array](), 0
    for i, (x, codes) in enumerate(zip(tensors, sent, strict=True)):
        numbers_sent = decoded(codes, fmt)
        part = slice(start, start + math.prod(x.shape[1:]))
        start += numbers_sent.shape[1]
        means.append(everything[part].reshape(x.shape[1:]) * scales[i])
        if how.feedback:
            off = (lost[:, part] - numbers_sent[:, : part.stop - part.start]).reshape(
                x.shape
            )
            residuals.append(x + off * scales[i])
    return Sent(means, residuals, scales)


def mean_of_pieces(
    sent: jax.Array,
    how: DiLoCoSettings,
    drawn: jax.Array,
    seed: jax.Array,
    step: jax.Array,
    first: int,
) -> tuple[jax.Array, jax.Array]:
    """The mean of what the drawn replicas sent, FP32 [N], and what of it is lost on the
    way back, FP32 [R, N].

    Piece j of K is added up by whoever has replica j, and handed on. What is lost of it
    is that replica's, times as many as take part: in the next mean it is there once.
    All is in the units of the data that was sent, [R, N]. The number of the fragment's
    first tensor, `first`, tells its random bits from those of other fragments.
    """
    fmt, back = FORMATS[how.format], BACK[how.format]
    here = sent.shape[0]
    sent = jnp.pad(sent, ((0, 0), (0, -sent.shape[1] % how.replicas))).reshape(
        here, how.replicas, -1
    )
    # [K, R, m]
    received = lax.all_to_all(sent, REPLICA, split_axis=1, concat_axis=0, tiled=True)
    of_replica = [
        jnp.where(drawn[k], decoded(received[k], fmt), 0) for k in range(how.replicas)
    ]
    mean = functools.reduce(jnp.add, of_replica) * jnp.float32(1 / how.participants)
    numbers = lax.axis_index(REPLICA) * here + jnp.arange(here)
    words = counter_words(
        seed ^ jnp.uint32(OF_PIECE),
        step,
        numbers.astype(jnp.uint32) * OF_NUMBER + first,
    )
    factor = pow2_floor(back.max / fmt.max)
    own = encoded(
        mean * factor, back, None if back is FP32 else bits_of_words(mean.shape, words)
    )
    pieces = lax.all_gather(own, REPLICA, axis=0, tiled=True)
    lost = (mean - decoded(own, back) * (1 / factor)) * how.participants
    width = lost.shape[1]
    whole = jnp.zeros((here, how.replicas, width), jnp.float32)
    whole = whole.at[jnp.arange(here), numbers].set(lost).reshape(here, -1)
    return (decoded(pieces, back) * (1 / factor)).reshape(-1), whole


def bits_of(fmt: FloatFormat) -> int:
    """Bits of a number on its way."""
    return 1 + fmt.exponent_bits + fmt.mantissa_bits


def bytes_of_exchange(elements: int, tensors: int, how: DiLoCoSettings) -> float:
    """What each of K replicas sends in an exchange of so many elements in so many
    tensors, each on its own machine.
    """
    bits = bits_of(FORMATS[how.format]) + bits_of(BACK[how.format])
    scales = 0 if FORMATS[how.format] is FP32 else 2 * tensors
    return (how.replicas - 1) / how.replicas * (elements * bits / 8 + scales)
