"""What MARS is compared with: block diffusion, and Jacobi decoding.

    python -m experiments.paper.baselines --model toy/sft --data toy/train.jsonl --steps 9

  * Block diffusion: each token of a block of B becomes a mask with probability t, drawn per
    example. The model sees the earlier blocks as they are and all of this block in both directions
    (MARS sees it causally), and predicts the masked tokens with weight 1/t. As in MARS, each is
    predicted one place to its left. Decoding sets the most confident mask first.
  * Jacobi decoding needs no training. The guesses are what the ordinary model predicted after its
    last guesses, right or wrong. It is lossless.

The command trains block diffusion, by train.py's loop and with its options. (In its log `noisy` is
the loss; the look-ahead is that of MARS's masks, which it does not learn.) With --ar-weight it
trains MARS instead, with another weight of the clean loss than 1.
"""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from decode import Sequence
from model import Qwen2
from plumbing.arguments import number
from plumbing.data import Example
from plumbing.processes import run_main_and_exit
from plumbing.scheduler import num_in_common

# -------------------------------------------------------------------------------- block diffusion


def block_states(model: Qwen2, text: Tensor, prompt_length: int, blocks: Tensor) -> Tensor:
    """Hidden states (N, B, D) that predict the tokens of N blocks (N, B).

    The last block comes after the text, the one before it begins B places earlier, and so on. A
    window is a block and the token before it. It sees the text before it, and all of itself.
    """
    N, B = blocks.shape
    L = len(text)
    text_pos = torch.arange(L, device=text.device)
    first = text_pos[prompt_length - 1 :: B][-N:]  # where the windows begin
    windows = torch.cat([text[first][:, None], blocks], dim=1)  # (N, B + 1)
    window_pos = first[:, None] + torch.arange(B + 1, device=text.device)
    tokens = torch.cat([text, windows.flatten()])  # (T,)
    pos = torch.cat([text_pos, window_pos.flatten()])
    # How much of the text a position sees. In the prompt that is causal, then whole blocks.
    block_end = text_pos + B - (text_pos - prompt_length) % B
    text_prefix = torch.where(text_pos < prompt_length, text_pos + 1, block_end)
    prefix = torch.cat([text_prefix, first.repeat_interleave(B + 1)])
    number = torch.arange(N, device=text.device).repeat_interleave(B + 1)  # of each one's window
    mask = torch.zeros(len(pos), len(pos), dtype=torch.bool, device=text.device)  # [query, key]
    mask[:, :L] = text_pos < prefix[:, None]
    mask[L:, L:] = number == number[:, None]
    hidden = model(tokens[None], pos[None], mask[None, None])[0, L:]
    return hidden.unflatten(0, windows.shape)[:, :-1]  # the last of a window predicts nothing


def draw_noise(num_tokens: int) -> tuple[float, Tensor]:
    """t, and which of the tokens are masked."""
    t = 0.001 + 0.999 * torch.rand(()).item()
    return t, torch.rand(num_tokens) < t


def diffusion_loss(model: Qwen2, example: Example) -> Tensor:
    """The mean over the targets; end tokens, which are targets, too, fill up the last block."""
    block = model.config.block
    start = example.prompt_length
    num_targets = len(example.response)
    num_padding = -num_targets % block
    tokens = torch.tensor(example.tokens + [example.tokens[-1]] * num_padding, device=model.device)
    t, masked = draw_noise(len(tokens))
    masked = masked.to(model.device)
    noisy = torch.where(masked, model.config.mask_token_id, tokens)
    blocks = noisy[start:].view(-1, block)
    hidden = block_states(model, tokens[:-block], start, blocks).flatten(0, 1)
    at = masked[start:]
    total = F.cross_entropy(model.logits(hidden[at]), tokens[start:][at], reduction="sum")
    return total / t / num_targets


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
        answer.take([], width=len(prompt))  # a forward that gives nothing
    while not answer.done:
        text = torch.tensor(answer.token_ids, device=model.device)
        block = [mask_id] * model.config.block
        for _ in range(len(block)):
            blocks = torch.tensor([block], device=model.device)
            [hidden] = block_states(model, text, len(prompt), blocks)
            confidence, tokens = model.logits(hidden).softmax(-1).max(-1)
            open_places = [i for i, token in enumerate(block) if token == mask_id]
            best = max(open_places, key=lambda i: confidence[i])
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
        num_held = num_in_common(predicted, guesses)
        answer.take(predicted[: num_held + 1], width=1 + len(guesses))
        guesses = predicted[num_held + 1 :]
        while len(guesses) < num_guesses:  # any guess will do
            guesses.append(predicted[-1])
    return answer


# ----------------------------------------------------------------------------------- command line


def weighted_gradients(
    model: Qwen2, examples: list[Example], recipe: train.Recipe, ar_weight: float
) -> Tensor:
    """MARS's, with another weight of the clean loss."""
    return train.add_gradients(model, examples, replace(recipe, ar_weight=ar_weight))


def main() -> None:
    parser = train.make_parser()
    weight_help = "train MARS, with this weight of the clean loss"
    parser.add_argument("--ar-weight", type=number(float, 0, 1e6), help=weight_help)
    args = parser.parse_args()
    gradients = diffusion_gradients
    if args.ar_weight is not None:
        gradients = functools.partial(weighted_gradients, ar_weight=args.ar_weight)
    train.main(args, gradients)


if __name__ == "__main__":
    run_main_and_exit(main, out_of_memory="use a smaller --max-length")
