#!/usr/bin/env bash
# The figures of README.md, docs/ and smollm2/README.md that were measured on a CPU, in one call of about three hours;
# prints Markdown. Needs a machine that does nothing else. (The paper's claims: experiments.paper.)
#     pip install -r requirements.txt -r bench/requirements.txt
#     bench/cpu.sh > experiments/results/cpu.md
set -uo pipefail
cd "$(dirname "$0")/.."
[ -d smollm2/model ] || { echo "first: python -m apps.smollm2 smollm2/model" >&2; exit 2; }
errors=$(mktemp)
step() {  # a command that fails does not stop the others
    printf '\n## `%s`\n\n' "$*"
    "$@" 2>"$errors" || { printf '\n(ended with %s)\n\n' "$?"; tail -n 5 "$errors"; }
}
quality() { step python -m bench.quality "$@"; }
speed() { step python -m bench.speed "$@"; }
smollm2="--model smollm2/model"
gsm8k="--data bench/data/gsm8k/test.jsonl"
ifeval="--data bench/data/ifeval/test.jsonl"
bbh="--data bench/data/bbh/test.jsonl"

processor=$(grep -m 1 "model name" /proc/cpuinfo | cut -d : -f 2)
commit=$(git rev-parse --short HEAD)
python -c "import torch, datetime as d; print(f'# $(nproc) cores of$processor, torch {torch.__version__}, {d.date.today()}, commit $commit')"

quality
for rows in 1 8 32; do
    quality --verify --rows $rows
    quality --verify --rows $rows --temperature 1
done
for dtype in float32 bfloat16; do
    quality --verify $gsm8k --max-new 128 --dtype $dtype
done
quality --verify --dtype bfloat16

for dtype in float32 bfloat16; do
    speed --transformers --limit 32 --rounds 9 --rows 1 8 --dtype $dtype
    speed --transformers --widths --shape 0.5B --max-new 16 --rounds 9 --rows 1 8 --dtype $dtype
done
speed --block-caches
speed --training --rows 32 --max-new 80
speed --training --shape 0.5B --rows 2 --max-new 256 --rounds 2

verify="$smollm2 --max-new 128 --verify --dtype"
for data in "$gsm8k" "$ifeval" "$bbh"; do
    quality $verify bfloat16 --rows 1 $data
    quality $verify bfloat16 --rows 8 $data --limit 100
done
quality $verify bfloat16 --rows 1 $gsm8k --block 3
quality $verify float32 --rows 8 $gsm8k --limit 32
for data in "$gsm8k" "$ifeval" "$bbh"; do
    speed --transformers $smollm2 $data --rows 1 --rounds 9 --limit 4 --max-new 64 --dtype bfloat16
done
speed --transformers $smollm2 $gsm8k --rows 1 --rounds 9 --limit 4 --max-new 64 --dtype float32
speed --transformers $smollm2 $gsm8k --rows 4 8 --rounds 3 --limit 8 --max-new 128 --dtype bfloat16
speed --transformers $smollm2 $gsm8k --rows 4 8 --rounds 3 --limit 8 --max-new 64 --dtype float32
