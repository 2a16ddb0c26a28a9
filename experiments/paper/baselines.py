"""What MARS is compared with: block diffusion, and Jacobi decoding.

    python -m experiments.paper.baselines --model toy/sft --data toy/train.jsonl --steps 9

  * Block diffusion: the response is cut into blocks of B tokens. Each token of a block becomes a
    mask with probability t, drawn per example. The model sees the earlier blocks as they are and
    all of this block in both directions (MARS sees it causally), and predicts the masked tokens
    with weight 1/t. The output is shifted right, as in MARS and in the paper's code, so the window
    of a block begins with the token before the block. Decoding takes one forward for the prompt,
    then one per token, the most confident mask first, and after each block one that puts it into
    the cache.
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.

The command above trains block diffusion, by train.py's loop and with its options. (In its log
`noisy` is the loss; the look-ahead is that of MARS's masks, which it does not learn.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from model import Qwen2, visible
from plumbing.data import Example
from plumbing.processes import run_main_and_exit
from plumbing.scheduler import Sequence, num_in_common

# -------------------------------------------------------------------------------- block diffusion


def prefix_of_clean(pos: Tensor, prompt: int, block: int) -> Tensor:
    """How many tokens the clean ones see: causal in the prompt, whole blocks after it."""
    block_end = pos + block - (pos - prompt) % block
    return torch.where(pos < prompt, pos + 1, block_end)


def window_states(
    model: Qwen2, text: Tensor, prompt: int, windows: Tensor, first: Tensor
) -> Tensor:
    """Hidden states (N, B, D) that predict the tokens of N blocks.

    text: what is clean. windows (N, B + 1): the token before a block, then the block. first (N,):
    the position of that token; its window sees the text before it, and all of itself.
    """
    clean = torch.arange(len(text), device=text.device)
    window_pos = first[:, None] + torch.arange(windows.size(1), device=text.device)
    pos = torch.cat([clean, window_pos.flatten()])
    window_prefix = first.repeat_interleave(windows.size(1))
    prefix = torch.cat([prefix_of_clean(clean, prompt, windows.size(1) - 1), window_prefix])
    q_pos = torch.where(prefix <= pos, pos.max(), pos)  # in a window: that of its last token
    mask = visible(q_pos[:, None], prefix[:, None], 0, pos, prefix, 0)
    tokens = torch.cat([text, windows.flatten()])
    hidden = model(tokens[None], pos[None], mask[None, None])[0, len(text) :]
    return hidden.unflatten(0, windows.shape)[:, :-1]  # the last token predicts nothing


def draw_noise(num_tokens: int) -> tuple[float, Tensor]:
    """t, and which of the tokens are masked."""
    t = 0.001 + 0.999 * torch.rand(()).item()
    return t, torch.rand(num_tokens) < t


def diffusion_loss(model: Qwen2, example: Example) -> Tensor:
    """The mean over the example's targets.

    The end token is repeated up to the end of the last block, and a target each time.
    """
    block = model.config.block
    num_padding = -example.num_targets % block
    tokens = torch.tensor(example.tokens + [example.tokens[-1]] * num_padding, device=model.device)
    t, masked = draw_noise(len(tokens))
    masked = masked.to(model.device)
    noisy = torch.where(masked, model.config.mask_token_id, tokens)
    first = torch.arange(example.prompt_length - 1, len(tokens) - 1, block, device=model.device)
    blocks = noisy[example.prompt_length :].view(-1, block)
    windows = torch.cat([tokens[first][:, None], blocks], dim=1)
    text = tokens[:-block]  # no window sees the last block
    hidden = window_states(model, text, example.prompt_length, windows, first).flatten(0, 1)
    at = masked[example.prompt_length :]
    target = tokens[example.prompt_length :][at]
    total = F.cross_entropy(model.logits(hidden[at]), target, reduction="sum")
    return total / t / example.num_targets


def diffusion_gradients(model: Qwen2, examples: list[Example], recipe: train.Recipe) -> Tensor:
    """What `train.add_gradients` is for MARS: the loss, and 0 for the clean stream's."""
    total = torch.zeros(2, device=model.device)
    for example in examples:
        loss = diffusion_loss(model, example) / len(examples)
        loss.backward()
        total[0] += loss.detach()
    return total


@torch.inference_mode()
def diffuse(model: Qwen2, prompt: list[int], max_new: int = 256) -> Sequence:
    """An answer, block after block: each forward sets the block's most confident mask.

    Nothing is cached here. Forwards are counted as if it were: one for the prompt, unless it is the
    single token that opens the first window; and for each block one more than its tokens.
    """
    mask_id = model.config.mask_token_id
    answer = Sequence(prompt, model.config, max_new, tau=None)
    if len(prompt) > 1:
        answer.take([], width=len(prompt))
    while not answer.done:
        block = [mask_id] * model.config.block
        for _ in range(len(block)):
            text = torch.tensor(answer.token_ids, device=model.device)
            window = torch.tensor([answer.token_ids[-1:] + block], device=model.device)
            first = torch.tensor([len(text) - 1], device=model.device)
            [hidden] = window_states(model, text, len(prompt), window, first)
            confidence, tokens = model.logits(hidden).softmax(-1).max(-1)
            is_set = torch.tensor(block, device=model.device) != mask_id
            best = confidence.masked_fill(is_set, -1).argmax().item()
            block[best] = tokens[best].item()
            answer.take([], width=1 + len(block))
        answer.take(block, width=len(block))
    return answer


# ----------------------------------------------------------------------------------------- Jacobi


@torch.inference_mode()
def jacobi(model: Qwen2, prompt: list[int], num_guesses: int, max_new: int = 256) -> Sequence:
    """An answer; each forward checks what the last one predicted after its guesses. No cache."""
    answer = Sequence(prompt, model.config, max_new, tau=None)
    guesses = []
    while not answer.done:
        tokens = torch.tensor([answer.token_ids + guesses], device=model.device)
        positions = torch.arange(tokens.size(1), device=model.device)[None]
        hidden = model(tokens, positions, None)[0, len(answer.token_ids) - 1 :]
        predicted = model.logits(hidden).argmax(-1).tolist()
        held = num_in_common(predicted, guesses)
        answer.take(predicted[: held + 1], width=1 + len(guesses))
        guesses = predicted[held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return answer


def main() -> None:
    train.main(diffusion_gradients)


if __name__ == "__main__":
    run_main_and_exit(main, out_of_memory="use a smaller --max-length")
