"""Train masks along a few directions that clean tokens hardly use: the model says what it said.

    python -m apps.low_rank --model MODEL --data data.jsonl --hold 8 --out mars

The options, the loss and the loop are train.py's; docs/real-model.md makes data.jsonl. In train.py
all weights learn, and they serve clean tokens, too: what masks learn changes what the model says.
What is different here:
  * a matrix W becomes W + left @ right, and only `left` is trained. The K rows of `right` are
    directions of W's input: a change along these is felt by masks, and hardly by clean tokens;
  * of the embedding only the row of `<|mask|>` is trained.
The model that is saved is an ordinary one. To find the directions takes 8 bytes per layer and
squared intermediate_size, 5 GiB for a 0.5B.
"""

import sys

if not __package__:
    import as_file  # noqa: F401 - says how to run it, and exits

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import train
from model import Qwen2
from plumbing import checkpoints, processes
from plumbing.arguments import find_device, number
from plumbing.data import Dataset
from plumbing.errors import UserError, run_main

PENALTY = 10  # how much more a clean token's change counts than a mask's
NUM_MEASURED = 60  # examples from which the directions are found


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
def second_moments(
    model: Qwen2, forwards: list[train.Streams], of_masks: bool
) -> dict[str, Tensor]:
    """The mean of x xᵀ (m, m) of each matrix's input x, over all masks or over all clean tokens."""
    sums = {}
    hooks = []
    count = 0
    for name, linear in matrices(model):
        m = linear.in_features
        sums[name] = torch.zeros(m, m, device=model.device)

        def add(_, args: tuple[Tensor], total: Tensor = sums[name]) -> None:
            x = args[0][picked].float()  # (R, T, m) to (N, m)
            total.addmm_(x.T, x)

        hooks.append(linear.register_forward_pre_hook(add))
    for inputs in forwards:
        inputs = inputs.to(model.device)
        is_clean = ~inputs.is_mask & (inputs.doc >= 0)
        picked = inputs.is_mask if of_masks else is_clean  # (R, T)
        count += int(picked.sum())
        train.hidden_states(model, inputs)
    for hook in hooks:
        hook.remove()
    return {name: total.div_(count) for name, total in sums.items()}


def free_directions(clean: Tensor, masks: Tensor, rank: int) -> Tensor:
    """`right` (K, m), from the second moments of a matrix's input.

    For a direction v, let s be the mean of (v x)² at masks over that at clean tokens (whose moments
    are made a little larger). The rows are the directions of the largest s. Adam moves all of
    `left` equally fast, so a row's length says how much a step changes along it: (v x)² has
    the mean s / (s + PENALTY) at masks, and 1 / (s + PENALTY) at clean tokens.
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


def find_directions(model: Qwen2, data: Dataset, recipe: train.Recipe) -> None:
    """Fill each matrix's `right`, from the first examples of the data."""
    examples = [data.example(index) for index in data.training[:NUM_MEASURED]]
    data.skipped.clear()  # they come again
    forwards = train.forward_inputs([example for example in examples if example], recipe)
    if not any(inputs.is_mask.any() for inputs in forwards):
        raise UserError(f"{data.rows.path}: no masks in {NUM_MEASURED} examples (too short?)")
    processes.say("looking for directions: on a CPU this takes many minutes for a 0.5B")
    with processes.arithmetic_in(recipe.dtype, model.device):
        clean = second_moments(model, forwards, of_masks=False)
        masks = second_moments(model, forwards, of_masks=True)
    for name, linear in matrices(model):
        linear.right.copy_(free_directions(clean[name], masks[name], len(linear.right)))


def main() -> None:
    parser = train.make_parser()
    parser.description = "Train a checkpoint's masks along directions that clean tokens hardly use."
    parser.add_argument("--rank", type=number(int, 1), default=85, help="K, directions per matrix")
    parser.set_defaults(lr=3e-4)
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        raise UserError("torchrun is for train.py; this runs in one process")
    if args.objective == "sft":
        raise UserError("--objective sft: only masks are trained here; use train.py")
    device, dtype = find_device(args.device, args.dtype)
    model, chat, data, run, recipe = train.prepare(args, device, dtype)
    model.to(dtype)  # only what learns needs float32
    restrict(model, args.rank)
    if not run.found:  # else its checkpoint has them
        torch.manual_seed(args.seed)  # of svd_lowrank
        find_directions(model, data, recipe)
    if args.checkpoint_layers:
        processes.recompute_layers(model)
    run.whole_weights = merged
    stop = train.train(model, chat, data, run, args, recipe)
    if stop:
        sys.exit(128 + stop)


if __name__ == "__main__":
    run_main(main, out_of_memory=train.MEMORY_HINT)
