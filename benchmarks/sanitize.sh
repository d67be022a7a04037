#!/usr/bin/env bash
# Every kernel under compute-sanitizer's memcheck, initcheck and racecheck: uninstalled, on a machine with a GPU.
#   benchmarks/sanitize.sh FOLDER [--plant]
# Writes FOLDER/<tool>.log and prints a table last; status 0 when nothing was reported. With --plant each tool also gets
# a kernel with a fault that it must report, so that status 1 and an error in planted_<tool>_kernel are what is right.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: benchmarks/sanitize.sh FOLDER [--plant]}
plant=${2:-}
case "$plant" in "" | --plant) ;; *) echo "usage: benchmarks/sanitize.sh FOLDER [--plant]" >&2; exit 2 ;; esac
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

sanitizer=$(command -v compute-sanitizer)
for place in /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer /usr/local/cuda-*/bin /opt/nvidia/*/; do
    [ -z "$sanitizer" ] && [ -x "$place/compute-sanitizer" ] && sanitizer=$place/compute-sanitizer
done
if [ -z "$sanitizer" ]; then  # the packages that pip has put beside torch
    packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    sanitizer=$(find "$packages/nvidia" -name compute-sanitizer -type f -perm -u+x 2>/dev/null | head -n 1)
fi
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer was not found: not on the PATH, in a CUDA toolkit, or beside torch" >&2
    exit 3
fi
"$sanitizer" --version | tail -n 1

export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="$folder/triton-cache"
calls="python3 -m conformance.fixtures.sanitizer.calls"
# Once without a tool: the results are right, and what is compiled is compiled.
timeout 300 $calls >"$folder/plain.log" 2>&1 || { tail -n 20 "$folder/plain.log"; echo "the calls failed without a tool" >&2; exit 4; }
for tool in memcheck initcheck racecheck; do
    # Without torch's cache every tensor is an allocation of its own, whose end the tools know.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 300 "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 0 \
        --target-processes application-only $calls ${plant:+--plant "$tool"} >"$folder/$tool.log" 2>&1
    echo "$tool: status $?"
done
rm -rf "$TRITON_CACHE_DIR"
python3 -m conformance.fixtures.sanitizer.table "$folder" $plant
