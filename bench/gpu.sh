#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one call of about eight minutes; prints Markdown.
#     pip install -r requirements.txt -r tests/requirements.txt -r bench/requirements.txt
#     bench/gpu.sh > experiments/results/gpu.md
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1  # else a command's output would be lost at its time limit
errors=$(mktemp)
step() {  # seconds, command: one that fails or takes too long does not stop the others
    local seconds=$1
    shift
    printf '\n`%s`\n\n' "$*"
    timeout "$seconds" "$@" 2>"$errors" || { printf '\n(ended with %s)\n\n' "$?"; tail -n 5 "$errors"; }
}
python -c "import torch, datetime as d; print(f'# {torch.cuda.get_device_name()}, torch {torch.__version__}, {d.date.today()}')"
step 90 python -m pytest -m gpu
step 100 python -m bench.speed --transformers --widths --shape 0.5B --compile --rounds 5 --max-new 128 --rows 1 8
step 110 python -m bench.speed --transformers --widths --shape 7B --compile --rounds 3 --max-new 64 --rows 1
step 60 python -m bench.speed --transformers --compile --rounds 3 --limit 16 --rows 1 8
step 60 python -m bench.speed --lossless --rounds 3 --limit 50 --rows 1 8
step 60 python -m bench.speed --training --shape 0.5B --rows 8 --max-new 256 --rounds 3
