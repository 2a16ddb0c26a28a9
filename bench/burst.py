"""The serving knob under load: waves of prompts, tau fixed against tau that follows the queue.

    python bench/burst.py                 # table; with --plot also a picture (needs matplotlib)

Time is counted in forwards, so that a run can be repeated to the digit: prompts arrive at given
times, each forward takes one unit, and while nothing is to be done the clock jumps to the next
arrival. The waiting time of a prompt is that from its arrival to its first token.
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.pareto import ROOT, accuracy, encode, read_problems
from decode import Answer, Decoder, Options, Tau
from model import Qwen2, UserError, load, place, run


def arrivals(count: int, calm: float, burst: float, waves: int, seed: int = 0) -> list[tuple]:
    """(time, is it in a burst?) of each prompt, `calm` or `burst` forwards apart on average."""
    rng, times, now = random.Random(seed), [], 0.0
    for i in range(count):
        in_burst = i * waves % count >= count / 2
        now += rng.expovariate(1 / (burst if in_burst else calm))
        times.append((now, in_burst))
    return times


@dataclass
class Replay:
    """What happened: the answers, how long each prompt waited, and the queue at every forward."""

    answers: list[Answer]
    waited: list[float] = field(default_factory=list)
    queue: list[tuple[float, int, float]] = field(default_factory=list)  # time, waiting, tau
    seconds: float = 0.0


def replay(model: Qwen2, prompts: list, times: list[tuple], tau: Tau, rows: int) -> Replay:
    options = Options(tau=tau)
    answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
    decoder = Decoder(model, [], options, rows, max(len(p) for p in prompts) + options.max_new)
    result, now, coming = Replay(answers), 0.0, 0
    result.waited = [0.0] * len(answers)
    began = time.perf_counter()
    while not all(answer.done for answer in answers):
        while coming < len(answers) and times[coming][0] <= now:
            decoder.waiting.append(answers[coming])
            coming += 1
        news = decoder.step()
        now = now + 1 if news else times[coming][0]
        for answer, _ in news:
            result.queue.append((now, len(decoder.waiting), answer.tau))
            if answer.forwards == 1:
                result.waited[answer.index] = now - times[answer.index][0]
    result.seconds = time.perf_counter() - began
    return result


def falling(high: float, low: float, rows: int):
    """tau as a function of the load: `high` while nobody waits, `low` when `rows` prompts do."""
    return lambda waiting: max(low, high - (high - low) * waiting / rows)


def plot(replays: dict[str, Replay], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 4.8), height_ratios=(3, 1), layout="constrained"
    )
    styles = {  # colours that do not depend on telling red from green
        "1": ("#999999", "-"),
        "0.95": ("#0072b2", "-"),
        "0.95 to 0.7": ("#e69f00", "-"),
        "0.95 to 0.5": ("#d55e00", "--"),
    }
    for name, (colour, line) in styles.items():
        times, waiting, taus = zip(*replays[name].queue)
        label = f"tau {name}" + " (AR)" * (name == "1")
        top.plot(times, waiting, color=colour, linestyle=line, label=label)
        if " to " in name:
            bottom.plot(times, taus, color=colour, linestyle=line)
    top.set(ylabel="prompts waiting", title="The same waves of prompts, at four settings of tau")
    top.legend(frameon=False)
    bottom.set(ylabel="tau", xlabel="time, in forwards")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The serving knob under load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--model", default=str(ROOT / "toy/mars"), help="directory or hub id")
    add("--data", type=Path, default=ROOT / "toy/test.jsonl", help='JSONL, "prompt" and "answer"')
    add("--limit", type=int, help="only the first so many problems")
    add("--rows", type=int, default=8, help="problems decoded at a time")
    add("--calm", type=float, default=6, help="mean number of forwards between two prompts")
    add("--burst", type=float, default=2, help="the same in a burst")
    add("--waves", type=int, default=2, help="the second half of each is a burst")
    add("--plot", type=Path, help="a PNG of the queue over time (needs matplotlib)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--dtype", choices=("float32", "bfloat16"), help="None: bfloat16 on cuda, else float32")
    # fmt: on
    args = parser.parse_args()

    problems = read_problems(args.data, args.limit)
    most = {"calm": 1e6, "burst": 1e6, "waves": len(problems) // 2, "rows": 10**6}
    for name, high in most.items():
        value, least = getattr(args, name), 0.001 if name in ("calm", "burst") else 1
        if not least <= value <= high:
            raise UserError(f"--{name} {value}: must be from {least} to {high:g}")
    times = arrivals(len(problems), args.calm, args.burst, args.waves)
    model, chat = load(args.model, *place(args.device, args.dtype))
    prompts = encode(chat, problems)
    settings = {f"{tau:g}": tau for tau in (1.0, 0.95, 0.7, 0.5)}
    settings |= {f"0.95 to {low:g}": falling(0.95, low, args.rows) for low in (0.7, 0.5)}
    replay(model, prompts[:8], times[:8], 0.95, args.rows)  # start-up, untimed
    print(f"{args.model}, {len(prompts)} problems, {args.rows} rows; time counted in forwards\n")
    print("| tau         | tokens/time | mean wait | in bursts | longest | accuracy | seconds |")
    print("|:------------|------------:|----------:|----------:|--------:|---------:|--------:|")
    replays = {}
    for name, tau in settings.items():
        done = replays[name] = replay(model, prompts, times, tau, args.rows)
        in_bursts = [wait for wait, (_, burst) in zip(done.waited, times) if burst]
        tokens = sum(len(answer.tokens) for answer in done.answers)
        print(
            f"| {name:11} | {tokens / done.queue[-1][0]:11.2f} | {mean(done.waited):9.1f} "
            f"| {mean(in_bursts):9.1f} | {max(done.waited):7.1f} "
            f"| {accuracy(chat, done.answers, problems):8.1%} | {done.seconds:7.1f} |",
            flush=True,
        )
    if args.plot:
        plot(replays, args.plot)


if __name__ == "__main__":
    run(main)
