"""The paper's Tables 5 and 6: what each cache is worth, and what a draft model is worth.

    python -m experiments.paper.tables --table5
    python -m experiments.paper.tables --table6 toy/draft

How it is measured, and what the columns mean: bench/speed.py.

Table 6 (the paper's section 4.6): a draft model proposes K tokens. One forward of the target checks
them, and carries a group of masks for each number of them that may hold. What passes tau in the
group after those that held is accepted at once. That last part makes the composition lossy;
checking the draft is exact. `--verify` needs no draft, and checks in the next forward what the
masks say, too, so its text is that of AR. "AR" in the table is the MARS checkpoint at tau 1, as
target or as draft. Tokens per forward are those of the target's forwards.
"""

import functools

import torch

from bench import common
from bench.speed import Answer, Ours, Way, add_settings, compare
from decode import Decoder, Options, passing_lengths
from experiments.paper.baselines import is_complete, through_end
from kv_cache import KVCache
from lossless import count_held
from model import Qwen2, load
from plumbing.arguments import Parser, find_device
from plumbing.attention import FastForward
from plumbing.errors import UserError, run_main

BLOCK_CACHES = (4, 8, 16, 32, 64, 128, 256)
NUM_PROPOSED = 4  # K


def table5(model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    ways = {"AR": ours(tau=1.0), "MARS, no cache": ours(tau=args.tau)}
    ways["MARS, no cache"].decoder.cache.commit = lambda counts: None  # each forward: all the text
    for size in BLOCK_CACHES:
        ways[f"MARS, B_cache {size}"] = ours(tau=args.tau, block_cache=size)
    ways["MARS, cursor"] = ours(tau=args.tau)
    return ways


def table6(draft: Qwen2, model: Qwen2, rows: int, longest: int, args) -> dict[str, Way]:
    ours = functools.partial(Ours, model, rows, longest, compile=args.compile)
    with_draft = functools.partial(WithDraft, model, draft, longest)
    return {
        "AR draft + AR": with_draft(tau=1.0, draft_tau=1.0),
        "AR": ours(tau=1.0),
        "AR draft + MARS": with_draft(tau=args.tau, draft_tau=1.0),
        "MARS draft + MARS": with_draft(tau=args.tau, draft_tau=args.tau),
        "MARS": ours(tau=args.tau),
        "MARS, verify": ours(verify=True),
    }


class WithDraft:
    """A draft and a target, one answer at a time; each keeps the text in a cache of its own."""

    def __init__(self, target: Qwen2, draft: Qwen2, longest: int, tau: float, draft_tau: float):
        """longest: an upper bound on prompt plus answer. tau: which of the masks' guesses pass."""
        self.target = target
        self.tau = tau
        self.block = 0 if tau == 1 else target.config.block
        self.draft = Decoder(draft, Options(tau=draft_tau), rows=1, longest=longest)
        widest = (NUM_PROPOSED + 1) * (1 + self.block)
        self.cache = KVCache(target.config, 1, longest + widest, target.device, target.dtype)
        self.forward = FastForward(target, self.cache, compile=False)

    def __call__(self, prompts: list[list[int]], max_new: int) -> list[Answer]:
        return [self.answer(prompt, max_new) for prompt in prompts]

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_new: int) -> Answer:
        text = list(prompt)
        num_forwards = 0
        num_positions = 0
        self.cache.begin(0)
        while not is_complete(text[len(prompt) :], self.target, max_new):
            room = max_new - len(text) + len(prompt)
            proposed = self.draft.add(text, max_new=min(NUM_PROPOSED, room))
            for _ in self.draft:
                pass
            accepted, width = self.check(text, proposed.tokens)
            text += accepted
            num_forwards += 1
            num_positions += width
        tokens = through_end(text[len(prompt) :], self.target, max_new)
        return Answer(tokens, None)

    def check(self, text: list[int], proposed: list[int]) -> tuple[list[int], int]:
        """One forward of the target."""
