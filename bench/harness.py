"""Benchmarks with EleutherAI's lm-evaluation-harness, and tokens per forward beside accuracy.

    python bench/harness.py --model Xalphinions/MARS-Qwen2.5-0.5B-blk4 --block 4 --run-code
    python bench/harness.py --tasks gsm8k_cot bbh toy --data bench/data --limit 50

The first prints the paper's six tasks, the second needs no network. Settings are the paper's: the
chat template, no examples in the prompt but for BBH (three), up to 256 new tokens, greedy. Tasks
have the harness's names; prompts, answers and metrics are its own.

With --data the problems come from files, as their authors publish them: DIR/gsm8k/test.jsonl and
DIR/bbh/NAME.json. `toy` is the bundled word problems.

A stop string ends an answer where it begins. Its tokens count, as in one-token decoding, up to the
one that completes it; what the same forward gave behind that does not.
"""

import argparse
import functools
import json
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

try:
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
except ImportError:
    sys.exit("error: lm-eval is not installed: pip install -r bench/requirements.txt")
from tqdm import tqdm

from bench.pareto import ROOT
from decode import Answer, Decoder, Options, plain_ar
from model import UserError, load, place, read_json, run
from train import Rows

METRICS = {  # of each task the one that is printed
    "ifeval": "prompt_level_strict_acc,none",
    "bbh": "exact_match,get-answer",
    "mmlu_pro": "exact_match,custom-extract",
    "gpqa_main_cot_zeroshot": "exact_match,flexible-extract",
    "gsm8k_cot": "exact_match,flexible-extract",
    "humaneval_instruct": "pass@1,create_test",
}
PAPER = list(METRICS)
TOY = {
    "task": "toy",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(ROOT / "toy/test.jsonl")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [], "do_sample": False},
    "filter_list": [
        {
            "name": "last-number",
            "filter": [
                {"function": "regex", "regex_pattern": r"(-?\d+)", "group_select": -1},
                {"function": "take_first"},
            ],
        }
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
METRICS["toy"] = "exact_match,last-number"


def stop_at(text: str, until: list[str]) -> int | None:
    """Where the first of the stop strings begins."""
    return min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=None)


def stop_strings(request) -> list[str]:
    until = request.args[1].get("until") or []
    return [until] if isinstance(until, str) else until


@register_model("mars")
class Mars(LM):
    """Our decoder, as the harness knows models. Its batches are ours: rows that never wait."""

    def __init__(self, pretrained, tau=0.95, rows=8, device="auto", dtype=None, **options):
        super().__init__()
        self.name, self.rows = str(pretrained), int(rows)
        self.model, self.chat = load(self.name, *place(device, dtype))
        self.options = Options(tau=float(tau), **options)
        self.counts: dict[str, Counter] = {}  # by task: tokens, forwards, prompts that were cut

    @property
    def tokenizer_name(self) -> str:
        return self.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.chat.template

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt=True) -> str:
        """Some tasks begin the assistant's turn themselves, and want it to be gone on with."""
        if add_generation_prompt:
            return self.chat.prompt(chat_history)
        return self.chat.prompt(chat_history[:-1]) + chat_history[-1]["content"]

    def answer(self, request, index: int) -> Answer:
        """The request as the decoder takes it; of a prompt that is too long, its end."""
        context, settings = request.args
        if settings.get("do_sample") and settings.get("temperature", 1):
            raise UserError(f"{request.task_name}: samples its answers; this decoder is greedy")
        ids, room = self.chat.encode(context), self.model.config.max_position_embeddings
        counts = self.counts.setdefault(request.task_name, Counter())
        counts["cut"] += len(ids) > room - self.options.max_new
        return Answer(ids[-(room - self.options.max_new) :], self.model, self.options, index)

    def generate_until(self, requests: list) -> list[str]:
        answers = [self.answer(request, i) for i, request in enumerate(requests)]
        texts = [""] * len(answers)
        bar = tqdm(total=len(answers), desc=f"{self.name}, tau {self.options.tau:g}")
        for answer, _ in Decoder(self.model, answers, self.options, self.rows):
            request = requests[answer.index]
            until, tokens = stop_strings(request), answer.tokens
            text = self.chat.decode(tokens)
            stop = stop_at(text, until)
            if stop is not None:  # the row is free for the next; what is behind never was
                answer.done, text, tokens = True, text[:stop], self.through(tokens, until)
            if answer.done:
                texts[answer.index] = text
                counts = self.counts[request.task_name]
                counts.update(tokens=len(tokens), forwards=answer.forwards)
                bar.update()
        bar.close()
        return texts

    def through(self, tokens: list[int], until: list[str]) -> list[int]:
        """Tokens up to the one that completes a stop string."""
        starts = (tokens[: n + 1] for n in range(len(tokens)))
        return next(s for s in starts if stop_at(self.chat.decode(s), until) is not None)

    def loglikelihood(self, requests: list) -> list:
        raise UserError("a task that asks for likelihoods: any harness model at tau 1 can do it")

    loglikelihood_rolling = loglikelihood


# ------------------------------------------------------------------------------------------- tasks


manager = functools.cache(TaskManager)  # reads some ten thousand files


def local(name: str, file: Path, folder: Path, field: str | None = None) -> str:
    """The harness's own task on a file of problems: a YAML that includes its."""
    if not file.is_file():
        raise UserError(f"{file}: no such file, which the task {name} needs")
    (read_json if field else Rows)(file)  # raises for what is damaged
    if name not in manager().task_index:
        raise UserError(f"{file}: the harness has no task {name}")
    files = {"data_files": {"test": str(file.resolve())}} | ({"field": field} if field else {})
    task = {"include": str(manager().task_index[name].yaml_path), "task": name}
    task |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task))  # which is YAML, too
    return str(path)


def tasks_of(name: str, data: Path | None, folder: Path) -> list[str | dict]:
    """What `simple_evaluate` takes; UserError for problems that are not there."""
    if name == "toy":
        return [TOY]
    if data is None:
        return [name]
    if name == "gsm8k_cot":
        return [local(name, data / "gsm8k/test.jsonl", folder)]
    if name == "bbh":
        files = sorted((data / "bbh").glob("*.json"))
        if not files:
            raise UserError(f"{data / 'bbh'}: no .json there, which the task bbh needs")
        return [local(f"bbh_cot_fewshot_{f.stem}", f, folder, "examples") for f in files]
    raise UserError(
        f"--data {data}: only gsm8k_cot, bbh and toy can be read from files, not {name}"
    )


def evaluate(lm: Mars, name: str, tasks: list[str | dict], args: argparse.Namespace) -> dict:
    """Accuracy, tokens per forward, prompts that were cut, and the harness's samples."""
    lm.counts.clear()
    results = lm_eval.simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager(),
        num_fewshot=3 if name == "bbh" else 0,
        limit=args.limit,
        apply_chat_template=True,
        bootstrap_iters=0,
        confirm_run_unsafe_code=args.run_code,
    )
    samples = results["samples"]
    sizes = {task: len({row["doc_id"] for row in rows}) for task, rows in samples.items()}
    right = sum(results["results"][task][METRICS[name]] * size for task, size in sizes.items())
    counts = sum(lm.counts.values(), Counter())
    return {
        "accuracy": right / sum(sizes.values()),
        "tokens_per_forward": counts["tokens"] / max(1, counts["forwards"]),
        "cut": counts["cut"],
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Benchmarks, with tokens per forward beside accuracy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--tasks", nargs="+", default=PAPER, choices=METRICS, metavar="TASK", help="and toy")
    add("--data", type=Path, help="a directory with their problems; None: downloads")
    add("--limit", type=int, help="only the first so many problems of each task")
    add("--tau", type=float, nargs="+", default=[1, .95], help="thresholds")
    add("--block", type=int, help="masks per forward; None is what the checkpoint was trained with")
    add("--verify", action="store_true", help="lossless; tau says what is guessed")
    add("--rows", type=int, default=8, help="problems decoded at a time")
    add("--max-new", type=int, default=256, help="most tokens per problem")
    add("--samples", type=Path, help="a JSONL file for every problem's prompt and answer")
    add("--run-code", action="store_true", help="let humaneval run what the model wrote")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    for tau in args.tau:
        plain_ar(tau, "probability")  # raises for one that cannot be
    if "humaneval_instruct" in args.tasks and not args.run_code:
        raise UserError("humaneval_instruct runs what the model wrote: allow it with --run-code")
    for name in ("limit", "block", "rows", "max_new"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if args.samples:
        open(args.samples, "a").close()  # or it would fail after the work
    with tempfile.TemporaryDirectory() as folder:
        tasks = {name: tasks_of(name, args.data, Path(folder)) for name in args.tasks}
        print_table(tasks, args)


def print_table(tasks: dict[str, list], args: argparse.Namespace) -> None:
    """A row per tau: accuracy and tokens per forward of each task, and their means."""
    print(f"| {args.model} | {' | '.join(tasks)} | mean |")
    print("|:--|" + "--:|" * (len(tasks) + 1), flush=True)
    cut = {}
    options = {"block": args.block, "verify": args.verify, "max_new": args.max_new}
    lm = Mars(args.model, args.tau[0], args.rows, args.device, args.dtype, **options)
    for tau in args.tau:
        lm.options.tau = tau
        done = {name: evaluate(lm, name, of, args) for name, of in tasks.items()}
        pairs = [(r["accuracy"], r["tokens_per_forward"]) for r in done.values()]
        pairs.append(tuple(sum(column) / len(done) for column in zip(*pairs)))
        cells = [f"{accuracy:.1%}, {speed:.2f}" for accuracy, speed in pairs]
        print(f"| {'verify, ' * args.verify}tau {tau:g} | {' | '.join(cells)} |", flush=True)
        cut |= {name: r["cut"] for name, r in done.items() if r["cut"]}
        if args.samples:
            keep_samples(args.samples, tau, done)
    for name, count in cut.items():
        print(f"{name}: {count} prompts left no room for --max-new; only their ends were read")


def keep_samples(path: Path, tau: float, done: dict[str, dict]) -> None:
    """Append a line per problem."""
    with open(path, "a", encoding="utf-8") as file:
        for result in done.values():
            for task, rows in result["samples"].items():
                for row in {row["doc_id"]: row for row in rows}.values():  # once for each filter
                    prompt, answer = row["arguments"][0][0], row["resps"][0][0]
                    line = {"task": task, "tau": tau, "prompt": prompt, "answer": answer}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run(main)
