"""What MARS is compared with: block diffusion, Jacobi decoding, the loss of the paper's code.

    python bench/controls.py diffusion --model toy/sft --data toy/train.jsonl --steps 30
    python bench/controls.py over-t --ar-weight 0 --model toy/sft --data toy/train.jsonl --steps 30

Each is train.py with a few functions exchanged, and takes its options.

  * diffusion: a block of B tokens, counted from the response's first, is noised: a token becomes a
    mask with probability t, drawn per example. The model sees the blocks before as they are, all of
    this one whatever the order (that is what MARS does without), and recovers what was masked;
    weight 1/t. Its output is right-shifted, as in the paper's code and in MARS: so a block's window
    begins with the token before it. To decode: a forward per token, the surest mask first, and
    one behind every block that puts it into the cache.
  * over-t: MARS with every example's loss weighted by 1/t, t uniform in (0.001, 1). The paper's
    code does this where it leaves out the clean loss.
  * Jacobi decoding needs no training: guesses are what the ordinary model said behind the last
    guesses, wrong ones too. Lossless.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

import train
from decode import Answer, Decoder, Options, logits_at
from kv_cache import KVCache
from model import Qwen2, run, visible
from train import Batch, Example

# -------------------------------------------------------------------------------- block diffusion


def noise(example: Example) -> tuple[float, Tensor]:
    """t, and which tokens are masked: functions of the example, the same in every epoch."""
    rng = random.Random(str(example.tokens))
    t = rng.uniform(0.001, 1)
    masked = [rng.random() < t for _ in example.tokens]
    return t, torch.tensor(masked)


def padded(example: Example, block_size: int) -> Tensor:
    """Whole blocks: behind the end there are more ends, which are targets, too."""
    return torch.tensor(example.tokens + [example.tokens[-1]] * (-example.targets % block_size))


def diffusion_length(example: Example, block_size: int) -> int:
    blocks = -(-example.targets // block_size)
    return example.prompt + (blocks - 1) * block_size + blocks * (block_size + 1)


def diffusion_layout(
    example: Example, block_size: int, mask_id: int, weight: float, doc: int = 0
) -> Batch:
    """[clean ; a window of B + 1 per block]. Column 0 of a window is the clean token before it."""
    x, prompt, B = padded(example, block_size), example.prompt, block_size
    pos = torch.arange(len(x) - B)  # the last block has no successor that would see it
    block_end = pos + B - (pos - prompt) % B
    start = torch.where(pos < prompt, pos + 1, block_end)
    zero = 0.0 * pos
    clean = Batch(x[: len(pos)], pos, start, 0 * pos + doc, x[: len(pos)], zero, zero, 0 * pos)

    t, masked = noise(example)
    masked = torch.cat([masked, masked.new_ones(len(x) - len(masked))])
    column = torch.arange(B + 1).repeat(example.targets // B + (example.targets % B > 0))
    pos = torch.arange(prompt - 1, len(x) - 1, B).repeat_interleave(B + 1) + column
    noised = torch.where(masked[pos] & (column > 0), mask_id, x[pos])
    following = (pos + 1).clamp(max=len(x) - 1)
    weights = torch.where(masked[following] & (column < B), weight / t, 0.0)
    windows = Batch(
        noised, pos, pos - column, 0 * pos + doc, x[following], weights, 0 * weights, 0 * pos
    )
    return Batch(*map(torch.cat, zip(clean, windows)))


def diffusion_mask(batch: Batch) -> Tensor:
    """`visible`, but a window's positions see all of it: as if every one were its last."""
    in_window = batch.start <= batch.pos
    queries = (torch.where(in_window, batch.pos.max(), batch.pos), batch.start, batch.doc)
    keys = (batch.pos, batch.start, batch.doc)
    queries = (field[:, None, :, None] for field in queries)
    return visible(*queries, *(field[:, None, None, :] for field in keys))


def diffusion_states(model: Qwen2, batch: Batch) -> Tensor:
    return model(batch.tokens, batch.pos, diffusion_mask(batch))


@torch.inference_mode()
def diffuse(model: Qwen2, prompts: list[list[int]], max_new: int = 256) -> list[list[int]]:
    """The answers' tokens; every forward unmasks the surest token of each row's block."""
    B, mask_id = model.config.block_size, model.config.mask_token_id
    stop = set(model.config.eos_token_id)
    capacity = max(map(len, prompts)) + max_new + 2 * B
    cache = KVCache(
        model.config, len(prompts), capacity, model.device, model.model.norm.weight.dtype
    )
    texts = [list(prompt) for prompt in prompts]

    def forward(feeds: list[list[int]], end: Tensor, where=slice(None)) -> Tensor:
        """Of tokens behind what is cached; their positions see everything before `end` (R, T)."""
        tokens = torch.tensor(feeds, device=model.device)
        cached = torch.tensor(cache.lengths[where], device=model.device)[:, None]
        pos = cached + torch.arange(tokens.size(1), device=model.device)
        cache.reserve(tokens.size(1), where)
        return model(tokens, pos, cache.mask(pos, end.expand_as(pos)), cache)

    for row, prompt in enumerate(prompts):  # all but the last token, which is in the first window
        if prompt[:-1]:
            causal = torch.arange(1, len(prompt), device=model.device)
            forward([prompt[:-1]], causal, slice(row, row + 1))
            cache.commit([len(prompt) - 1])
    done = False
    while not done:
        ends = torch.tensor([len(text) + B for text in texts], device=model.device)[:, None]
        blocks = torch.full((len(texts), B), mask_id, device=model.device)
        last = [text[-1:] for text in texts]
        for _ in range(B):
            window = [token + block for token, block in zip(last, blocks.tolist())]
            logits = model.logits(forward(window, ends)[:, :-1].flatten(0, 1))
            confidence, token = logits.float().softmax(-1).max(-1)
            confidence = confidence.view_as(blocks).masked_fill(blocks != mask_id, -1)
            surest = confidence.argmax(-1, keepdim=True)
            blocks.scatter_(1, surest, token.view_as(blocks).gather(1, surest))
        # Once more as clean tokens, which no mask has seen; the last of them is the next window's.
        whole = [token + block for token, block in zip(last, blocks.tolist())]
        own = torch.cat([ends - B, ends.expand(-1, B)], dim=1)
        forward(whole, own)
        cache.commit([B] * len(texts))
        texts = [text + block for text, block in zip(texts, blocks.tolist())]
        news = [text[len(prompt) :] for text, prompt in zip(texts, prompts)]
        done = all(len(new) >= max_new or stop & set(new) for new in news)
    ends = [min([new.index(e) + 1 for e in stop if e in new], default=max_new) for new in news]
    return [new[: min(end, max_new)] for new, end in zip(news, ends)]


def diffusion_forwards(answer: list[int], block_size: int) -> int:
    """That an answer takes: its prompt, one per token of its blocks, and one between two blocks."""
    return -(-len(answer) // block_size) * (block_size + 1)


# ----------------------------------------------------------------------------------------- over t


def over_t(examples: list[Example], normalization: str) -> list[float]:
    weights = paper_weights(examples, normalization)
    return [weight / noise(example)[0] for weight, example in zip(weights, examples)]


paper_weights = train.target_weights

# ----------------------------------------------------------------------------------------- Jacobi


class Jacobi(Decoder):
    """Guesses that no mask made: what the model itself said behind its last guesses."""

    def __init__(self, model: Qwen2, prompts: list[list[int]], guesses: int, rows=8, **options):
        options = Options(tau=1.0, verify=True, block=guesses, **options)  # no masks at tau 1
        answers = [Answer(prompt, model, options, i) for i, prompt in enumerate(prompts)]
        super().__init__(model, answers, options, rows)

    def check(self, hidden: Tensor, last: Tensor, batch: list[Answer | None]) -> list[tuple]:
        decided, W = super().check(hidden, last, batch), self.options.block
        said = logits_at(self.model, hidden, last + torch.arange(W + 1, device=last.device))
        said = said.argmax(-1).tolist()
        result = []
        for answer, row, (tokens, _, held) in zip(batch, said, decided):
            said_of_guesses = row[: len(answer.guesses) + 1] if answer else row
            guesses = said_of_guesses[held + 1 :]
            guesses += said_of_guesses[-1:] * (W - len(guesses))  # something must stand there
            result.append((tokens, guesses, held))
        return result


ARMS = {
    "diffusion": {
        "lay_out": diffusion_layout,
        "stream_length": diffusion_length,
        "hidden_states": diffusion_states,
    },
    "over-t": {"target_weights": over_t},
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in ARMS:
        raise train.UserError(f"usage: {sys.argv[0]} {'|'.join(ARMS)} [options of train.py]")
    for name, function in ARMS[sys.argv.pop(1)].items():
        setattr(train, name, function)
    train.main()


if __name__ == "__main__":
    run(main)
