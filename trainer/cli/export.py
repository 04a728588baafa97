"""Export a run's weights to Hugging Face's format, with its tokenizer.

scalify-trainer export run_dir=runs/mine out=exported
scalify-trainer export run_dir=runs/mine out=exported step=best dtype=bf16
scalify-trainer export run_dir=runs/mine out=served format=fp8
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.cli.arguments import STEP_HELP, argument
from trainer.errors import UserError
from trainer.files import ORIGIN, path_of, write_text
from trainer.text import code_span, plural, show
from trainer.version import __version__

# JAX takes seconds to import: a wrong argument is answered without it.
if TYPE_CHECKING:
    from trainer.assembly.saved_model import SavedModel
    from trainer.data import Tokenizer


# transformers fetches and runs what these keys name, for trust_remote_code.
CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Arguments:
    """See `--help`."""

    run_dir: str = argument("the run's directory")
    out: str = argument("new or empty directory to write to")
    step: str = argument(STEP_HELP, "newest")
    format: Literal["wide", "fp8"] = argument(
        "wide: all weights in dtype; fp8: those of the run's FP8 matmuls in FP8, with"
        " scales, for vLLM",
        "wide",
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = argument(
        "format of the weights; auto: fp32, or with format=fp8 the run's"
        " precision.compute",
        "auto",
    )


def check_out(out: Path) -> None:
    """Raise UserError for a directory whose files would mix with the export's.

    A reader would take shards or a tokenizer of an earlier export for a part of this
    one. Hidden files, such as a clone's `.git`, are accepted.

    Raises:
      UserError: `out` has other files, or is not a directory.
    """
    if not out.is_dir():
        # A link that leads nowhere does not exist, but cannot become a directory.
        if out.exists() or out.is_symlink():
            raise UserError(f"out={out} is not a directory; choose another path")
        return
    names = sorted(path.name for path in out.iterdir() if path.name[0] != ".")
    if names:
        listed = ", ".join([*names[:3], "..."] if len(names) > 3 else names)
        raise UserError(
            f"out={out} is not empty ({listed}), and a reader would mix these files"
            " with the export; choose a new directory, or empty this one"
        )


def original_directory(run_dir: Path, run_tokenizer: "Tokenizer") -> Path | None:
    """Return a run's copy of the tokenizer files of its initial weights.

    The original files are not sought: somebody else may have written `init_from` into
    the run's configuration, and an export would publish a private directory's files.
    None: there is no copy, or its tokenizer differs from the run's.
    """
    from trainer.run.initial_weights import has_tokenizer

    copy = run_dir / ORIGIN
    return copy if has_tokenizer(copy, run_tokenizer) else None


def special_ids_in(directory: Path, name: str) -> dict[str, Any]:
    """Return the ids of special tokens in a model's configuration file."""
    from trainer.data.tokenizer_settings import read_beside

    tree = read_beside(directory, name)
    # A missing key differs from null: transformers has defaults for some.
    keys = [key for key in SPECIAL_IDS if key in tree]
    # Somebody else may have written the file; other types would fail in the reader.
    return {key: tree[key] for key in keys if isinstance(tree[key], int | list | None)}


def generation_config(origin: Path | None, eot: int) -> dict[str, Any]:
    """Return generation_config.json: the original's settings, and all ends of a text.

    A model may end a turn of a chat with another token than a document. Only its
    original directory names that token.
    """
    from trainer.data.tokenizer_settings import MODEL_CONFIGS, read_beside

    if origin is None:
        # A run's documents end with eot and have no other beginning.
        return {"bos_token_id": eot, "eos_token_id": eot}
    original_ids = [
        special_ids_in(origin, name)
        for name in MODEL_CONFIGS
        if (origin / name).is_file()
    ]
    ends = [eot]
    for ids in original_ids:
        value = ids.get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ends += [i for i in listed if isinstance(i, int) and i not in ends]
    preferred_ids = original_ids[0] if original_ids else {}
    # An original without generation_config.json has its ids in config.json.
    settings = read_beside(origin, "generation_config.json") | preferred_ids
    return settings | {"eos_token_id": ends if len(ends) > 1 else eot}


def model_config(origin: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the export's config.json with the original's ids of special tokens.

    If the original has no `bos_token_id`, it is left out, so that transformers' default
    holds. If it has no `eos_token_id`, the run's end-of-text stays.
    """
    fields = {key: value for key, value in config.items() if key != "bos_token_id"}
    return fields | special_ids_in(origin, "config.json")


def describe_origin(origin: Path, files: Sequence[Path]) -> str:
    """Return a line that says which settings an export has from the original."""
    from trainer.data.tokenizer_settings import SETTINGS, read_beside

    names = [file.name for file in files]
    # Transformers has kept templates in either place.
    has_template = "chat_template.jinja" in names or (
        "chat_template" in read_beside(origin, SETTINGS)
    )
    template = ", its chat template" if has_template else ""
    return (
        f"the tokenizer{template} and the ids of its special tokens are those of"
        f" {origin}"
    )


def tokenizer_class(out: Path) -> str:
    """Return the class of transformers that reads the exported tokenizer as it is.

    AutoTokenizer rebuilds some tokenizers with another word pattern. transformers 5
    does so for every tokenizer in the directory of a Qwen2 model.
    """
    if (out / "tokenizer.json").is_file():
        return "PreTrainedTokenizerFast"
    return "AutoTokenizer"


def limit_lengths(out: Path, context: int) -> None:
    """Lower model_max_length and max_length of an export to the model's context."""
    from trainer.data.tokenizer_settings import SETTINGS, read_beside
    from trainer.models.weight_files import write_object

    # The original may have had a longer context than the run trained.
    lengths = {SETTINGS: "model_max_length", "generation_config.json": "max_length"}
    for name, key in lengths.items():
        tree = read_beside(out, name)
        # Tokenizers without a limit have 10^30 there.
        if isinstance(tree.get(key), int | float) and tree[key] > context:
            write_object(out / name, tree | {key: context})


def drop_code(out: Path) -> None:
    """Remove the keys that name a program of the original's author.

    transformers would run it with `trust_remote_code`. The tokenizer needs only
    tokenizer.json.
    """
    from trainer.data.tokenizer_settings import SETTINGS, read_beside
    from trainer.models.weight_files import write_object

    # config.json is written anew and names no code.
    for name in (SETTINGS, "generation_config.json"):
        tree = read_beside(out, name)
        data = {key: value for key, value in tree.items() if key not in CODE_KEYS}
        if data != tree:
            write_object(out / name, data)


def model_card(model: "SavedModel", formats: str, reader: str) -> str:
    """Return the text of README.md, as Hugging Face's hub shows it."""
    from trainer.models.flops import param_count

    c, spec = model.config, model.spec
    steps = f"{model.step:,} steps"
    # Not after a resume with another batch size, or if DiLoCo replicas sit out.
    if model.trained_tokens == model.step * c.train.batch_tokens:
        steps += f" of {c.train.batch_tokens:,} tokens"
    # Phases may have several.
    precisions = ", then ".join(map(code_span, model.precisions))
    origin = ""
    if c.init_from is not None:
        # The last part alone: an export is published, and a path names directories of
        # its author.
        weights = path_of(c.init_from).name
        origin += f"- It began with the weights of {code_span(weights)}.\n"
    if model.forked is not None:
        source = code_span(path_of(model.forked["run"]).name)
        step = model.forked["step"]
        origin += f"- It is a fork of the run {source} after step {step:,}.\n"
    tokenizer = code_span(Path(model.tokenizer.name).name)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{c.model.family}]
---

# {code_span(c.model.name)}

A {c.model.family} of {param_count(spec):,} parameters, context {spec.context} tokens, \
weights in {formats}.

- Trained by scalify-trainer {__version__}: {steps}, {model.trained_tokens:,} \
tokens in all.
{origin}\
- Precision of the training: {precisions}; optimizer {code_span(c.optimizer.name)}.
- Tokenizer: {tokenizer}, {model.tokenizer.vocab_size:,} ids.

```python
from transformers import AutoModelForCausalLM, {reader}

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = {reader}.from_pretrained(".")
```
"""


def cast_params(params: Any, dtype: str) -> Any:
    """Return parameters in a format. Raises UserError if it makes one infinite."""
    import jax

    from trainer.precision.fields import DTYPES
    from trainer.step.state_tree import first_nonfinite_leaf

    # FP16 ends at 65,504; weights of FP32, or with scales, may be larger.
    params = jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params)
    name = first_nonfinite_leaf(params)
    if name is not None:
        raise UserError(
            f"dtype={dtype}: {name} is not finite in it; choose fp32 or bf16"
        )
    return params


def main(args: Arguments) -> None:
    """Export, and show how to load the result."""
    from trainer.assembly.fp8_export import restore_fp8_kernels
    from trainer.assembly.saved_model import restore_run

    run_dir, out = Path(args.run_dir), Path(args.out)
    # Before the run is loaded, which takes longer.
    check_out(out)
    model = restore_run(run_dir, args.step)
    dtype, kernels = "fp32", None
    if args.format == "fp8":
        # The run computed all that is not FP8 in this format.
        dtype = model.config.precision.compute
        kernels = restore_fp8_kernels(run_dir, model.step)
    # Also with format=fp8, where it is the format of all other weights.
    if args.dtype != "auto":
        dtype = args.dtype
    params = cast_params(model.params, dtype)
    origin = original_directory(run_dir, model.tokenizer)
    files, tokenizer_paths = write_files(out, model, params, kernels, origin)
    reader = tokenizer_class(out)
    formats = dtype if kernels is None else f"fp8 and {dtype}"
    # Last, so that a card stands for an export that is whole.
    write_text(out / "README.md", model_card(model, formats, reader))
    names = [path.name for path in [*files, out / "README.md", *tokenizer_paths]]
    show(f"wrote {args.out}, step {model.step:,}: {', '.join(names)}")
    if origin is not None:
        show(describe_origin(origin, tokenizer_paths))
    elif model.config.init_from is not None:
        show(
            f"{run_dir / ORIGIN} has no tokenizer files of init_from="
            f"{model.config.init_from} that encode as the run's tokenizer does, so the"
            " export has no chat template, and only the run's eos_token_id"
        )
    if kernels is not None:
        show(f"{plural(len(kernels), 'FP8 matmul')}; serve it: vllm serve {args.out}")
        return
    show(
        f"load it: transformers.AutoModelForCausalLM.from_pretrained({args.out!r}),"
        f" transformers.{reader} likewise"
    )


def write_files(
    out: Path, model: "SavedModel", params: Any, kernels: Any, origin: Path | None
) -> tuple[list[Path], list[Path]]:
    """Write the weights, the configurations and the tokenizer.

    Args:
      out: the export's directory.
      model: the run's model.
      params: its parameters in the format of the export.
      kernels: the FP8 kernels; None: all weights are wide.
      origin: see `original_directory`.

    Returns:
      the files of the model, and those of the tokenizer.

    Raises:
      UserError: the tokenizer cannot be exported; nothing was written.
    """
    from trainer.data.hf_tokenizer import check_known_pattern, save_hf
    from trainer.files import read_object
    from trainer.models.huggingface import save
    from trainer.models.weight_files import (
        carry_tokenizer,
        tokenizer_files,
        write_object,
    )

    eot = model.tokenizer.eot
    config_file = out / "config.json"
    generation_file = out / "generation_config.json"
    # Refuse before the weights are written.
    generation_settings = generation_config(origin, eot)
    original_files = []
    if origin is None:
        check_known_pattern(model.tokenizer)
    else:
        original_files = tokenizer_files(origin)
    weights = save(out, model.spec, params, eot, kernels)
    write_object(generation_file, generation_settings)
    if origin is None:
        tokenizer_paths = save_hf(out, model.tokenizer, model.spec.context)
    else:
        # `save` has written it from the spec, which does not know the original's
        # special tokens.
        write_object(config_file, model_config(origin, read_object(config_file)))
        # The files themselves, because not every tokenizer can be written from what was
        # read of it.
        tokenizer_paths = carry_tokenizer(original_files, out)
        limit_lengths(out, model.spec.context)
        drop_code(out)
    return [*weights, config_file, generation_file], tokenizer_paths
