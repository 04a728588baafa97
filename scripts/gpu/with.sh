#!/usr/bin/env bash
# scripts/gpu/with.sh FOLDER command ...: runs the command with the wheels that scripts/gpu/prepare.sh gathered, before
# what the machine has. They are unpacked once, beside them; nothing is installed into the machine's own Python.
set -euo pipefail
folder=$(cd "${1:?"usage: scripts/gpu/with.sh FOLDER command ..."}" && pwd)
shift
site=${SITE:-$folder/site}
if [ ! -e "$site/.whole" ]; then
  "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$folder"/*.whl
  touch "$site/.whole"
fi
export PYTHONPATH="$site:$(cd "$(dirname "$0")/../.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
