#!/usr/bin/env bash
# The whole recipe, from nothing to model/, cases.jsonl.gz and results/: about half an hour on two cores.
#   PY=$(make -s env | tail -n 1) models/tiny_mla/retrain.sh
# Checkpoints go to WORK (default: a new temporary folder). Retraining is not reproducible bit for bit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
py=${PY:-python3} work=${WORK:-$(mktemp -d)}
shim=$("$py" -c 'from leyline_lmcache.stack.device import CPU_SHIM; print(CPU_SHIM)')
export PYTHONPATH=$shim OMP_WAIT_POLICY=PASSIVE
compact="--hidden 192 --inter 384 --lora 128 --nope 32 --v 32"
"$py" train.py $compact --lr 2e-3 --seed 0 --aux 0.5 --phases phases/1_compact.json --out "$work/1.pt"
"$py" train.py $compact --lr 1e-3 --seed 1 --aux 0.3 --phases phases/2_finetune.json --init "$work/1.pt" --out "$work/2.pt"
"$py" train.py $compact --lr 8e-4 --seed 3 --aux 0.3 --phases phases/3_long.json --init "$work/2.pt" --out "$work/3.pt"
# Widened exactly to DeepSeek-V2-Lite's attention shape, then trained a little there.
"$py" train.py --hidden 192 --inter 384 --lr 3e-4 --seed 2 --aux 0.2 --phases phases/4_wide.json --init "$work/3.pt" --out "$work/4.pt"
"$py" export.py "$work/4.pt" model
"$py" make_cases.py
for dtype in float32 bfloat16; do
  "$py" eval.py --dtypes "$dtype" --json "results/$dtype.json"
done
