#!/usr/bin/env bash
# scripts/gpu/short.sh OUT [MINUTES]: what fits into a quarter of an hour on a GPU, the most wanted first. Programs are
# compiled ahead, side by side, while the checks run; what is timed has the GPU to itself. All that was printed and the
# figures are in OUT after each stage, so that a machine that goes away takes only the last one. PLATFORM=cpu rehearses.
set -uo pipefail
out=$(mkdir -p "${1:?"usage: scripts/gpu/short.sh OUT [MINUTES]"}" && cd "$1" && pwd)
end=$((SECONDS + 60 * ${2:-12}))
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
platform="platform=${PLATFORM:-gpu} ${REHEARSE:-}"
export PYTHONUNBUFFERED=1 SCALIFY_TEST_PLATFORM=${PLATFORM:-gpu}

stage() {  # NAME SECONDS COMMAND ...
  local name=$1 most=$2 began=$SECONDS
  shift 2
  [ $((end - SECONDS)) -lt "$most" ] && most=$((end - SECONDS))
  if [ "$most" -lt 20 ]; then echo "$name: no time left"; return; fi
  timeout -k 20 "$most" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit code $? after $((SECONDS - began)) s (at $SECONDS s)" | tee -a "$out/stages.log"
  tail -n 40 "$out/$name.log"
}

compile() {  # NAME CASES
  # Several processes share the memory, and each takes what it needs.
  XLA_PYTHON_CLIENT_PREALLOCATE=false \
    stage "compile_$1" 300 "$python" -m scripts.bench cases="$2" $platform compile_only=true minutes=5
}

bench() {  # NAME CASES
  stage "$1" 150 "$python" -m scripts.bench cases="$2" $platform rounds=5 steps="${STEPS:-10}" minutes=2 out="$out/$1.json"
}

profile() {  # NAME CASES
  stage "profile_$1" 100 "$python" -m scripts.bench cases="$2" $platform profile=3 out="$out/profile_$1.json"
}

# A fresh machine reads gigabytes of libraries page by page, for over a minute; at once it takes seconds.
site=$("$python" -c 'import pathlib, jax; print(pathlib.Path(jax.__file__).parents[1])')
find "$site"/{jax_plugins,jaxlib,nvidia} \( -name '*.so' -o -name '*.so.*' \) -size +3M 2> /dev/null \
  | xargs -P 12 -n 1 cat > /dev/null

small=${SMALL:-gpt2_124m} large=${LARGE:-gpt2_774m} flagship=scalify_fp8_fp16
# A short training finds what a few steps do not: the flagship continues a run of bf16. It has the GPU while programs are
# compiled. Its time counts for nothing.
XLA_PYTHON_CLIENT_PREALLOCATE=false stage train 200 "$python" -m scripts.studies.parity base=bf16 presets=$flagship seeds=1 jobs=1 \
  out="$out/train" model="$small" steps="${TRAIN:-400}" trunk="${TRUNK:-100}" batch_tokens="${TOKENS:-32768}" evaluations=4 eval_batches=8 \
  last=2 overrides="data=python data.tokenizer=${TOKENIZER:-wheels/gpt2} parallel.data=1 ${OVERRIDES:-}" & training=$!
compile small "$small:$flagship,$small:bf16" & small_both=$!
compile large "$large:$flagship" & large_flagship=$!
compile large_bf16 "$large:bf16" & large_bf16=$!
wait $small_both
XLA_PYTHON_CLIENT_PREALLOCATE=false stage tests 200 "$python" -m pytest -W default tests/gpu ${TESTS:--n 3} & tests=$!
wait $training $tests $large_flagship $large_bf16
bench large "$large:$flagship,$large:bf16"
bench small "$small:$flagship,$small:bf16,$small:torch"
profile large "$large:$flagship,$large:bf16"
profile small "$small:$flagship,$small:bf16"
compile small_rest "$small:fp8_delayed,$small:$flagship:deterministic=false,$small:$flagship:logits=float32"
bench small_rest "$small:$flagship,$small:fp8_delayed,$small:$flagship:deterministic=false,$small:$flagship:logits=float32"
