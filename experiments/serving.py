"""Waves of prompts: tau fixed, against tau that falls while prompts wait.

    python -m experiments.serving                     # a table
    python -m experiments.serving --plot queue.png    # and a picture (needs matplotlib)

Time is counted in forwards, so every column except the seconds is the same on every machine:
prompts arrive at given times, a forward takes one unit, and while there is nothing to do the clock
jumps to the next arrival. A prompt waits from its arrival to its first token.
"""

import functools
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from bench import common
from decode import Decoder, Options, Sequence, Tau
from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write


@dataclass
class Arrival:
    time: float
    in_burst: bool


def arrivals(count: int, calm: float, burst: float, waves: int, seed: int = 0) -> list[Arrival]:
    """When prompts come: on average `calm` forwards apart, in the second half of a wave `burst`."""
    rng = random.Random(seed)
    result, now = [], 0.0
    for i in range(count):
        in_burst = i * waves % count >= count / 2
        mean_gap = burst if in_burst else calm
        now += rng.expovariate(1 / mean_gap)
        result.append(Arrival(now, in_burst))
    return result


@dataclass
class Moment:
    """The state after a forward."""

    time: float
    num_waiting: int
    tau: float


@dataclass
class Replay:
    """What happened to the prompts."""

    answers: list[Sequence]
    waits: list[float]  # of every prompt, from its arrival to its first token
    moments: list[Moment] = field(default_factory=list)


def replay(
    model: Qwen2, prompts: list[list[int]], coming: list[Arrival], options: Options, rows: int
) -> Replay:
    """Answer prompts as they arrive."""
    longest = max(len(prompt) for prompt in prompts) + options.max_new
    decoder = Decoder(model, options, rows, longest)
    result = Replay(answers=[], waits=[0.0] * len(prompts))
    now = 0.0
    while True:
        num_arrived = len(result.answers)
        while num_arrived < len(prompts) and coming[num_arrived].time <= now:
            result.answers.append(decoder.add(prompts[num_arrived]))
            num_arrived += 1
        advanced = decoder.step()
        if advanced:
            now += 1
        elif num_arrived < len(prompts):
            now = coming[num_arrived].time
        else:
            return result
        for answer, _ in advanced:
            result.moments.append(Moment(now, len(decoder.scheduler.waiting), answer.tau))
            if answer.forwards == 1:
                result.waits[answer.index] = now - coming[answer.index].time


def falling(high: float, low: float, rows: int) -> Tau:
    """tau as a function of the load: `high` while nobody waits, `low` when `rows` prompts do."""
    return lambda num_waiting: max(low, high - (high - low) * num_waiting / rows)


def figures(done: Replay, coming: list[Arrival]) -> list[str]:
    """Of a row of the table: tokens per time, mean wait, mean wait in bursts, longest wait."""
    num_tokens = sum(len(answer.tokens) for answer in done.answers)
    in_bursts = [wait for wait, arrival in zip(done.waits, coming) if arrival.in_burst]
    return [
        f"{num_tokens / done.moments[-1].time:.2f}",
        f"{mean(done.waits):.1f}",
        f"{mean(in_bursts):.1f}",
        f"{max(done.waits):.1f}",
    ]


def plot(replays: dict[str, Replay], path: Path) -> None:
    """The queue over time, and below it the tau of the settings where it moves."""
    import matplotlib.pyplot as plt

    plt.style.use("tableau-colorblind10")
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 4.8), height_ratios=(3, 1), layout="constrained"
    )
    for name in ("1", "0.95", "0.95 to 0.7", "0.95 to 0.5"):
        times = [moment.time for moment in replays[name].moments]
        waiting = [moment.num_waiting for moment in replays[name].moments]
        taus = [moment.tau for moment in replays[name].moments]
        label = "tau 1 (AR)" if name == "1" else f"tau {name}"
        [line] = top.plot(times, waiting, label=label)
        if " to " in name:
            bottom.plot(times, taus, color=line.get_color())
    top.set(ylabel="prompts waiting", title="The same waves of prompts, at four settings of tau")
    top.legend(frameon=False)
    bottom.set(ylabel="tau", xlabel="time, in forwards")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    atomic_write(path, lambda file: figure.savefig(file, dpi=120))


def parse_arguments():
    parser = Parser("Waves of prompts: tau fixed, against tau that falls while prompts wait.")
    common.add_problems(parser)
    common.add_rows(parser, default=8)
    add = parser.add_argument
    gap = number(float, 0.001, 1e6)
    add("--calm", type=gap, default=6, help="mean number of forwards between two prompts")
    add("--burst", type=gap, default=2, help="the same in a burst")
    add("--waves", type=number(int, 1), default=2, help="the second half of each is a burst")
    add("--plot", type=common.plot_file, help="a picture of the queue (needs matplotlib)")
    args = parser.parse_args()
    if args.plot:
        common.require("matplotlib")
    return args


def main() -> None:
    args = parse_arguments()
    problems = common.read_problems(args.data, args.limit)
    if 2 * args.waves > len(problems):
        raise UserError(f"--waves {args.waves}: needs at least {2 * args.waves} problems")
    coming = arrivals(len(problems), args.calm, args.burst, args.waves)
    model, chat = load(args.model, *find_device(args.device, args.dtype))
    prompts = common.encode(chat, problems)
    taus: dict[str, Tau] = {f"{tau:g}": tau for tau in (1.0, 0.95, 0.7, 0.5)}
    for low in (0.7, 0.5):
        taus[f"0.95 to {low:g}"] = falling(0.95, low, args.rows)

    replay(model, prompts[:8], coming[:8], Options(max_new=args.max_new), args.rows)  # start-up
    replays, rows = {}, []
    for name, tau in taus.items():
        options = Options(tau=tau, max_new=args.max_new)
        work = functools.partial(replay, model, prompts, coming, options, args.rows)
        replays[name], seconds = common.timed(work, model.device)
        right = common.accuracy(chat, replays[name].answers, problems)
        rows.append([name, *figures(replays[name], coming), right, f"{seconds:.1f}"])
    print(f"{args.model}, {len(prompts)} problems, {args.rows} rows; time counted in forwards\n")
    head = ["tau", "tokens/time", "mean wait", "in bursts", "longest", "accuracy", "seconds"]
    print(common.table(head, rows))
    if args.plot:
        plot(replays, args.plot)


if __name__ == "__main__":
    run_main(main)
