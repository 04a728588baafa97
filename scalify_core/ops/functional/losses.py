"""Cross entropy, of logits and of a linear layer. FP32 inside.

Shape legend: N tokens, V vocabulary (may be padded), D model width, C tokens of a
chunk.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from scalify_core.numerics import compiler_hints
from scalify_core.ops.composite import composite

# Bytes of a chunk's FP32 logits. On a CPU three products bound the loss, whose time is
# the same from 128 to 2048 tokens a chunk. On a GPU each chunk also reads and writes
# the FP32 gradient of the whole head, so there are fewer.
_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 2**26, 2**28
_LOWEST = -1e30


def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
    masked: bool = False,
    narrow_logits: bool | Literal["cuda"] = False,
) -> jax.Array:
    """Return `cross_entropy(x @ head.T, targets)` without the logits of the whole
    batch.

    The tokens are taken in chunks. When differentiated, the gradients are made in the
    same pass over the chunks (three matrix products; no logits are kept or computed
    twice), and multiplied by the incoming gradient later.

    Args:
        x: [N, D]; its dtype is the one the matrix products read.
        head: [V, D], cast to the dtype of `x`.
        targets: [N], integers in [0, vocab_size).
        vocab_size: columns from here on are padding and take no part; V if None.
        masked: whether targets may be negative: such a token has no loss and no
            gradient; the mean is still over N.
        chunk: the largest number of tokens in a chunk; if None, as many as keep the
            chunk's logits within 64 MiB, on a GPU 256.
        narrow_logits: whether the product writes the logits in the dtype of `x`, under
            `scalify` in that of its data. It halves the memory traffic, and rounds each
            logit by up to 2^-11 of its size in FP16, saturating. All later arithmetic
            is FP32. "cuda": in training on GPUs alone, where that traffic is what the
            loss waits for.

    Returns:
        FP32 scalar, mean nats.
    """
    if vocab_size is None:
        vocab_size = head.shape[0]
    settings = _Settings(vocab_size, chunk, masked, narrow_logits)
    return _linear_cross_entropy(x, head, targets, settings=settings, logit_scale=1.0)


class _Settings(NamedTuple):
    """The options of `linear_cross_entropy`, which are constants of a program."""

    vocab_size: int
    chunk: int | None
    masked: bool
    narrow: bool | Literal["cuda"]

    def tokens_of_chunk(self, size: int, x: jax.Array, head: jax.Array) -> int:
        """Return the tokens of a chunk: as given, or as fit into so many bytes."""
        width = x.dtype.itemsize if self.narrow is True else 4
        return self.chunk or max(1, size // (width * head.shape[0]))

    def unmasked(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return `x`, or zero where a target is negative if `masked`."""
        if self.masked:
            return jnp.where(targets >= 0, x, 0)
        return x

    def logits(self, x_CxD: jax.Array, head_VxD: jax.Array, scale: float) -> jax.Array:
        """Return FP32 logits; with `narrow` they were rounded to the dtype of `x`."""
        # A BF16 logit of 16 is off by up to 2^-4, and so is its probability, by chance
        # in either direction; one of FP16 by 2^-7.
        dtype = x_CxD.dtype if self.narrow is True else jnp.float32
        logits = _dot(x_CxD, head_VxD, ((1,), (1,)), dtype)
        if logits.dtype != jnp.float32:
            # A GPU's product writes infinity beyond FP16, and infinity minus infinity
            # is NaN in the softmax.
            top = float(jnp.finfo(logits.dtype).max)
            logits = jnp.clip(logits.astype(jnp.float32), -top, top)
        return _mask_padding(logits if scale == 1 else logits * scale, self.vocab_size)


@composite
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean over the tokens of `-log softmax(logits)[target]`, in nats.

    Args:
        logits: [N, V], any float dtype.
        targets: [N], integers in [0, V).

    Returns:
        FP32 scalar.
    """
    return _cross_entropy_fwd(logits, targets)[0]


def _cross_entropy_fwd(logits: jax.Array, targets: jax.Array) -> tuple:
    loss, log_norm = _nats(logits.astype(jnp.float32), targets)
    return jnp.mean(loss), (logits, log_norm, targets)


def _cross_entropy_bwd(residuals: tuple, gradient: jax.Array) -> tuple:
    logits, log_norm, targets = residuals
    error = _error(logits.astype(jnp.float32), log_norm, targets)
    return (error * (gradient / targets.shape[0])).astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


@composite(name="linear_cross_entropy")
def _linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    settings: _Settings,
    logit_scale: float,
) -> jax.Array:
    # Here and not in the model: the derivative of a cast to BF16 rounds the head's
    # gradient to BF16.
    head = head.astype(x.dtype)

    def step(
        total: jax.Array, x_CxD: jax.Array, targets_C: jax.Array
    ) -> tuple[jax.Array, None]:
        nats, _ = _nats(settings.logits(x_CxD, head, logit_scale), targets_C)
        return total + jnp.sum(settings.unmasked(nats, targets_C)), None

    chunk = settings.tokens_of_chunk(_CHUNK_BYTES, x, head)
    return _over_chunks(step, jnp.float32(0), x, targets, chunk)[0] / x.shape[0]


def _linear_cross_entropy_fwd(
    x: jax.Array, head: jax.Array, targets: jax.Array, **static: Any
) -> tuple:
    zeros = jnp.zeros(head.shape, jnp.float32)
    return _loss_and_gradients(x, head, targets, zeros, _nats, _CHUNK_BYTES, **static)


def _linear_cross_entropy_fwd_cuda(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    settings: _Settings,
    logit_scale: float,
) -> tuple:
    """Return the same in larger chunks, whose logits are read in two passes.

    One pass makes all sums, one the error.
    """
    settings = settings._replace(narrow=settings.narrow in (True, "cuda"))
    # XLA would allocate a constant at the start of the program, and share it with other
    # zeros of this size to the end.
    zero, x = compiler_hints.barrier((jnp.float32(0), x))
    zeros = jnp.full(head.shape, zero)
    return _loss_and_gradients(
        x,
        head,
        targets,
        zeros,
        _nats_in_one_pass,
        _CUDA_CHUNK_BYTES,
        settings=settings,
        logit_scale=logit_scale,
    )


def _loss_and_gradients(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    zeros: jax.Array,
    nats: Callable,
    chunk_bytes: int,
    *,
    settings: _Settings,
    logit_scale: float,
) -> tuple:
    """Return the loss, and as residuals its gradients times N / logit_scale.

    Their sizes do not depend on the batch, which suits FP16. `zeros` is what the head's
    gradient is added to.
    """
    head_VxD = head.astype(x.dtype)
    # softmax - onehot has RMS about V^-1/2, and most of it is below FP16's range: this
    # power of two brings it to 1.
    lift = 2.0 ** round(math.log2(head.shape[0]) / 2)

    def step(carry: tuple, x_CxD: jax.Array, targets_C: jax.Array) -> tuple:
        total, dhead = carry
        logits = settings.logits(x_CxD, head_VxD, logit_scale)
        loss, log_norm = nats(logits, targets_C)
        error = _error(logits, log_norm, targets_C)
        error = settings.unmasked(error, targets_C[:, None]) * lift
        # The two products read 16 bits, as the forward product does.
        error = error.astype(x_CxD.dtype)
        dx = _dot(error, head_VxD, ((1,), (0,))) / lift
        # In FP32: sums of many small terms stop growing in 16 bits.
        dhead = dhead + _dot(error, x_CxD, ((0,), (0,))) / lift
        total = total + jnp.sum(settings.unmasked(loss, targets_C))
        return (total, dhead), dx.astype(x_CxD.dtype)

    chunk = settings.tokens_of_chunk(chunk_bytes, x, head)
    start = jnp.float32(0), zeros
    (total, dhead), dx = _over_chunks(step, start, x, targets, chunk)
    # Residuals are arrays: an empty one carries the head's dtype.
    return total / x.shape[0], (dx, dhead, jnp.zeros((0,), head.dtype))


def _linear_cross_entropy_bwd(
    residuals: tuple,
    gradient: jax.Array,
    *,
    settings: _Settings,
    logit_scale: float,
) -> tuple:
    del settings
    dx, dhead, like_head = residuals
    # Here, in FP32: with 1/N in them, the gradients of logits of a usual batch have an
    # RMS of 2^-20.8, and 99.998% of them are zeros in FP16.
    factor = gradient * (logit_scale / dx.shape[0])
    return (
        (dx.astype(jnp.float32) * factor).astype(dx.dtype),
        (dhead * factor).astype(like_head.dtype),
        None,
    )


def _over_chunks(
    step: Callable,
    carry: Any,
    x: jax.Array,
    targets: jax.Array,
    chunk: int,
) -> tuple[Any, Any]:
    """Fold `step` over chunks of at most `chunk` tokens.

    `step(carry, x_CxD, targets_C)` returns `(carry, y_CxD or None)`. A chunk takes
    every n-th token, so tokens that are sharded in contiguous blocks are in every chunk
    evenly.
    """
    count = -(-x.shape[0] // chunk)
    # Rather some more chunks than a small one that is left over.
    count = next((n for n in range(count, 2 * count) if x.shape[0] % n == 0), count)
    if count == 1:
        return step(carry, x, targets)
    size = x.shape[0] // count
    count, rest = divmod(x.shape[0], size)
    body = size * count
    xs = x[:body].reshape(size, count, x.shape[1])
    ts = targets[:body].reshape(size, count)
    # A loop: unrolled, XLA holds the logits of all chunks (two layers of 124M: 2.96 GiB
    # in place of 1.11), or, with barriers between them, a sum of the head's gradient
    # that is no part of the product.
    carry, ys = jax.lax.scan(
        lambda c, xt: step(c, *xt), carry, (xs.swapaxes(0, 1), ts.swapaxes(0, 1))
    )
    if ys is not None:
        ys = ys.swapaxes(0, 1).reshape(body, x.shape[1])
    if rest:
        carry, y = step(carry, x[body:], targets[body:])
        ys = None if ys is None else jnp.concatenate([ys, y])
    return carry, ys


def _dot(
    a: jax.Array, b: jax.Array, contract: tuple, dtype: Any = jnp.float32
) -> jax.Array:
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=dtype)


def _mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    if vocab_size == logits.shape[-1]:
        return logits
    # Tables are padded to sizes that tensor cores take, 50257 rows to 50304; the
    # padding must get no probability.
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(column < vocab_size, logits, -jnp.inf)


def _nats(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return FP32 (-log softmax(logits)[target], log of the normalizer), both [N]."""
    log_norm = jax.nn.logsumexp(logits, axis=-1)
    return (
        log_norm - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0],
        log_norm,
    )


def _nats_in_one_pass(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the results of `_nats`, from one reduction.

    It finds the largest logit, the sum of exponentials relative to it, and the target's
    logit.
    """
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    target = jnp.where(column == targets[:, None], logits, 0)

    # By itself XLA reads the logits once for their maximum, and again for the sum.
    def add(left: tuple, right: tuple) -> tuple:
        (peak_l, sum_l, target_l), (peak_r, sum_r, target_r) = left, right
        peak = jnp.maximum(peak_l, peak_r)
        return (
            peak,
            sum_l * jnp.exp(peak_l - peak) + sum_r * jnp.exp(peak_r - peak),
            target_l + target_r,
        )

    # Finite in place of the -inf of padding: two of those would give NaN.
    operands = jnp.maximum(logits, _LOWEST), jnp.ones_like(logits), target
    start = jnp.float32(_LOWEST), jnp.float32(0), jnp.float32(0)
    peak, total, picked = jax.lax.reduce(operands, start, add, (1,))
    log_norm = peak + jnp.log(total)
    return log_norm - picked, log_norm


def _error(logits: jax.Array, log_norm: jax.Array, targets: jax.Array) -> jax.Array:
    """Return `softmax(logits) - onehot(targets)`, [N, V] FP32.

    It is the gradient of the sum of the losses.
    """
    column = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    probability = jnp.exp(logits - log_norm[:, None])
    # A comparison, fused with the exponential; a one-hot array would be as large as the
    # logits.
    return jnp.where(column == targets[:, None], probability - 1, probability)


_linear_cross_entropy.defvjp(
    _linear_cross_entropy_fwd,
    _linear_cross_entropy_bwd,
    cuda=(None, _linear_cross_entropy_fwd_cuda, None),
)
