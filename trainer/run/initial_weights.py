"""Weights that a run starts from, `init_from`: a run, a Hugging Face directory or a
safetensors file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from scalify_core import tree, weights
from trainer.data.hf_tokenizer import first_difference, ids_beside
from trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_saved, vocabulary_file
from trainer.errors import UserError
from trainer.models import huggingface
from trainer.models.family import Spec
from trainer.models.functional import Params
from trainer.models.registry import family_of
from trainer.run.checkpoint import Checkpointer
from trainer.run.compatibility import FROM_INIT, architecture, check_same_model
from trainer.step.state_tree import as_saved, first_nonfinite_leaf

NEW_ROWS = ", or init.embeddings=focus to make table rows for the data's tokens"


def restore_weights(checkpointer: Checkpointer, like: Params) -> Params:
    """Return the weights of the newest checkpoint in FP32, in any stored format.

    They are placed as `like`. Raises UserError for one that is not finite.
    """
    target = as_saved({"params": like}, checkpointer.described())
    checkpoint = checkpointer.restore(target, partial=True)
    name = first_nonfinite_leaf(checkpoint.state)
    if name is not None:
        raise UserError(
            f"checkpoint {checkpoint.step} in {checkpointer.directory}: {name} is not"
            " finite; choose another run"
        )
    return weights.wide(checkpoint.state["params"])


def initial_weights(
    source: Path, spec: Spec, tokenizer: Tokenizer, like: Params
) -> Params:
    """Load weights, placed and typed as `like`.

    Args:
      source: a run, a Hugging Face directory or a safetensors file.
      spec: of the model that is to take them.
      tokenizer: of the data, whose ids the weights must know.
      like: the untrained parameters.

    Raises:
      UserError: another architecture, or another tokenizer.
    """
    key = f"init_from={source}"
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            meta = checkpointer.meta()
            problem = other_tokenizer_of_run(source, meta, tokenizer)
            check_same_model(key, meta["model"], spec, FROM_INIT, problem)
            return restore_weights(checkpointer, like)
    saved_spec, params = huggingface.load(source, spec)
    problem = other_tokenizer_beside(source, saved_spec, tokenizer)
    check_same_model(key, architecture(saved_spec), spec, FROM_INIT, problem)
    if spec.scan_layers:
        params = family_of(spec).stack_layers(params)
    return jax.tree.map(
        lambda new, old: jax.device_put(new.astype(old.dtype), old.sharding),
        params,
        like,
    )


def other_tokenizer_of_run(
    run_dir: Path, meta: Mapping[str, Any], tokenizer: Tokenizer
) -> list[str]:
    """Return how a run's tokenizer differs from the data's, and what to do about it.

    Empty where it is the same.
    """
    fingerprint = meta.get("tokenizer_fingerprint")
    if not fingerprint:
        fingerprint = load_saved(meta["tokenizer"], run_dir).fingerprint
    if fingerprint == tokenizer.fingerprint:
        return []
    file = (
        "byte" if meta["tokenizer"] == ByteTokenizer.name else vocabulary_file(run_dir)
    )
    return [
        f"was trained with tokenizer {meta['tokenizer']} of"
        f" {meta['model']['vocab_size']:,} ids (the data's is {tokenizer.name},"
        f" {tokenizer.vocab_size:,} ids)",
        f"set data.tokenizer={file}{NEW_ROWS}",
    ]


def other_tokenizer_beside(source: Path, spec: Spec, tokenizer: Tokenizer) -> list[str]:
    """Return how the tokenizer of weights differs from the data's, and what to do.

    Empty where no difference is seen. Without a tokenizer beside the weights the sizes
    of the vocabularies decide: at most 1% of the rows may have no id.
    """
    directory = huggingface.directory_of(source)
    ids = ids_beside(directory)
    if ids is not None:
        difference = first_difference(ids, tokenizer)
        if difference is None:
            return []
        return [
            f"has another tokenizer ({difference})",
            f"set data.tokenizer={directory}, the data's is {tokenizer.name} of"
            f" {tokenizer.vocab_size:,} ids{NEW_ROWS}",
        ]
    if 0.99 * spec.vocab_size <= tokenizer.vocab_size <= spec.vocab_size:
        return []
    return [
        f"has {spec.vocab_size:,} ids (the data {tokenizer.vocab_size:,}): another"
        " tokenizer",
        f"set data.tokenizer to theirs, the data's is {tokenizer.name}",
    ]


def describe_init(
    source: Path, tokenizer: Tokenizer, spec: Spec, params: Params
) -> str:
    """Return a line about the weights that a run starts from.

    Args:
      source: of the weights.
      tokenizer: of the data, which was accepted.
      spec: of the model.
      params: the weights, ScaledArrays among them.
    """
    arrays = tree.leaves(params)
    size = f"{len(arrays):,} tensors, {sum(x.size for x in arrays):,} parameters"
    if (source / "checkpoints").is_dir():
        with Checkpointer.reading(source / "checkpoints") as checkpointer:
            step = checkpointer.newest()
        return (
            f"weights from {source} after its step {step:,}: {size}; its tokenizer,"
            f" {tokenizer.name}, is that of the data"
        )
    family = (huggingface.family_at(source) or family_of(spec)).name
    weights_line = f"weights from {source} (Hugging Face, {family}): {size}; "
    if ids_beside(huggingface.directory_of(source)) is not None:
        return (
            f"{weights_line}the tokenizer beside them is that of the data,"
            f" {tokenizer.name}"
        )
    return (
        f"{weights_line}there is no tokenizer beside them, so nobody checked whether"
        f" their ids are those of data.tokenizer={tokenizer.name}"
    )
