#!/usr/bin/env bash
# What needs two GPUs, in one command: uninstalled, on a machine that has them.
#   benchmarks/two_gpus.sh FOLDER [WORKERS]
# 1. The lane second-gpu: every case on the second GPU while the first is the current one, and two ranks over NCCL.
# 2. The gate with its workers spread over the GPUs, each of which sees one.
# Writes FOLDER/second-gpu.{json,log} and FOLDER/spread.{json,log} and prints both summaries.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/two_gpus.sh FOLDER [WORKERS]}
workers=${2:-8}
mkdir -p "$folder"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
count=$(python3 -c 'import torch; print(torch.cuda.device_count())')
echo "$count GPUs"
if [ "$count" -lt 2 ]; then
    echo "two GPUs are needed" >&2
    exit 3
fi
run() {  # NAME LANE
    python3 -m pytest conformance --lane="$2" -n "$workers" -q --durations=10 --record="$folder/$1.json" \
        >"$folder/$1.log" 2>&1
    local status=$?
    echo "== $1: status $status"
    grep -E "^(FAILED|ERROR) " "$folder/$1.log" | head -20
    sed -n '/= dspark conformance =/,$p' "$folder/$1.log"
    [ "$status" -eq 0 ] || tail -n 15 "$folder/$1.log"
    return $status
}
run second-gpu second-gpu
second=$?
run spread cuda
spread=$?
exit $((second || spread))
