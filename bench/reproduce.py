"""Every claim of the paper at a scale that a laptop reaches, from one command.

    python bench/reproduce.py                        # all of it: some four hours on 2 cores
    python bench/reproduce.py --seed 0 --stage sft   # one piece of it; train.py's own resume inside
    python bench/reproduce.py --quick                # 14 minutes, from toy/sft, on easy problems

Every piece trains one model (a command of train.py or bench/controls.py, two of which may run side
by side on one thread each), decodes the problems with it in several ways, and keeps what came of
each problem under bench/results/cache. What is there already is not computed again: with the
committed cache this command only draws. The tables, verdicts and plots are bench/report.py's.
"""

import argparse
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tqdm import tqdm

from bench import report
from bench.controls import Jacobi, diffuse, diffusion_forwards
from bench.pareto import ROOT, encode, last_number
from bench.report import ENTROPIES, MARGINS, TAUS
from decode import generate
from model import Chat, Qwen2, UserError, load, place, replace, run
from toy.make import World, hard_problem, problem, split, write
from train import Rows

WORK, RESULTS, SFT = ROOT / "bench/work", ROOT / "bench/results", ROOT / "toy/sft"
ROWS = 64  # problems decoded at a time
GUESSES = 16  # of Jacobi decoding

# ------------------------------------------------------------------------------------ what is done


@dataclass(frozen=True)
class Stage:
    """A training run and what is decoded with it. B is the block size, also of the decoder."""

    script: str = "train.py"
    words: tuple[str, ...] = ()  # options that make it this stage
    B: int = 4
    decode: tuple[str, ...] = ("tau 1",)  # see `settings`
    seeds: int = 1  # for how many seeds
    start: str = "sft"  # the stage whose model it starts from


STAGES = {
    "base": Stage(script="", start=""),
    "sft": Stage(words=("--objective", "sft"), decode=("tau 1", "jacobi"), seeds=3, start="base"),
    "ar": Stage(words=("--objective", "sft"), seeds=3),
    "mars-4": Stage(
        words=("--block", "4"), decode=("tau 1", "paper", "metrics", "ours", "verify"), seeds=3
    ),
    "diffusion": Stage("bench/controls.py", ("diffusion",), decode=("diffusion",), seeds=3),
    "mars-8": Stage(words=("--block", "8"), B=8, decode=("tau 1", "paper", "verify")),
    "mars-16": Stage(words=("--block", "16"), B=16, decode=("tau 1", "paper", "verify")),
}
for B in (4, 8, 16):
    words, some = ("--block", str(B), "--ar-weight", "0"), ("tau 1", "paper .95")
    STAGES[f"no-clean-{B}"] = Stage(words=words, B=B, decode=some)
    STAGES[f"over-t-{B}"] = Stage("bench/controls.py", ("over-t", *words), B=B, decode=some)
STAGES |= {
    "distill": Stage(words=("--block", "4", "--distill"), decode=("tau 1", "ours", "verify")),
    "fixed": Stage(
        words=("--block", "4", "--block-phase", "fixed"), decode=("tau 1", "ours", "verify")
    ),
}


@dataclass(frozen=True)
class Plan:
    """How much of it, on which problems."""

    world: World
    train_rows: int
    problems: int
    sft: tuple[str, ...]  # options of train.py; none: toy/sft is the model
    steps: int  # of all stages behind it
    mars: tuple[str, ...]  # other options of theirs
    stages: tuple[str, ...]
    seeds: int
    work: Path  # what is trained
    cache: Path  # what is found
    out: Path  # the report
    method: str  # of the report: what is different from run to run

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(seed, stage), in an order in which none comes before what it starts from."""
        for name in self.stages:
            for seed in range(min(self.seeds, STAGES[name].seeds)):
                yield seed, name


FULL = Plan(
    world=hard_problem,
    train_rows=60_000,
    problems=1000,
    sft=("--steps", "900", "--batch", "32", "--lr", "2e-3"),
    steps=400,
    mars=("--batch", "32", "--lr", "1e-3"),
    stages=tuple(STAGES),
    seeds=3,
    work=WORK / "full",
    cache=RESULTS / "cache",
    out=RESULTS,
    method="""\
**The world** is harder than the bundled one (`python toy/make.py --hard`): one to six operations on
numbers up to 999, among sentences that are beside the point. The model has 1.5 M parameters and has
learnt the easy world ([toy/sft](../../toy/README.md)). Stage 1, AR SFT, is 900 steps of 32 problems
from there; every other model is 400 steps of 32 from AR SFT, at half the learning rate, on the same
data in the same order. Seeds differ in the order of the data, from stage 1 on.""",
)
QUICK = Plan(
    world=problem,
    train_rows=20_000,
    problems=500,
    sft=(),
    steps=150,
    mars=("--batch", "64", "--lr", "1e-3"),
    stages=("sft", "ar", "mars-4", "diffusion", "no-clean-4"),
    seeds=1,
    work=WORK / "quick",
    cache=WORK / "quick/cache",
    out=WORK / "quick",
    method="""\
**This is the quick run**: the easy world of toy/, where little can go wrong, with the bundled
toy/sft as AR SFT; every other model is 150 steps of 64 problems from there. One seed. Left out:
more seeds, B = 8 and 16, the 1/t weights, distillation, fixed blocks, longer training, wall-clock
times.""",
)


@functools.cache
def problems_of(plan: Plan) -> tuple[list[dict], str]:
    """The problems, and a hash by which records know them."""
    _, problems = split(plan.world, 0, plan.problems)
    return problems, hashlib.sha256(json.dumps(problems).encode()).hexdigest()[:16]


def settings(kind: str, B: int, seed: int) -> dict[str, dict]:
    """Ways to decode by name: options of `generate`.

    The paper's decoder with B reads one candidate less than B masks give: it is ours with B - 1.
    """
    paper, ours = {"block": B - 1}, {"block": B}
    if kind == "paper":
        return {f"paper {tau:g}": paper | {"tau": tau} for tau in TAUS}
    if kind == "ours":
        return {f"ours {tau:g}": ours | {"tau": tau} for tau in TAUS}
    if kind == "metrics":  # with one seed
        pairs = [("entropy", tau) for tau in ENTROPIES] + [("margin", tau) for tau in MARGINS]
        pairs = [] if seed else pairs
        return {f"{m} {tau:g}": paper | {"tau": tau, "metric": m} for m, tau in pairs}
    if kind == "verify":
        return {"verify": ours | {"tau": 0.0, "verify": True}}
    if kind == "paper .95":
        return {"paper 0.95": paper | {"tau": 0.95}}
    return {kind: {"tau": 1.0} | ({"guesses": GUESSES} if kind == "jacobi" else {})}


# ------------------------------------------------------------------------------------------ pieces


class Piece:
    """One stage with one seed: its model, and its record in the cache."""

    def __init__(self, plan: Plan, seed: int, name: str):
        self.plan, self.seed, self.name, self.stage = plan, seed, name, STAGES[name]
        self.path = plan.cache / f"{name}-{seed}.json"
        self.record = json.loads(self.path.read_text()) if self.path.exists() else {}
        mine = {"problems": problems_of(plan)[1]}
        mine |= {"command": self.command()} if self.name != "base" and self.model() != SFT else {}
        for what, value in mine.items():
            if {"trained", "decoded"} & self.record.keys() and self.record.get(what) != value:
                raise UserError(f"{self.path}: is of other {what}; move it away to compute anew")
        self.record |= mine

    def model(self, stage: str = "") -> Path:
        """Where its model, or that of another stage with its seed, is or will be."""
        stage = stage or self.name
        if stage == "base" or (stage == "sft" and not self.plan.sft):
            return SFT
        return self.plan.work / f"{stage}-{self.seed}"

    def decoding(self) -> dict[str, dict]:
        ways = [settings(kind, self.stage.B, self.seed) for kind in self.stage.decode]
        return {name: options for way in ways for name, options in way.items()}

    def missing(self) -> list[str]:
        """Ways to decode that the record has not, or with other options."""
        done, ways = self.record.get("decoded", {}), self.decoding()
        return [way for way in ways if done.get(way, {}).get("options") != ways[way]]

    def lacks(self) -> bool:
        return not ("trained" in self.record or self.model() == SFT) or bool(self.missing())

    def has_weights(self) -> bool:
        """They are not committed, the record is; who starts from them needs them."""
        return (self.model() / "model.safetensors").exists()

    def keep(self) -> None:
        """Write the record; a line per entry, so that a diff shows what changed."""
        self.record["machine"] = f"{os.cpu_count()} CPU cores, {platform.machine()}"
        self.record["versions"] = f"Python {platform.python_version()}, torch {torch.__version__}"
        self.record["date"] = datetime.date.today().isoformat()
        self.plan.cache.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.record, indent=1) + "\n"
        replace({self.path: lambda path: path.write_text(text)})

    def command(self) -> str:
        """What trains it."""
        start = self.model(self.stage.start)
        steps = ("--steps", str(self.plan.steps))
        schedule = self.plan.sft if self.name == "sft" else steps + self.plan.mars
        words = [*self.stage.words, "--model", start, "--data", self.plan.work / "train.jsonl"]
        words += ["--out", self.model(), "--seed", self.seed, *schedule]
        words += ["--save-every", "50", "--held-out", "256"]
        relative = (str(word).removeprefix(f"{ROOT}/") for word in words)
        return " ".join(["python", self.stage.script, *relative])

    def train(self) -> None:
        """Run the command; it goes on from where it was stopped."""
        began, log = time.perf_counter(), self.model().with_suffix(".txt")
        words = [sys.executable, *self.command().split()[1:], "--resume"]
        try:
            with open(log, "w") as file:
                done = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        finally:  # what was trained before a stop has taken its time, too
            taken = self.record.get("seconds", 0) + time.perf_counter() - began
            self.record["seconds"] = round(taken)
            self.keep()
        if done.returncode:
            raise UserError(f"{self.command()}: ended with {done.returncode}; see {log}")
        lines = [json.loads(line) for line in open(self.model() / "log.jsonl")]
        self.record["trained"] = {
            "last": {key: lines[-1][key] for key in ("noisy", "clean") if key in lines[-1]},
            "look_ahead": {x["step"]: x["look_ahead"] for x in lines if "look_ahead" in x},
        }
        self.keep()

    def decode(self, problems: list[dict]) -> None:
        ways = self.missing()
        if not ways:
            return
        model, chat = load(str(self.model()), *place("auto", None))
        for way in tqdm(ways, desc=f"{self.name}, seed {self.seed}", leave=False):
            result = decoded(model, chat, problems, way, self.decoding()[way])
            self.record.setdefault("decoded", {})[way] = result
            self.keep()


def answers_to(model: Qwen2, prompts: list, way: str, options: dict) -> tuple[list, int]:
    """The tokens of each answer, and how many forwards all of them took."""
    if way == "diffusion":
        starts = range(0, len(prompts), ROWS)
        tokens = [answer for i in starts for answer in diffuse(model, prompts[i : i + ROWS])]
        return tokens, sum(diffusion_forwards(t, model.config.block_size) for t in tokens)
    if way == "jacobi":
        decoder = Jacobi(model, prompts, options["guesses"], ROWS)
        answers = list(decoder.waiting)
        for _ in decoder:
            pass
    else:
        answers = generate(model, prompts, ROWS, **options)
    return [a.tokens for a in answers], sum(a.forwards for a in answers)


def decoded(model: Qwen2, chat: Chat, problems: list[dict], way: str, options: dict) -> dict:
    """Which problems were right, as a text of 0 and 1, and what the tokens cost."""
    began = time.perf_counter()
    tokens, forwards = answers_to(model, encode(chat, problems), way, options)
    said = [last_number(chat.decode(answer)) for answer in tokens]
    return {
        "options": options,
        "right": "".join(str(int(s == p["answer"])) for s, p in zip(said, problems)),
        "tokens": sum(map(len, tokens)),
        "forwards": forwards,
        "seconds": round(time.perf_counter() - began, 1),
    }


# ----------------------------------------------------------------------------------------- the run


def make_data(plan: Plan) -> None:
    """The rows to train on, in a file; none of them may be a problem."""
    path, problems = plan.work / "train.jsonl", problems_of(plan)[0]
    if not path.exists():
        rows, _ = split(plan.world, plan.train_rows, plan.problems)
        replace({path: lambda beside: write(beside, rows)})
    prompts = {problem["prompt"] for problem in problems}
    if any(row["prompt"] in prompts for row in Rows(path)):
        raise UserError(f"{path}: has problems that are to be unseen; move it away")


def one(plan: Plan, seed: int, name: str) -> None:
    """A piece that lacks something, or whose weights somebody starts from and that are gone."""
    piece = Piece(plan, seed, name)
    made = "trained" in piece.record and piece.has_weights()
    if piece.stage.start and piece.model() != SFT and not made:
        make_data(plan)
        piece.train()
    piece.decode(problems_of(plan)[0])


def to_do(plan: Plan) -> dict[tuple[int, str], Piece]:
    """The pieces that lack something, and those that they start from if their weights are gone."""
    pieces = {key: Piece(plan, *key) for key in plan.pieces()}
    lacking = {key for key, piece in pieces.items() if piece.lacks()}
    starts = {(seed, STAGES[name].start) for seed, name in lacking} & pieces.keys()
    gone = {key for key in starts if not pieces[key].has_weights()}
    return {key: piece for key, piece in pieces.items() if key in lacking | gone}


def all_of(plan: Plan, jobs: int, quick: bool) -> None:
    """Every piece in a process of its own, `jobs` at a time."""
    lacking = to_do(plan)
    if not lacking:
        return
    make_data(plan)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    bar, done = tqdm(total=len(lacking), desc="pieces"), {}

    def work(piece: Piece) -> None:
        if before := done.get((piece.seed, piece.stage.start)):  # it was begun earlier
            before.result()
        words = [sys.executable, __file__, "--seed", str(piece.seed), "--stage", piece.name]
        words += ["--quick"] if quick else []
        ended = subprocess.run(words, env=os.environ | threads, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"])[-1]
            raise UserError(f"{piece.name}, seed {piece.seed}: {reason}")
        bar.update()

    with ThreadPoolExecutor(jobs) as pool, bar:
        try:
            for key, piece in lacking.items():
                done[key] = pool.submit(work, piece)
            for future in as_completed(done.values()):
                future.result()
        except BaseException:  # Ctrl-C, too: those that run end by themselves, the others not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# Wall clock, of the bundled models: nothing else may run.
TIMINGS = {"table5": ("bench/speed.py", "--table5"), "table6": ("bench/speculative.py",)}


def timings(plan: Plan, *command: str) -> str:
    """What that benchmark printed, now or before."""
    path = plan.cache / Path(command[0]).with_suffix(".txt").name
    if not path.exists():
        words = [sys.executable, *command]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)}: ended with {done.returncode}")
        text = done.stdout.replace(f"{ROOT}/", "")
        replace({path: lambda file: file.write_text(text)})
    return path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Every claim of the paper at a scale that a laptop reaches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--quick", action="store_true", help="14 minutes: easy problems, one seed, fewer models")
    add("--stage", choices=STAGES, help="only this piece; then --seed says with which seed")
    add("--seed", type=int, default=0, help="of a piece: 0, 1 or 2")
    add("--jobs", type=int, default=os.cpu_count(), help="pieces at a time")
    # fmt: on
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    if args.stage:
        if (args.seed, args.stage) not in plan.pieces():
            raise UserError(f"--stage {args.stage} --seed {args.seed}: not a piece of this plan")
        one(plan, args.seed, args.stage)
        return
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: must be at least 1")
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("the plots need matplotlib: pip install -r bench/requirements.txt")
    all_of(plan, args.jobs, args.quick)
    texts = {} if args.quick else {name: timings(plan, *of) for name, of in TIMINGS.items()}
    texts["method"] = plan.method
    report.write_report(report.Results(plan.cache), texts, plan.out, readings=not args.quick)
    print(f"{plan.out / 'paper.md'}, and plots beside it")


if __name__ == "__main__":
    run(main)
