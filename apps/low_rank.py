"""Train masks at low rank, and hold the model to what it said.

    python -m apps.low_rank --model MODEL --data data.jsonl --out mars

docs/real-model.md makes data.jsonl, of the model's own answers. The blocks of masks and the loop
are train.py's. There all weights learn, and what masks learn changes what the model says. Here:
  * a matrix W becomes W + left @ right, and only these two learn (LoRA, arXiv 2106.09685);
  * of the embedding only the row of `<|mask|>` learns;
  * the loss is noisy + WEIGHT * drift: the cross-entropy of the masks, and KL(original || model)
    of the clean stream's predictions. If masks were trained before, --original names the model
    before that: the drift of all trainings is held, together;
  * a row with `"masks": false` has no masks. That is for answers that were drawn at a temperature:
    masks should guess the likeliest answer.
The model that is saved is an ordinary one.
"""

import functools
import math
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import train
from model import Qwen2, load
from plumbing import checkpoints, processes
from plumbing.arguments import Parser, number
from plumbing.data import Example
from plumbing.errors import UserError, run_main
from train import (
    Recipe,
    Streams,
    fill_forwards,
    hidden_states,
    lay_out,
    training_parser,
    weighted_cross_entropy,
)


def held_inputs(examples: list[Example], recipe: Recipe) -> list[Streams]:
    """As in train.py, but the noisy loss is a mean over masks, and over the examples with masks."""
    num_with_masks = max(1, sum(example.has_masks for example in examples))
    streams = []
    for doc, example in enumerate(examples):
        block = recipe.block if example.has_masks else None
        layout = lay_out(example, replace(recipe, block=block), doc)
        num_masks = layout.is_mask.sum().clamp(min=1)  # 0 if there is only one target
        # No mask predicts the first token of a response, so that does not count.
        noisy_weight = layout.is_mask / num_masks / num_with_masks
        clean_weight = layout.clean_weight / len(examples)
        streams.append(layout._replace(noisy_weight=noisy_weight, clean_weight=clean_weight))
    return fill_forwards(streams, recipe)


@torch.no_grad()
def clean_states(model: Qwen2, inputs: Streams) -> Tensor:
    """Hidden states (R, T, D) of clean tokens, from a causal forward without masks; else 0."""
    at = ~inputs.is_mask & (inputs.doc >= 0)
    docs, row = inputs.doc[at].unique(return_inverse=True)  # row: of each clean position
    pos = inputs.pos[at]
    tokens = pos.new_zeros(len(docs), int(pos.max()) + 1)
    tokens[row, pos] = inputs.tokens[at]
    all_pos = torch.arange(tokens.size(1), device=pos.device).expand_as(tokens)
    hidden = model(tokens, all_pos, None)
    result = hidden.new_zeros(*inputs.pos.shape, hidden.size(-1))
    result[at] = hidden[row, pos]
    return result


def held_losses(model: Qwen2, inputs: Streams, original: Qwen2) -> tuple[Tensor, Tensor]:
    """(noisy, drift): what one forward adds to each loss of its step."""

    def divergence(hidden: Tensor, original_hidden: Tensor) -> Tensor:
        log_probs = model.logits(hidden).log_softmax(-1)
        original_log_probs = original.logits(original_hidden).log_softmax(-1)
        gaps = original_log_probs - log_probs
        gaps = gaps.masked_fill(original_log_probs.isneginf(), 0)  # `<|mask|>`: -inf in both
        return (original_log_probs.exp() * gaps).sum(-1)

    hidden = hidden_states(model, inputs)
    noisy = weighted_cross_entropy(model, hidden, inputs.target, inputs.noisy_weight)
    at = inputs.clean_weight.nonzero(as_tuple=True)
    original_hidden = clean_states(original, inputs)
    each = model.in_chunks(divergence, hidden[at], original_hidden[at])
    return noisy, (each * inputs.clean_weight[at]).sum()


def add_held_gradients(
    model: Qwen2, examples: list[Example], recipe: Recipe, original: Qwen2
) -> Tensor:
    """Add the gradients of a step's loss. Returns (noisy, drift): (2,)."""
    sums = torch.zeros(2, device=model.device)
    for inputs in held_inputs(examples, recipe):
        with processes.arithmetic_in(recipe.dtype, model.device):
            noisy, drift = held_losses(model, inputs.to(model.device), original)
        loss = noisy + recipe.ar_weight * drift
        loss.backward()
        sums += torch.stack([noisy, drift]).detach()
    return sums


# ----------------------------------------------------------------------------------- what learns


def matrices(model: Qwen2) -> list[tuple[str, nn.Linear]]:
    layers = model.model.layers.named_modules(prefix="model.layers")
    return [(name, module) for name, module in layers if isinstance(module, nn.Linear)]


def restrict(model: Qwen2, rank: int) -> None:
    """Freeze all but `left` and `right` of each matrix, and the embedding's row of `<|mask|>`."""
    mask_id = model.config.mask_token_id

    def add_change(linear: nn.Linear, args: tuple[Tensor], y: Tensor) -> Tensor:
        return y + F.linear(F.linear(args[0], linear.right), linear.left)

    def put_row(embedding: nn.Embedding, args: tuple[Tensor], x: Tensor) -> Tensor:
        is_mask = args[0] == mask_id  # (R, T)
        return torch.where(is_mask[..., None], embedding.mask_row.to(x.dtype), x)

    model.requires_grad_(False)
    for _, linear in matrices(model):
        n, m = linear.weight.shape
        K = min(rank, m)
        linear.left = nn.Parameter(torch.zeros(n, K, device=model.device))  # no change at first
        linear.right = nn.Parameter(torch.empty(K, m, device=model.device))
        nn.init.kaiming_uniform_(linear.right, a=math.sqrt(5))  # LoRA's usual start
        linear.register_forward_hook(add_change)
    embedding = model.model.embed_tokens
    embedding.mask_row = nn.Parameter(embedding.weight[mask_id].clone().float())
    embedding.register_forward_hook(put_row)


def merged(model: Qwen2) -> dict[str, Tensor]:
    """The state_dict of an ordinary model that computes the same."""
    weights = checkpoints.whole_weights(model)
    for name, _ in matrices(model):
        change = weights.pop(f"{name}.left") @ weights.pop(f"{name}.right")
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + change
    row = weights.pop("model.embed_tokens.mask_row")
    embedding = weights["model.embed_tokens.weight"].clone()  # not in place: training goes on
    embedding[model.config.mask_token_id] = row
    weights["model.embed_tokens.weight"] = embedding
    return weights


# ------------------------------------------------------------------------------------ command line


def make_parser() -> Parser:
    parser = training_parser("Train masks at low rank, and hold the model to what it said.")
    add = parser.add_argument
    add("--original", metavar="MODEL", help="which model's predictions to hold (default: --model)")
    hold_help = "weight of the clean stream's divergence from them"
    add("--hold", type=number(float, 0, 1e6), default=8.0, metavar="WEIGHT", help=hold_help)
    add("--rank", type=number(int, 1), default=85, help="K, of each matrix's change")
    parser.set_defaults(lr=5e-4)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if dist.is_torchelastic_launched():
        raise UserError("torchrun is for train.py; this runs in one process")
    original, _ = load(args.original or args.model)  # refuses a model without weights, too
    model, recipe, run = train.prepare(args, args.block)
    run.export_weights = merged
    run.second_loss = "drift"
    recipe = replace(recipe, ar_weight=args.hold)
    original.to(model.device, recipe.dtype)
    if original.config.vocab_size != model.config.vocab_size:
        raise UserError(f"--original {args.original}: another vocabulary than --model's")
    if not any(row.has_masks and len(row.response) > 1 for row in run.data.first):
        raise UserError(f"{args.data}: no response has masks to train (too short?)")
    model.to(recipe.dtype)  # only what learns needs float32
    torch.manual_seed(args.seed)
    restrict(model, args.rank)
    held_out = held_inputs(run.data.held_out, recipe)
    backward = functools.partial(add_held_gradients, original=original)
    with run:
        stop = train.train(model, held_out, run, recipe, backward)
    if stop:
        sys.exit(128 + stop)
    train.say_what_next(args, model, recipe, run)


if __name__ == "__main__":
    run_main(main, out_of_memory=train.MEMORY_HINT)
