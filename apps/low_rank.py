"""Train masks along a few directions that clean tokens hardly use: the model says what it said.

    python -m apps.low_rank --model MODEL --data data.jsonl --hold 8 --lr 3e-4 --out mars

The options, the loss and the loop are train.py's; docs/real-model.md makes data.jsonl. In train.py
all weights learn, and they serve clean tokens, too: what masks learn changes what the model says.
What is different here:
  * a matrix W becomes W + left @ right, and only `left` is trained. The K rows of `right` are
    directions of W's input: a change along these is felt by masks, and hardly by clean tokens;
  * of the embedding only the row of `<|mask|>` is trained.
The model that is saved is an ordinary one.
"""

import sys

if not __package__:  # as a file it does not find the modules beside apps/
    sys.exit("error: run it from the project's folder: python -m apps.low_rank")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from model import Qwen2
from plumbing import checkpoints, processes
from plumbing.arguments import find_device, number
from plumbing.data import Dataset
from plumbing.errors import UserError, run_main
from train import (
    MEMORY_HINT,
    Recipe,
    Streams,
    forward_inputs,
    hidden_states,
    make_parser,
    prepare,
    train,
)

PENALTY = 10  # how much more a clean token's change counts than a mask's
NUM_MEASURED = 60  # examples from which the directions are found


class LowRank(nn.Module):
    """A frozen matrix W (n, m) plus left (n, K) @ right (K, m); only `left` is trained."""

    def __init__(self, linear: nn.Linear, right: Tensor):
        super().__init__()
        self.linear = linear
        self.left = nn.Parameter(right.new_zeros(linear.out_features, len(right)))
        self.register_buffer("right", right)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.right), self.left)


def matrices(model: Qwen2) -> list[tuple[str, nn.Linear]]:
    layers = model.model.layers.named_modules(prefix="model.layers")
    return [(name, module) for name, module in layers if isinstance(module, nn.Linear)]


@torch.no_grad()
def second_moments(model: Qwen2, forwards: list[Streams]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each matrix's input x the mean of x xᵀ over clean tokens, and over masks: (m, m) each."""
    sums = {}
    kinds = {}  # of the forward that runs: which positions are clean, and which are masks

    def add(name: str, x: Tensor) -> None:
        for kind, positions in kinds.items():
            picked = x[positions].float()
            if (name, kind) not in sums:
                sums[name, kind] = picked.new_zeros(x.size(-1), x.size(-1))
            sums[name, kind].addmm_(picked.T, picked)

    counts = {"clean": 0, "masks": 0}
    hooks = []
    for name, linear in matrices(model):
        hooks.append(linear.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0])))
    for inputs in forwards:
        inputs = inputs.to(model.device)
        kinds["clean"] = ~inputs.is_mask & (inputs.doc >= 0)
        kinds["masks"] = inputs.is_mask
        for kind, positions in kinds.items():
            counts[kind] += int(positions.sum())
        hidden_states(model, inputs)
    for hook in hooks:
        hook.remove()
    for (_, kind), total in sums.items():
        total /= max(1, counts[kind])  # in place: a 0.5B has 5 GiB of them
    return {name: (sums[name, "clean"], sums[name, "masks"]) for name, _ in matrices(model)}


def free_directions(clean: Tensor, masks: Tensor, rank: int) -> Tensor:
    """`right` (K, m), from the second moments of a matrix's input.

    Along a row v of it, (v x)² has the mean s / (s + PENALTY) at masks and 1 / (s + PENALTY) at
    clean tokens (made a little larger), the largest s first.
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


def restrict(model: Qwen2, rights: dict[str, Tensor]) -> None:
    """Let each matrix change along its directions only, and of the embedding the mask's row."""
    mask_id = model.config.mask_token_id
    model.requires_grad_(False)
    for name, right in rights.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LowRank(model.get_submodule(name), right))
    embedding = model.model.embed_tokens
    embedding.mask_row = nn.Parameter(embedding.weight[mask_id].float())

    def put_row(embedding: nn.Module, tokens: tuple[Tensor], x: Tensor) -> Tensor:
        is_mask = (tokens[0] == mask_id)[..., None]
        return torch.where(is_mask, embedding.mask_row.to(x.dtype), x)

    embedding.register_forward_hook(put_row)


def merged(model: Qwen2) -> dict[str, Tensor]:
    """The state_dict of an ordinary model that computes the same."""
    weights = checkpoints.whole_weights(model)
    result = {}
    for name, weight in weights.items():
        matrix = name.removesuffix(".linear.weight")
        if name == "model.embed_tokens.weight":
            weight = weight.clone()
            weight[model.config.mask_token_id] = weights["model.embed_tokens.mask_row"]
        elif matrix != name:
            weight = weight + weights[matrix + ".left"] @ weights[matrix + ".right"]
        if not name.endswith((".left", ".right", ".mask_row")):
            result[name.replace(".linear.", ".")] = weight
    return result


def directions(model: Qwen2, data: Dataset, recipe: Recipe, rank: int) -> dict[str, Tensor]:
    """`right` of each matrix, from the first examples of the data."""
    rows = map(data.example, data.training[:NUM_MEASURED])
    forwards = forward_inputs([example for example in rows if example], recipe)
    data.skipped.clear()  # they come again
    if not any(inputs.is_mask.any() for inputs in forwards):
        raise UserError(f"{data.rows.path}: no response of more than one token")
    moments = second_moments(model, forwards)
    return {name: free_directions(*pair, rank) for name, pair in moments.items()}


def no_directions(model: Qwen2, rank: int) -> dict[str, Tensor]:
    """Of their shapes, for `--resume` to fill."""
    rights = {}
    for name, linear in matrices(model):
        m = linear.in_features
        rights[name] = torch.zeros(min(rank, m), m, device=model.device)
    return rights


def main() -> None:
    parser = make_parser()
    parser.add_argument("--rank", type=number(int, 1), default=85, help="directions of a matrix")
    args = parser.parse_args()
    if dist.is_torchelastic_launched():
        raise UserError("torchrun is for train.py; this runs in one process")
    device, dtype = find_device(args.device, args.dtype)
    model, chat, data, run, recipe = prepare(args, device, dtype)
    model.to(dtype)  # what is frozen needs no more
    torch.manual_seed(args.seed)  # of svd_lowrank
    if run.found:  # its checkpoint has them
        rights = no_directions(model, args.rank)
    else:
        rights = directions(model, data, recipe, args.rank)
    restrict(model, rights)
    if args.checkpoint_layers:
        processes.recompute_layers(model)
    run.whole_weights = merged
    stop = train(model, chat, data, run, args, recipe)
    if stop:
        sys.exit(128 + stop)


if __name__ == "__main__":
    run_main(main, out_of_memory=MEMORY_HINT)
