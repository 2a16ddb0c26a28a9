"""Train masks along a few directions that clean tokens hardly use: the model says what it said.

    python -m apps.low_rank --model MODEL --data data.jsonl --out mars

docs/real-model.md makes data.jsonl, of the model's own answers. The blocks of masks and the loop
are train.py's. There all weights learn, and what masks learn changes what the model says. Here:
  * a matrix W becomes W + left @ right, and only `left` learns. The K rows of `right` are
    directions of W's input: a change along these is felt by masks, and hardly by clean tokens;
  * of the embedding only the row of `<|mask|>` learns;
  * the loss is noisy + WEIGHT * drift: the cross-entropy of the masks, and KL(original || model)
    of the clean stream's predictions. If masks were trained before, --original names the model
    before that: the drift of all trainings is held, together;
  * a row with `"masks": false` has no masks. That is for answers that were drawn at a temperature:
    masks should guess the likeliest answer.
The model that is saved is an ordinary one. To find the directions takes 8 bytes per layer and
squared intermediate_size, 5 GiB for a 0.5B.
"""

import functools
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
from plumbing.data import Dataset, Example
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

PENALTY = 10  # how much more a clean token's change counts than a mask's
NUM_MEASURED = 60  # examples from which the directions are found


def forward_inputs(examples: list[Example], recipe: Recipe) -> list[Streams]:
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


def losses(model: Qwen2, inputs: Streams, original: Qwen2) -> tuple[Tensor, Tensor]:
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


def add_gradients(model: Qwen2, examples: list[Example], recipe: Recipe, original: Qwen2) -> Tensor:
    """Add the gradients of a step's loss. Returns (noisy, drift): (2,)."""
    sums = torch.zeros(2, device=model.device)
    for inputs in forward_inputs(examples, recipe):
        with processes.arithmetic_in(recipe.dtype, model.device):
            noisy, drift = losses(model, inputs.to(model.device), original)
        loss = noisy + recipe.ar_weight * drift
        loss.backward()
        sums += torch.stack([noisy, drift]).detach()
    return sums


# ----------------------------------------------------------------------------------- what learns


def matrices(model: Qwen2) -> list[tuple[str, nn.Linear]]:
    layers = model.model.layers.named_modules(prefix="model.layers")
    return [(name, module) for name, module in layers if isinstance(module, nn.Linear)]


def restrict(model: Qwen2, rank: int) -> None:
    """Freeze all but `left` of each matrix, and the embedding's row of `<|mask|>`."""
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
        linear.left = nn.Parameter(torch.zeros(n, K, device=model.device))
        linear.register_buffer("right", torch.zeros(K, m, device=model.device))
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


@torch.no_grad()
def second_moments(model: Qwen2, forwards: list[Streams], of_masks: bool) -> dict[str, Tensor]:
    """The mean of x xᵀ (m, m) of each matrix's input x, over all masks or over all clean tokens."""
    sums = {}
    hooks = []
    count = 0
    for name, linear in matrices(model):
        m = linear.in_features
        sums[name] = torch.zeros(m, m, device=model.device)

        def add(_, args: tuple[Tensor], total: Tensor = sums[name]) -> None:
            x = args[0][at].float()  # (R, T, m) to (N, m)
            total.addmm_(x.T, x)

        hooks.append(linear.register_forward_pre_hook(add))
    for inputs in forwards:
        inputs = inputs.to(model.device)
        at = (inputs.is_mask == of_masks) & (inputs.doc >= 0)  # (R, T)
        count += int(at.sum())
        hidden_states(model, inputs)
    for hook in hooks:
        hook.remove()
    return {name: total.div_(count) for name, total in sums.items()}


def free_directions(clean: Tensor, masks: Tensor, rank: int) -> Tensor:
    """`right` (K, m), from the second moments of a matrix's input.

    For a direction v, let s be the mean of (v x)² at masks over that at clean tokens. The rows are
    the directions of the largest s. Adam moves all of `left` equally fast, so a row's length says
    how much a step changes along it: (v x)² has the mean s / (s + PENALTY) at masks, and
    1 / (s + PENALTY) at clean tokens.
    """
    squares = clean.diagonal()  # of some inputs a million times those of others, of some 0
    clean = clean + 0.01 * (squares + squares.median()).diag()  # so that it has a root
    root = torch.linalg.cholesky(clean)  # clean = root @ root.T
    half = torch.linalg.solve_triangular(root, masks, upper=False)
    relative = torch.linalg.solve_triangular(root, half.T, upper=False)  # root⁻¹ masks root⁻ᵀ
    # All eigenvectors (eigh) of a 0.5B's largest matrices would take a quarter of an hour.
    vectors, ratios, _ = torch.svd_lowrank(relative, q=min(2 * rank, len(masks)), niter=8)
    vectors = vectors[:, :rank] / (ratios[:rank] + PENALTY).sqrt()
    return torch.linalg.solve_triangular(root.T, vectors, upper=True).T


def find_directions(model: Qwen2, data: Dataset, recipe: Recipe) -> None:
    """Fill each matrix's `right`, from the first examples of the data."""
    examples = list(data.examples(data.training[:NUM_MEASURED]))
    forwards = forward_inputs(examples, recipe)
    if not any(inputs.is_mask.any() for inputs in forwards):
        raise UserError(f"{data.rows.path}: no masks in {NUM_MEASURED} examples (too short?)")
    processes.say("looking for directions: on a CPU a minute for 135 M parameters, many for a 0.5B")
    with processes.arithmetic_in(recipe.dtype, model.device):
        clean = second_moments(model, forwards, of_masks=False)
        masks = second_moments(model, forwards, of_masks=True)
    for name, linear in matrices(model):
        linear.right.copy_(free_directions(clean[name], masks[name], len(linear.right)))


# ------------------------------------------------------------------------------------ command line


def make_parser() -> Parser:
    parser = training_parser("Train masks along directions that clean tokens hardly use.")
    add = parser.add_argument
    add("--original", metavar="MODEL", help="which model's predictions to hold (default: --model)")
    hold_help = "weight of the clean stream's divergence from them"
    add("--hold", type=number(float, 0, 1e6), default=8.0, metavar="WEIGHT", help=hold_help)
    add("--rank", type=number(int, 1), default=85, help="K, directions per matrix")
    parser.set_defaults(lr=3e-4)
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
    model.to(recipe.dtype)  # only what learns needs float32
    restrict(model, args.rank)
    if not run.progress["step"]:  # else its checkpoint has the directions
        torch.manual_seed(args.seed)  # of svd_lowrank
        find_directions(model, run.data, recipe)
    held_out = forward_inputs(run.data.held_out, recipe)
    backward = functools.partial(add_gradients, original=original)
    with run:
        stop = train.train(model, held_out, run, recipe, backward)
    if stop:
        sys.exit(128 + stop)
    train.say_what_next(args, model, recipe, run)


if __name__ == "__main__":
    run_main(main, out_of_memory=train.MEMORY_HINT)
