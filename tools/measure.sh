#!/usr/bin/env bash
# Every result of benchmarks/results that needs a GPU, on two GPUs in eight minutes: tools/measure.sh FOLDER [PEERS]
#
# FOLDER gets what to copy to benchmarks/results, and what was printed. PEERS: as in `boleinfer bench tree --peers`.
# Afterwards: python tools/fill_tables.py
set -u
: "${1:?give a folder for what is measured: tools/measure.sh FOLDER [PEERS]}"
out=$(mkdir -p "$1" && cd "$1" && pwd) peers=${2:+--peers "$(cd "$2" && pwd)"}
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD BOLEINFER_CACHE=${BOLEINFER_CACHE:-$out/cache}

bench() { # gpu, file, what to measure
  local gpu=$1 file=$2
  shift 2
  CUDA_VISIBLE_DEVICES=$gpu python3 cli.py bench "$@" -o "$out/$file.json" >"$out/$file.txt" 2>&1
  echo "$file: exit status $?, $SECONDS s"
}
receipt() { # number, parts
  CUDA_VISIBLE_DEVICES=1 python3 -m tests.gpu_receipt "${@:2}" --out "$out/receipt$1.json" >"$out/receipt$1.txt" 2>&1
  echo "receipt, ${*:2}: exit status $?, $SECONDS s"
}

python3 cli.py kernels --arch "${ARCH:-90}" >"$out/kernels_report.txt" || exit 1 # side by side, before anything is timed

receipt 1 pytest & receipt 2 check verify families & receipt 3 tokens & receipt 4 fuzz & receipt 5 steady churn &
receipt 6 sanitizer big_pools &
{ bench 0 decode decode --roofline; bench 0 prompts prompts; bench 0 verify verify; bench 0 ring ring; } &
wait

profiles=(speculation --part profiles never)
{
  bench 0 speculation "${profiles[@]}" verify --random-weights qwen3.5-9b --batch 1 4 8
  for batch in 16 32; do
    bench 0 "speculation_9b_$batch" "${profiles[@]}" --random-weights qwen3.5-9b --batch "$batch"
  done
  bench 0 speculation_bundled speculation --part bundled
} &
{
  bench 1 speculation_27b "${profiles[@]}" --random-weights qwen3.5-27b --batch 1 8
  # shellcheck disable=SC2086 # two words or none
  bench 1 gdn_tree tree $peers
  bench 1 kernels kernels
} &
wait
bench 0 start start # alone: loading wants all of the host's memory bandwidth

python3 - "$out" <<'P'
import json, sys
from pathlib import Path
from tests.gpu_receipt import PARTS
found = [json.loads(file.read_text()) for file in sorted(Path(sys.argv[1]).glob("receipt?.json"))]
assert len({r["sources_sha256"] for r in found}) == 1, "receipts of different sources"
parts = {name: part for r in found for name, part in r["parts"].items()}
whole = found[0] | {"parts": {name: parts[name] for name in PARTS if name in parts}}
(Path(sys.argv[1]) / "gpu_receipt.json").write_text(json.dumps(whole, indent=1) + "\n")
print(f"receipt: {sum(part['passed'] for part in parts.values())} of {len(PARTS)} parts passed")
P
