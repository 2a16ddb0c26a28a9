#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one call; prints Markdown. Each command has a time limit, in
# seconds; one that fails or takes longer does not stop the others. All limits together are an
# hour (the Qwen2.5 included); on an H200 it took half of that. The 7B begins in float32, 31 GB:
# on a smaller GPU its two steps fail.
#     pip install -r requirements.txt -r tests/requirements.txt -r bench/requirements.txt
#     bench/gpu.sh > gpu.md
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1  # else a command's output would be lost at its time limit
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
step() {  # seconds, command
    local seconds=$1
    shift
    printf '\n`%s`\n\n' "$*"
    timeout "$seconds" "$@" 2>"$errors" || { printf '\n(ended with %s)\n\n' "$?"; tail -n 5 "$errors"; }
}
python -c "import torch, datetime as d; print(f'# {torch.cuda.get_device_name()}, torch {torch.__version__}, {d.date.today()}')" || exit 1
step 120 python -m pytest -m gpu
step 60 python -m bench.speed --widths --shape 0.5B --rounds 50
step 200 python -m bench.speed --widths --shape 0.5B --rounds 50 --compile
step 90 python -m bench.speed --transformers --shape 7B --rounds 3 --limit 1 --max-new 64 --rows 1
step 300 python -m bench.speed --transformers --shape 7B --rounds 3 --limit 1 --max-new 64 --rows 1 --compile
step 240 python -m bench.speed --transformers --compile --rounds 3 --limit 16 --rows 1 8

for needed in qwen2.5 qwen2.5-original gsm8k.jsonl; do
    [ -e $needed ] || { echo "no $needed: without the Qwen2.5, see patches/qwen2.5/README.md" >&2; exit 0; }
done
speed="python -m bench.speed --transformers --model qwen2.5 --data bench/data/gsm8k/test.jsonl --rounds 3 --max-new 64 --dtype bfloat16"
step 200 $speed --rows 1 --limit 4
step 200 $speed --rows 1 --limit 4 --compile
step 100 $speed --rows 8 --limit 8
step 100 $speed --rows 32 --limit 32
quality="python -m bench.quality --model qwen2.5 --against qwen2.5-original --data gsm8k.jsonl --max-new 400 --rows 48 --dtype bfloat16"
step 1200 $quality --tau .99 .95 .9 .8
step 600 $quality
