#!/usr/bin/env bash
# Creates the environment of peers.py under target/: PyTorch, NumPy and, where it builds, DeepSpeed's CPU Adam.
# Must change nothing outside the target folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${CARGO_TARGET_DIR:-target}/peers
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch ninja setuptools
"$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed ||
    echo "SKIPPED: DeepSpeed does not install here; peers.py will say so too" >&2
cargo build --release -p instep-peers
echo "now: $folder/venv/bin/python benches/peers/peers.py"
