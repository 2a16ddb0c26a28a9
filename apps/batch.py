"""Answer a file of prompts, several at a time.

    python -m apps.batch prompts.jsonl --rows 8 > answers.jsonl

Every line is a prompt, or a JSON object with a `prompt`, a `question` or `messages`, and perhaps an
`id` and (with --tau) a `tau` of its own. The output has a JSON object for every prompt, in the same
order: training data for train.py.
"""

import json
import sys
import time
from collections import deque
from pathlib import Path

from tqdm import tqdm

from decode import Decoder, Sequence, add_options, load_for_decoding, read_options
from plumbing.arguments import Parser, number
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import naming, run_main
from plumbing.jsonl import read_rows
from plumbing.terminal import note, statistics


def answer_all(decoder: Decoder, requests: deque[tuple[dict, Sequence]], chat: Chat) -> None:
    """Print each answer as soon as it and all before it are done.

    requests: what is printed of a prompt, and its answer. At the end, or after Ctrl-C, statistics.
    """
    num_prompts = len(requests)
    num_tokens = 0
    num_forwards = 0
    began = time.perf_counter()
    try:
        with tqdm(total=num_prompts, unit="prompt", disable=None) as bar:
            for answer, tokens in decoder:
                num_tokens += len(tokens)
                num_forwards += 1
                bar.update(answer.done)
                while requests and requests[0][1].done:
                    row, first = requests.popleft()
                    row["response"] = chat.decode(first.tokens)
                    row["tokens"] = len(first.tokens)
                    row["forwards"] = first.forwards
                    row["finish_reason"] = "stop" if first.tokens[-1] in first.stop else "length"
                    bar.write(json.dumps(row))
                    sys.stdout.flush()
    finally:
        num_answers = num_prompts - len(requests)
        figures = statistics(num_tokens, num_forwards, time.perf_counter() - began)
        note(f"{num_answers} of {num_prompts} answers, {num_tokens} tokens: {figures}")


def main() -> None:
    parser = Parser("Answer a file of prompts, several at a time (MARS).")
    parser.add_argument("file", metavar="FILE", type=Path, help="a prompt per line, or JSONL")
    parser.add_argument("--rows", type=number(int, 1), default=8, help="prompts at a time")
    parser.add_model()
    add_options(parser)
    args = parser.parse_args()
    options = read_options(args)
    rows = read_rows(args.file)
    model, chat = load_for_decoding(args, options)
    prompts = {}
    for line_number, row in rows.items():
        with naming(f"{args.file}:{line_number}"):
            prompts[line_number] = encode_prompt(row, chat)
    longest = max(map(len, prompts.values())) + options.max_new
    decoder = Decoder(model, options, min(args.rows, len(prompts)), longest)
    requests = deque()
    for line_number, row in rows.items():
        with naming(f"{args.file}:{line_number}"):
            sequence = decoder.add(prompts[line_number], tau=row.get("tau"))
        shown = {"id": row.get("id", line_number)}
        shown |= {key: row[key] for key in ("prompt", "question", "messages") if row.get(key)}
        requests.append((shown, sequence))
    answer_all(decoder, requests, chat)


if __name__ == "__main__":
    run_main(main, out_of_memory="use fewer --rows or a smaller --max-new")
