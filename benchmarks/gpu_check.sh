#!/usr/bin/env bash
# Everything that is checked on a GPU, in one command: uninstalled, with what the machine has.
#   benchmarks/gpu_check.sh FOLDER [WORKERS]
# Writes FOLDER/gate.json (the record), FOLDER/gate.log (the whole log) and prints the summary last.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/gpu_check.sh FOLDER [WORKERS]}
workers=${2:-4}
mkdir -p "$folder"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python3 -m dspark.cli doctor
python3 -m pytest conformance --lane=cuda -n "$workers" -q --durations=10 --record="$folder/gate.json" >"$folder/gate.log" 2>&1
status=$?
grep -E "^(FAILED|ERROR) " "$folder/gate.log" | head -20
sed -n '/= dspark conformance =/,$p' "$folder/gate.log"
[ "$status" -eq 0 ] || tail -n 15 "$folder/gate.log"
exit $status
