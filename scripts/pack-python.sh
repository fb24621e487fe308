#!/usr/bin/env bash
# Packs the Python package with its native half, tests and benches: `scripts/pack-python.sh LIBRARY FOLDER`.
#
# The native half is for any Python from 3.10 on (abi3). benches/gpu/run.sh runs it.
set -euo pipefail
library=$(realpath "$1")
folder=$(realpath -m "$2")
cd "$(dirname "$0")/../python"

mkdir -p "$folder"
find instep tests benches -name '*.py' -exec cp --parents -t "$folder" {} +
strip -o "$folder/instep/_native.abi3.so" "$library"
