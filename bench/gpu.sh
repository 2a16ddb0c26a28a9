#!/usr/bin/env bash
# All that needs a CUDA GPU, in one call of some eight minutes; prints Markdown.
#     pip install -r requirements.txt -r tests/requirements.txt -r bench/requirements.txt
#     bench/gpu.sh > bench/results/gpu.md
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1  # or what a command had printed would be lost at its time limit
errors=$(mktemp)
step() {  # seconds, command: one that fails or takes too long does not stop the others
    local seconds=$1
    shift
    printf '\n`%s`\n\n' "$*"
    timeout "$seconds" "$@" 2>"$errors" || { printf '\n(ended with %s)\n\n' "$?"; tail -n 5 "$errors"; }
}
python -c "import torch, datetime as d; print(f'# {torch.cuda.get_device_name()}, torch {torch.__version__}, {d.date.today()}')"
step 90 python -m pytest -m gpu
step 100 python bench/peers.py --shape 0.5B --compile --rounds 5 --max-new 128
step 110 python bench/peers.py --shape 7B --compile --rounds 3 --max-new 64 --rows 1
step 60 python bench/peers.py --compile --rounds 3 --limit 16
step 60 python bench/speed.py --lossless --rounds 3 --limit 50 --rows 1 8
step 60 python bench/cost.py --shape 0.5B --shares 0.5
