"""Errors for weights in other formats than safetensors, with how to convert them."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

from trainer.errors import UserError
from trainer.files import directory_of

PROGRAM_ADVICE = (
    "write it as a Hugging Face directory (config.json and model.safetensors) by the"
    " program that made it; for Meta's, transformers 4 has `python -m"
    " transformers.models.llama.convert_llama_weights_to_hf`"
)
# Suffix -> the option of `from_pretrained`, and the version that has it.
OPTIONS = {
    ".bin": ("", ""),
    ".gguf": ("gguf_file={0}", ""),
    # transformers 5 reads no files of Flax and TensorFlow.
    ".msgpack": ("from_flax=True", " by transformers 4"),
    ".h5": ("from_tf=True", " by transformers 4"),
}
# Only the program that wrote these files can convert them.
# `.bin` is in both: beside a config.json it is transformers' file.
PROGRAM_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".distcp", ".index")
# Suffixes of tensor names in files of GPTQ, AWQ, bitsandbytes, MLX and FP8.
QUANTIZED_SUFFIXES = (
    ".qweight", ".qzeros", ".scales", ".absmax", ".SCB", ".weight_scale",
    ".weight_scale_inv", ".weight_packed",
)  # fmt: skip


def convert_command(directory: Path, option: str) -> str:
    """Return the command that writes a directory's weights as safetensors."""
    # A JSON string is also a Python string. Its quotes are ", so the shell's can be '.
    source = json.dumps(str(directory), ensure_ascii=False)
    arguments = f"{source}, {option}" if option else source
    target = json.dumps(f"{directory}-safetensors", ensure_ascii=False)
    code = (
        "from transformers import AutoModelForCausalLM as A;"
        f" A.from_pretrained({arguments}).save_pretrained({target})"
    )
    return f"python -c {shlex.quote(code)}"


def merge_command(directory: Path) -> str:
    """Return the command that merges a LoRA adapter into its model."""
    source = json.dumps(str(directory), ensure_ascii=False)
    target = json.dumps(f"{directory}-merged", ensure_ascii=False)
    code = (
        "from peft import AutoPeftModelForCausalLM as A;"
        f" A.from_pretrained({source}).merge_and_unload().save_pretrained({target})"
    )
    return f"python -c {shlex.quote(code)}"


def check_format(source: Path) -> None:
    """Raise UserError for weights that are not in safetensors, with what to do.

    Args:
      source: a file, or a directory, which may be empty.

    Raises:
      UserError: a LoRA adapter, another format, or weights only in a subdirectory.
    """
    directory = directory_of(source)
    # First: an adapter is a safetensors file, too, but holds the differences alone.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if (directory / name).is_file():
            raise UserError(
                f"{directory} is a LoRA adapter by its {name}; merge it into its model:"
                f" {merge_command(directory)}, or remove {name} if the weights beside"
                " it are complete"
            )
    if not source.is_dir():
        check_suffix(source)
    # Many directories have pickles beside safetensors: those are not read, and no
    # error.
    elif not any(directory.glob("*.safetensors")):
        for file in sorted(directory.iterdir()):
            check_suffix(file)
        # Some repositories have their weights one level below, such as in a folder for
        # each size.
        in_subdirectories = sorted(directory.glob("*/*.safetensors"))
        if in_subdirectories:
            raise UserError(
                f"{directory} holds no weights itself, but"
                f" {in_subdirectories[0].parent} does; give that one"
            )


def check_suffix(file: Path) -> None:
    """Raise UserError for a suffix of `OPTIONS` or `PROGRAM_SUFFIXES`."""
    # `from_pretrained` needs the config.json.
    has_config = (file.parent / "config.json").is_file()
    if file.suffix in OPTIONS and (has_config or file.suffix not in PROGRAM_SUFFIXES):
        option, version = OPTIONS[file.suffix]
        command = convert_command(file.parent, option.format(json.dumps(file.name)))
        raise UserError(
            f"{file} is no safetensors file; convert it{version}: {command}"
        )
    if file.suffix in PROGRAM_SUFFIXES:
        raise UserError(f"{file} is no safetensors file; {PROGRAM_ADVICE}")


def check_tensor_names(source: Path, names: Iterable[str]) -> None:
    """Raise UserError for a tensor that only quantized weights have."""
    for name in names:
        # By names, since packed weights may have the dtype and shape of others.
        if name.endswith(QUANTIZED_SUFFIXES):
            raise UserError(
                f"{source} is quantized (it holds {name}); give the weights before"
                " quantization, in float32, float16 or bfloat16"
            )
