"""The paper's benchmarks in EleutherAI's lm-evaluation-harness, with tokens per forward.

    MODEL=Xalphinions/MARS-Qwen2.5-0.5B-blk4
    python -m bench.lm_harness --model $MODEL --block 4 --tau 1 .95 --run-code
    python -m bench.lm_harness --tasks toy gsm8k --limit 50

The first command prints the paper's six tasks. The second needs no network: `toy` is the bundled
word problems; in bench/data are 400 questions for `gsm8k`, which is gsm8k_cot, 250 of ifeval's 541
prompts for `ifeval_bundled`, and half of HumanEval's problems for `humaneval_bundled`. (Without a
network give ifeval --limit 225: the last 25 are judged with nltk's punkt_tab, which is downloaded.)
Settings are the paper's: the chat template, no examples in the prompt (BBH has three), up to 256
new tokens, greedy. The rest of a task is the harness's own.

A stop string ends an answer where the string begins. As in one-token decoding, its tokens count up
to the one that completes it; later tokens of the same forward do not.
"""

import logging
import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import lm_eval  # of bench/requirements.txt
import numpy as np
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from bench import common
from decode import Decoder, Options
from model import load
from plumbing.arguments import Parser, find_device, number
from plumbing.errors import UserError, run_main

METRICS = {  # the one that is printed for each task
    "ifeval": "prompt_level_strict_acc,none",
    "bbh": "exact_match,get-answer",
    "mmlu_pro": "exact_match,custom-extract",
    "gpqa_main_cot_zeroshot": "exact_match,flexible-extract",
    "gsm8k_cot": "exact_match,flexible-extract",
    "humaneval_instruct": "pass@1,create_test",
    "toy": "exact_match,last-number",
    "humaneval_bundled": "passes,program",
}
PAPER = list(METRICS)[:-2]
HERE = Path(__file__).parent
BUNDLED = {  # the task that is run on problems of ours, and where these are
    "toy": ("toy", HERE.parent / "toy/test.jsonl"),
    "gsm8k": ("gsm8k_cot", HERE / "data/gsm8k/test.jsonl"),
    "ifeval_bundled": ("ifeval", HERE / "data/ifeval/test.jsonl"),
    "humaneval_bundled": ("humaneval_bundled", HERE / "data/human_eval/test.jsonl"),
}
RUN_CODE = {"humaneval_instruct", "humaneval_bundled"}  # these run what the model wrote

# ------------------------------------------------------------------------------ the harness's model


def stop_at(text: str, stop_strings: list[str]) -> int | None:
    """Where the first of the stop strings begins; None if there is none in the text."""
    found = [text.find(stop) for stop in stop_strings if stop]
    return min((at for at in found if at >= 0), default=None)


class Mars(LM):
    """The Decoder as a model of the harness."""

    def __init__(self, name: str, options: Options, rows=8, device="auto", dtype=None):
        super().__init__()
        self.name = name
        self.options = options
        self.num_rows = rows
        self.model, self.chat = load(name, *find_device(device, dtype))
        self.counts = Counter()  # tokens and forwards

    @property
    def tokenizer_name(self) -> str:
        return self.name

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt=True) -> str:
        """Some tasks begin the assistant's turn themselves; the model then continues that turn."""
        if add_generation_prompt:
            return self.chat.prompt(chat_history)
        return self.chat.prompt(chat_history[:-1]) + chat_history[-1]["content"]

    def generate_until(self, requests: list) -> list[str]:
        prompts = [self.chat.encode(request.args[0]) for request in requests]
        longest = max(map(len, prompts)) + self.options.max_new
        rows = min(self.num_rows, len(prompts))
        decoder = Decoder(self.model, self.options, rows, longest)
        for prompt in prompts:
            decoder.add(prompt)
        texts = [""] * len(prompts)
        said = [[] for _ in prompts]  # tokens
        with tqdm(total=len(prompts), desc=self.name) as bar:
            for answer, new in decoder:
                i = answer.index
                stop_strings = requests[i].args[1].get("until") or []
                if isinstance(stop_strings, str):
                    stop_strings = [stop_strings]
                for token in new:
                    said[i].append(token)
                    texts[i] = self.chat.decode(said[i])
                    stop = stop_at(texts[i], stop_strings)
                    if stop is not None:
                        texts[i] = texts[i][:stop]
                        answer.done = True  # its row is free for the next request
                        break
                if answer.done:
                    self.counts.update(tokens=len(said[i]), forwards=answer.forwards)
                    bar.update()
        return texts

    def loglikelihood(self, requests: list) -> list:
        raise UserError("a task that asks for likelihoods: any harness model at tau 1 can do it")

    loglikelihood_rolling = loglikelihood


# ------------------------------------------------------------------------------------------- tasks


def on_bundled_problems(name: str) -> dict:
    """A group of one task, the harness's or ours, whose problems are read from a file of ours."""
    task, problems = BUNDLED[name]
    changes = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(problems)}},
        "test_split": "test",
    }
    return {"group": "bundled", "task": [{"task": task, **changes}]}


def evaluate(lm: Mars, name: str, manager: TaskManager, args) -> tuple[float, float]:
    """Accuracy and tokens per forward over all problems of a task."""
    lm.counts.clear()
    task = name
    metric = METRICS.get(name)
    if name in BUNDLED:
        task = on_bundled_problems(name)
        metric = METRICS[BUNDLED[name][0]]
    with redirect_stdout(sys.stderr):  # some tasks print while they load
        results = lm_eval.simple_evaluate(
            lm,
            tasks=[task],
            task_manager=manager,
            num_fewshot=3 if name == "bbh" else 0,
            limit=args.limit,
            apply_chat_template=True,
            bootstrap_iters=0,
            confirm_run_unsafe_code=args.run_code,
        )
    counts = results["n-samples"]  # of each part: a task such as bbh has many
    scores = [results["results"][part][metric] for part in counts]
    sizes = [count["effective"] for count in counts.values()]
    accuracy = np.average(scores, weights=sizes)
    return accuracy, lm.counts["tokens"] / max(1, lm.counts["forwards"])


def main() -> None:
    parser = Parser("The paper's benchmarks, with tokens per forward.")
    parser.add_model(str(common.TOY / "mars"), "directory or hub id")
    add = parser.add_argument
    tasks = {"nargs": "+", "default": PAPER, "choices": [*METRICS, *BUNDLED], "metavar": "TASK"}
    add("--tasks", **tasks, help="also: toy, gsm8k, ifeval_bundled, humaneval_bundled")
    add("--limit", type=number(int, 1), help="only the first so many problems of each task")
    add("--run-code", action="store_true", help="let HumanEval run what the model wrote")
    common.add_decoding(parser, rows=8)
    args = parser.parse_args()
    if args.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the harness asks for it a second time
    elif RUN_CODE & set(args.tasks):
        raise UserError("HumanEval runs what the model wrote: allow it with --run-code")
    ways = common.ways_to_decode(args)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = Mars(args.model, Options(), args.rows, args.device, args.dtype)
    manager = TaskManager(include_path=str(HERE))  # ours, and some ten thousand others
    rows = []
    for way, options in ways.items():
        lm.options = options
        figures = [evaluate(lm, name, manager, args) for name in args.tasks]
        rows.append([way, *(f"{accuracy:.1%}, {speed:.2f}" for accuracy, speed in figures)])
    print(common.table([args.model, *args.tasks], rows))


if __name__ == "__main__":
    run_main(main)
