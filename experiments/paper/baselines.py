"""What MARS is compared with: block diffusion, 1/t weights, Jacobi decoding.

    python -m experiments.paper.baselines diffusion --data toy/train.jsonl --steps 30 ...
    python -m experiments.paper.baselines over-t --data toy/train.jsonl --ar-weight 0 ...

The two that need training are train.py with a few functions replaced, and take its options.

  * diffusion: the response is cut into blocks of B tokens. Each token of a block becomes a mask
    with probability t, drawn per example. The model sees the earlier blocks as they are and all of
    this block in both directions (MARS sees it causally), and predicts the masked tokens with
    weight 1/t. The output is shifted right, as in MARS and in the paper's code, so the window of a
    block begins with the token before the block. Decoding takes one forward for the prompt, then
    one per token, the most confident mask first, and after each block one that puts it into the
    cache.
  * over-t: MARS, with the loss of every example multiplied by 1/t, t uniform in (0.001, 1). The
    paper's code does this where it leaves out the clean loss.
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.
"""

import random
import sys
from unittest import mock

import torch
from torch import Tensor

import train
from decode import Decoder, Options, Sequence
from kv_cache import KVCache
from lossless import count_held
from model import Qwen2, visible
from plumbing.data import Example
from plumbing.errors import UserError, run_main
from plumbing.packing import round_up
from train import Batch

# -------------------------------------------------------------------------------- block diffusion


def noise(example: Example, num_tokens: int) -> tuple[float, Tensor]:
    """t, and which of the first num_tokens tokens are masked.

    They follow from the example and its block phase, which most often differs in the next epoch.
    """
    rng = random.Random(f"{example.tokens} {example.phase}")
    t = rng.uniform(0.001, 1)
    masked = [rng.random() < t for _ in range(num_tokens)]
    return t, torch.tensor(masked)


def diffusion_length(example: Example, block_size: int) -> int:
    return len(diffusion_layout(example, block_size, mask_id=0, weight=1.0).tokens)


def diffusion_layout(
    example: Example, block_size: int, mask_id: int, weight: float, doc: int = 0
) -> Batch:
    """[clean; a window of B + 1 per block]. Column 0 of a window is the clean token before it.

    The end token is repeated up to the end of the last block, and a target each time.
    """
    prompt = example.prompt
    num_targets = round_up(example.targets, block_size)
    num_padding = num_targets - example.targets
    x = torch.tensor(example.tokens + [example.tokens[-1]] * num_padding)

    # Clean stream: causal in the prompt, whole blocks after it. No window sees the last block.
    clean = torch.arange(len(x) - block_size)
    block_end = clean + block_size - (clean - prompt) % block_size
    clean_prefix = torch.where(clean < prompt, clean + 1, block_end)

    t, masked = noise(example, len(x))
    column = torch.arange(block_size + 1).repeat(num_targets // block_size)
    first = torch.arange(prompt - 1, len(x) - 1, block_size).repeat_interleave(block_size + 1)
    pos = first + column
    following = (pos + 1).clamp(max=len(x) - 1)  # the last column has no target and weight 0
    is_target = masked[following] & (column < block_size)
    return Batch(
        tokens=torch.cat([x[clean], torch.where(masked[pos] & (column > 0), mask_id, x[pos])]),
        pos=torch.cat([clean, pos]),
        prefix=torch.cat([clean_prefix, first]),
        doc=torch.full((len(clean) + len(pos),), doc),
        target=torch.cat([x[clean], x[following]]),
        noisy_weight=torch.cat([torch.zeros(len(clean)), torch.where(is_target, weight / t, 0.0)]),
        clean_weight=torch.zeros(len(clean) + len(pos)),
    )


def diffusion_mask(batch: Batch) -> Tensor:
    """`visible`, except that each position of a window sees what the last position may see."""
    in_window = batch.prefix <= batch.pos
    q_pos = torch.where(in_window, batch.pos.max(), batch.pos)
    queries = [field[:, None, :, None] for field in (q_pos, batch.prefix, batch.doc)]
    keys = [field[:, None, None, :] for field in (batch.pos, batch.prefix, batch.doc)]
    return visible(*queries, *keys)


def diffusion_states(model: Qwen2, batch: Batch) -> Tensor:
    return model(batch.tokens, batch.pos, diffusion_mask(batch))


def forward(
    model: Qwen2, cache: KVCache, tokens: Tensor, prefix: Tensor, rows: slice = slice(None)
) -> Tensor:
    """Hidden states of tokens (R, T) after the cached ones; each sees `prefix` (R, T) tokens."""
    pos = cache.reserve(tokens.size(1), rows)
    return model(tokens, pos, cache.mask(pos, prefix), cache)


def fill_blocks(model: Qwen2, cache: KVCache, last: Tensor, prefix: Tensor) -> Tensor:
    """The next block of each row (R, B): B forwards, each sets a row's most confident mask.

    last (R, 1): the token before the block. prefix (R, 1): where the block ends.
    """
    block_size = model.config.block_size
    mask_id = model.config.mask_token_id
    blocks = torch.full((len(last), block_size), mask_id, device=model.device)
    for _ in range(block_size):
        window = torch.cat([last, blocks], dim=1)  # (R, B + 1)
        hidden = forward(model, cache, window, prefix.expand_as(window))
        logits = model.logits(hidden[:, :-1].flatten(0, 1))
        confidence, token = logits.softmax(-1).max(-1)
        confidence = confidence.view_as(blocks).masked_fill(blocks != mask_id, -1)
        best = confidence.argmax(-1, keepdim=True)
        blocks.scatter_(1, best, token.view_as(blocks).gather(1, best))
    return blocks


def diffuse(
    model: Qwen2, prompts: list[list[int]], rows: int, max_new: int = 256
) -> list[Sequence]:
    answers = [Sequence(prompt, model.config, max_new, tau=None) for prompt in prompts]
    for first in range(0, len(answers), rows):
        diffuse_together(model, answers[first : first + rows])
    return answers


@torch.inference_mode()
def diffuse_together(model: Qwen2, answers: list[Sequence]) -> None:
    block_size = model.config.block_size
    capacity = max(len(answer.text) + answer.max_new for answer in answers) + 2 * block_size
    cache = KVCache(model.config, len(answers), capacity, model.device, model.dtype)
    for row, answer in enumerate(answers):  # all but the last token, which opens the first window
        if len(answer.text) > 1:
            tokens = torch.tensor([answer.text[:-1]], device=model.device)
            causal = torch.arange(1, len(answer.text), device=model.device)[None]
            forward(model, cache, tokens, causal, slice(row, row + 1))
            cache.commit([len(answer.text) - 1])
            answer.accepted.append(0)  # a forward that gives no token

    while not all(answer.done for answer in answers):
        last = torch.tensor([answer.text[-1:] for answer in answers], device=model.device)
        start = torch.tensor(cache.lengths, device=model.device)[:, None] + 1
        end = start + block_size
        blocks = fill_blocks(model, cache, last, end)
        # Once more as clean tokens. The last of them is not kept: it opens the next window.
        window = torch.cat([last, blocks], dim=1)
        prefix = torch.cat([start, end.expand_as(blocks)], dim=1)
        forward(model, cache, window, prefix)
        cache.commit([block_size] * len(answers))
        for answer, block in zip(answers, blocks.tolist()):
            if not answer.done:
                answer.take(block, num_positions=block_size + 1)
                answer.accepted += [0] * block_size  # the block took B + 1 forwards


# ----------------------------------------------------------------------------------------- over t

target_weights = train.target_weights  # before it is replaced


def over_t(examples: list[Example], normalization: str) -> list[float]:
    weights = target_weights(examples, normalization)
    return [weight / noise(example, 0)[0] for weight, example in zip(weights, examples)]


# ----------------------------------------------------------------------------------------- Jacobi


class Jacobi(Decoder):
    """Checks guesses that no mask made: what the model predicted after its last guesses."""

    def __init__(self, model: Qwen2, num_guesses: int, rows: int, longest: int, max_new: int):
        options = Options(tau=1.0, block=num_guesses, max_new=max_new)  # tau 1: no masks
        super().__init__(model, options, rows, longest)

    def feed(self, sequence: Sequence, num_cached: int, mask_id: int) -> list[tuple[int, int, int]]:
        """See Sequence.feed: what the cache lacks of the text, then the guesses, as real tokens."""
        text = sequence.text + sequence.guesses
        return [(text[pos], pos, pos + 1) for pos in range(num_cached, len(text))]

    def decide(
        self, hidden: Tensor, last_columns: list[int], batch: list[Sequence | None]
    ) -> list[tuple[list[int], int]]:
        """See Decoder.decide. The sequences get their next guesses."""
        columns = torch.tensor(last_columns, device=hidden.device)[:, None]
        columns = columns + torch.arange(self.block + 1, device=hidden.device)
        predicted = self.forward.logits_at(hidden, columns).argmax(-1).tolist()
        decisions = []
        for sequence, tokens in zip(batch, predicted):
            if sequence is None:
                decisions.append(([], 0))
                continue
            after_guesses = tokens[: len(sequence.guesses) + 1]
            held = count_held(after_guesses, sequence.guesses)
            decisions.append((after_guesses[: held + 1], held))
            sequence.guesses = after_guesses[held + 1 :]
            while len(sequence.guesses) < self.block:  # any guess will do
                sequence.guesses.append(after_guesses[-1])
        return decisions


def jacobi(
    model: Qwen2, prompts: list[list[int]], num_guesses: int, rows: int, max_new: int = 256
) -> list[Sequence]:
    longest = max(map(len, prompts)) + max_new
    decoder = Jacobi(model, num_guesses, rows, longest, max_new)
    answers = [decoder.add(prompt) for prompt in prompts]
    for _ in decoder:
        pass
    return answers


# ------------------------------------------------------------------------------- the command line

REPLACED = {
    "diffusion": {
        "lay_out": diffusion_layout,
        "stream_length": diffusion_length,
        "hidden_states": diffusion_states,
    },
    "over-t": {"target_weights": over_t},
}


def main() -> None:
    names = "|".join(REPLACED)
    if len(sys.argv) < 2 or sys.argv[1] not in REPLACED:
        raise UserError(
            f"usage: python -m experiments.paper.baselines {names} [options of train.py]"
        )
    baseline = sys.argv.pop(1)
    with mock.patch.multiple(train, **REPLACED[baseline]):
        train.main()


if __name__ == "__main__":
    run_main(main)
