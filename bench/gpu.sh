#!/usr/bin/env bash
# Checks the kernels on a GPU, then measures, in less than six minutes:
#
#     OUT=results bench/gpu.sh
#
# Needs Python >= 3.11 with torch, triton, rich and matplotlib; installs nothing. It stops at the first wrong result.
# Everything is written to $OUT as it is found, the log too; the summary comes last, after an interrupt as well.
#
# For a trial without a GPU: DEVICE=cpu. PYTHON: the interpreter. WORKLOADS, SWEEP, ROUNDS: of the benchmark.
set -uo pipefail

: "${OUT:?must name the folder for the results}"
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
WORKLOADS=${WORKLOADS-gpt2 small-400 llama3.2-1b tiny-10000}
ROUNDS=${ROUNDS:-20}
exec > >(tee "$OUT/log.txt") 2>&1

# The package as it is once installed: `make types` makes the same.
tree=$(mktemp -d)
mkdir "$tree/tritonamp"
ln -s "$PWD"/tritonamp/* "$PWD/kernels" "$tree/tritonamp"
# Without the working directory on the path, which would hide the link tree.
export PYTHONSAFEPATH=1 PYTHONPATH=$tree:$PWD PYTHONUNBUFFERED=1

summary=()
finish() {
    rm -rf "$tree"
    printf '\n%s\n' "Summary (${SECONDS} s):"
    printf '  %s\n' "${summary[@]:-interrupted before the first result}"
}
trap finish EXIT
trap 'kill $(jobs -p) 2>/dev/null; exit 130' INT TERM

stop() {
    summary+=("$1")
    exit 1
}

# Runs a command for at most so many seconds, in the background, so that an interrupt is acted on at once.
limited() {
    local seconds=$1
    shift
    timeout --kill-after=15 "$seconds" "$@" &
    wait $!
}

sanitize() {
    local tool=$1 log=$OUT/sanitizer.txt
    if ! command -v compute-sanitizer >/dev/null; then
        summary+=("$tool: no compute-sanitizer here")
        return
    fi
    # Without a caching allocator, so that every tensor has bounds of its own.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited 40 compute-sanitizer --tool "$tool" \
        "$PYTHON" -m bench.gpu_check --device "$DEVICE" --only oracle >"$log" 2>&1
    if grep -qE 'WRONG|(ERROR SUMMARY: |RACECHECK SUMMARY: )[1-9]' "$log"; then
        tail -n 40 "$log"
        stop "$tool: WRONG, see above"
    elif grep -qE '(ERROR SUMMARY|RACECHECK SUMMARY): 0' "$log" && grep -q '^ok  ' "$log"; then
        summary+=("$tool: nothing found")
    else
        tail -n 5 "$log"
        summary+=("$tool: did not run to its end")
    fi
    rm -f "$log"
}

limited 120 "$PYTHON" -m bench.gpu_check --device "$DEVICE" || stop "checks: WRONG, see above (status $?)"
summary+=("checks: ok")
sanitize memcheck
sanitize racecheck

# shellcheck disable=SC2086 # a list of words
limited 110 "$PYTHON" -m bench run --device "$DEVICE" --workloads $WORKLOADS --sweep "${SWEEP:-1e8}" --rounds "$ROUNDS" --out "$OUT"
status=$?
case $status in
    0) summary+=("benchmark: done") ;;
    124) summary+=("benchmark: cut short; what it had is in $OUT") ;;
    *) stop "benchmark: status $status, see above" ;;
esac

if [ "$DEVICE" = cuda ]; then
    limited 40 "$PYTHON" -m bench kernel --out "$OUT/kernel.json" || stop "kernel: status $?"
    summary+=("kernel: done")
fi
