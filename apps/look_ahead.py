"""Teach a model to look ahead in its own words, and to go on saying what it said before.

    python -m apps.look_ahead --model BASE --data own.jsonl --drawn drawn.jsonl --out OUT

own.jsonl holds greedy answers of BASE, to learn to look ahead in, and drawn.jsonl answers that were
drawn at a temperature. docs/real-model.md makes both, and shows what this gains.

Training with train.py changes what a model says, for its matrices serve masks and clean tokens
alike. What is different here:
  * the clean stream learns the base's probabilities of all tokens, not the tokens of the data;
  * a matrix W becomes W + left @ right, and only `left` (n, K) is trained. The rows of `right` are
    the K directions of W's input that masks use most, relative to clean tokens: a change along
    these is felt by masks, and hardly by clean tokens;
  * of the embedding only the row of `<|mask|>` is trained.

--start TUNED begins with a training of BASE, by train.py or by this program: with what it changed
along the directions that are free in TUNED. (Training moves the masks' inputs away from those of
clean tokens, so a second run finds more of them.)
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import Qwen2, load
from plumbing.arguments import Parser, find_device, number, path
from plumbing.config import config_json
from plumbing.data import Dataset, reasons, share_repeated
from plumbing.errors import UserError, run_main
from plumbing.files import check_shapes, has_model, save
from plumbing.jsonl import JsonlFile
from plumbing.packing import round_up
from plumbing.processes import arithmetic_in, say
from plumbing.signals import exit_on_sigterm
from train import (
    ForwardInput,
    expected_weights,
    forward_inputs,
    hidden_states,
    learning_rate,
)

PENALTY = 10  # how much more a clean token's change counts than a mask's
WEIGHT = 8  # of the divergence from the base
NUM_MEASURED = 60  # examples from which the directions are found
REPORT = 10  # steps

# ------------------------------------------------------------------------------------- directions


class Along(nn.Module):
    """A frozen matrix W (n, m) plus left (n, K) @ right (K, m); only `left` is trained."""

    def __init__(self, linear: nn.Linear, left: Tensor, right: Tensor):
        super().__init__()
        self.linear = linear
        self.left = nn.Parameter(left)
        self.right = right

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.right), self.left)


def is_mask(inputs: ForwardInput) -> Tensor:
    return inputs.prefix <= inputs.pos


@torch.no_grad()
def second_moments(model: Qwen2, some: list[ForwardInput]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each matrix's input x the mean of x xᵀ over clean tokens, and over masks: (m, m) each."""
    moments = {}
    counts = {"clean": 0, "masks": 0}
    kinds = {}  # of the forward that runs: where the positions of each kind are

    def add(name: str, x: Tensor) -> None:
        for kind, positions in kinds.items():
            picked = x[positions].float()
            if (name, kind) not in moments:
                moments[name, kind] = picked.new_zeros(x.size(-1), x.size(-1))
            moments[name, kind].addmm_(picked.T, picked)

    hooks = []
    for name, linear in matrices(model):
        hooks.append(linear.register_forward_pre_hook(lambda _, x, name=name: add(name, x[0])))
    for inputs in some:
        inputs = inputs.to(model.device)
        kinds["masks"] = is_mask(inputs)
        kinds["clean"] = ~is_mask(inputs) & (inputs.doc >= 0)
        for kind, positions in kinds.items():
            counts[kind] += positions.sum().item()
        hidden_states(model, inputs)
    for hook in hooks:
        hook.remove()
    for (_, kind), total in moments.items():
        total /= max(1, counts[kind])  # in place: a 0.5B has 5 GiB of them
    return {name: (moments[name, "clean"], moments[name, "masks"]) for name, _ in matrices(model)}


def free_directions(clean: Tensor, masks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`right` (K, m), from the second moments of a matrix's input; and how a change gets there.

    Along a row v of the first result, (v x)² has the mean s / (s + PENALTY) at masks and 1 / (s +
    PENALTY) at clean tokens (made a little larger), s largest first. With the second result, (m,
    K), change @ second is the `left` of a change (n, m) of the matrix, less of it where s is small.
    """
    squares = clean.diagonal()  # of some inputs a million times those of others, of some 0
    clean = clean + 0.01 * (squares + squares.median()).diag()  # so that it has a root
    root = torch.linalg.cholesky(clean)  # clean = root @ root.T
    half = torch.linalg.solve_triangular(root, masks, upper=False)
    relative = torch.linalg.solve_triangular(root, half.T, upper=False)  # root⁻¹ masks root⁻ᵀ
    # All eigenvectors (eigh) of a 0.5B's largest matrices would take a quarter of an hour.
    vectors, ratios, _ = torch.svd_lowrank(relative, q=min(2 * rank, len(masks)), niter=8)
    ratios = ratios[:rank]
    vectors = vectors[:, :rank] / (ratios + PENALTY).sqrt()
    right = torch.linalg.solve_triangular(root.T, vectors, upper=True).T
    return right, clean @ right.T * ratios


def matrices(model: Qwen2) -> list[tuple[str, nn.Linear]]:
    layers = model.model.layers.named_modules(prefix="model.layers")
    return [(name, module) for name, module in layers if isinstance(module, nn.Linear)]


@torch.no_grad()
def restrict(model: Qwen2, start: Qwen2, some: list[ForwardInput], rank: int) -> None:
    """Let each matrix change in free directions only; it begins with what `start` changed there."""
    for name, (clean, masks) in second_moments(start, some).items():
        linear = model.get_submodule(name)
        right, projection = free_directions(clean, masks, rank)
        change = start.get_submodule(name).weight.float() - linear.weight.float()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Along(linear, change @ projection, right))


# --------------------------------------------------------------------------------------- training


def losses(model: Qwen2, base: Qwen2, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
    """Two weighted sums: the masks' cross-entropy; how far the clean stream is from the base.

    The first is that of --mask-weight expected, without the clean token that predicts the first of
    a response. The second is KL(base || model).
    """

    def cross_entropy(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden), target, reduction="none")

    def divergence(hidden: Tensor, base_hidden: Tensor) -> Tensor:
        log_probs = model.logits(hidden).log_softmax(-1)
        base_log_probs = base.logits(base_hidden).log_softmax(-1)
        gaps = base_log_probs - log_probs
        gaps = gaps.masked_fill(base_log_probs.isneginf(), 0)  # the mask's, which neither says
        return (base_log_probs.exp() * gaps).sum(-1)

    hidden = hidden_states(model, inputs)
    at_masks = is_mask(inputs).nonzero(as_tuple=True)
    noisy = model.in_chunks(cross_entropy, hidden[at_masks], inputs.target[at_masks])
    factors = expected_weights(noisy, inputs, at_masks, model.config.block)
    at_clean = inputs.clean_weight.nonzero(as_tuple=True)
    width = round_up(int(at_clean[1].max()) + 1, 32)  # a row begins with its clean stream
    with torch.no_grad():
        base_hidden = hidden_states(base, ForwardInput(*(each[:, :width] for each in inputs)))
    changed = model.in_chunks(divergence, hidden[at_clean], base_hidden[at_clean])
    noisy_loss = (noisy * inputs.noisy_weight[at_masks] * factors).sum()
    return noisy_loss, (changed * inputs.clean_weight[at_clean]).sum()


def train_left(
    model: Qwen2, base: Qwen2, row: nn.Parameter, own: Dataset, drawn: Dataset, args
) -> None:
    """Train the mask's row (D,), and `left` of every matrix."""
    parameters = [row, *(each.left for each in model.modules() if isinstance(each, Along))]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    autocast = arithmetic_in(model.dtype, model.device)
    without_masks = replace(model.config, block=None)
    batches = zip(own.steps(args.batch), drawn.steps(args.batch))
    sums = torch.zeros(2, 2)  # of the two losses, and of the weights in them
    for step in tqdm(range(args.steps), unit="step", disable=None):
        batch, drawn_batch = next(batches)
        # There is nothing to learn from looking ahead in a loop.
        loops = [each for each in batch.examples if share_repeated(each.response) > 0.2]
        others = [each for each in batch.examples if each not in loops]
        all_inputs = forward_inputs(others, model.config, args)
        all_inputs += forward_inputs(loops + drawn_batch.examples, without_masks, args)
        for inputs in all_inputs:
            with autocast:
                noisy, divergence = losses(model, base, inputs.to(model.device))
            (noisy + WEIGHT * divergence).backward()
            weights = inputs.noisy_weight[is_mask(inputs)].sum(), inputs.clean_weight.sum()
            sums += torch.tensor([[noisy.item(), divergence.item()], weights])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, (step + 0.5) / args.steps, warmup=0.1)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if not norm.isfinite():
            raise UserError(f"step {step + 1}: the gradient is not finite; try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % REPORT == 0:
            noisy, divergence = (sums[0] / sums[1]).tolist()
            say(f"step {step + 1}: masks' loss {noisy:.2f}, {divergence:.4f} nats from the base")
            sums.zero_()


def learn(
    base: Qwen2, model: Qwen2, start: Qwen2, own: Dataset, drawn: Dataset, args
) -> dict[str, Tensor]:
    """The weights of `base` once it has learnt to look ahead; `model` is a copy of it."""
    mask_id = base.config.mask_token_id
    some = forward_inputs(next(own.steps(NUM_MEASURED)).examples, model.config, args)
    if not any(is_mask(inputs).any() for inputs in some):
        raise UserError(f"{args.data}: no response of more than one token")
    restrict(model, start, some, args.rank)
    row = nn.Parameter(start.model.embed_tokens.weight[mask_id].float().clone())
    model.model.embed_tokens.register_forward_hook(
        lambda _, tokens, x: torch.where((tokens[0] == mask_id)[..., None], row.to(x.dtype), x)
    )
    train_left(model, base, row, own, drawn, args)
    weights = {name: weight.float() for name, weight in base.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, Along):
            change = (module.left @ module.right).detach()
            weights[name + ".weight"] = weights[name + ".weight"] + change
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[mask_id] = row.detach()
    return weights | {"model.embed_tokens.weight": embedding}


def main() -> None:
    parser = Parser("Teach a model to look ahead, and to go on saying what it said before.")
    parser.add_model("Qwen/Qwen2.5-0.5B-Instruct", "the base: a directory or hub id")
    parser.add_template_option()
    add = parser.add_argument
    add("--out", type=path, required=True, help="the directory to write")
    add("--data", type=path, required=True, help="the base's greedy answers, as JSONL")
    add("--drawn", type=path, required=True, help="answers drawn from it at a temperature")
    add("--start", help="a training of the base to begin with (default: the base)")
    add("--steps", type=number(int, 1), default=240, help="number of steps")
    add("--batch", type=number(int, 1), default=2, help="examples of each file in a step")
    add("--lr", type=number(float, 0, 1), default=3e-4, help="peak learning rate")
    add("--rank", type=number(int, 1), default=85, help="directions of each matrix")
    add("--block", type=number(int, 1), default=4, help="B, masks in a block")
    add("--max-length", type=number(int, 1), default=512, help="the rest of an example is cut")
    add("--seed", type=number(int, 0, 2**31), default=0, help="for shuffling and phases")
    parser.set_defaults(normalization="sequence", batch_tokens=4096)
    args = parser.parse_args()
    exit_on_sigterm()
    torch.manual_seed(args.seed)  # of svd_lowrank
    if has_model(args.out):
        raise UserError(f"{args.out}: has a model; choose another directory")
    files = JsonlFile(args.data), JsonlFile(args.drawn)
    device, dtype = find_device(args.device, args.dtype)
    base, chat = load(args.model, device, dtype)
    model, _ = load(args.model, device, dtype)
    start = base
    if args.start:
        start, _ = load(args.start, device, dtype)
        check_shapes(Path(args.start), base.state_dict(), start.state_dict())
    if args.max_length > base.config.max_position_embeddings:
        positions = base.config.max_position_embeddings
        raise UserError(f"--max-length {args.max_length}: the model has {positions} positions")
    base.config.block = model.config.block = args.block
    chat.template_options = dict(args.template_option)
    ends = base.config.eos_token_id
    # Each has its own order, or a step would have two answers to the same question.
    own, drawn = (
        Dataset(
            file,
            chat,
            eos=ends[0],
            phases=args.block,
            max_length=args.max_length,
            seed=args.seed + i,
            num_held_out=0,
            ends=ends,
        )
        for i, file in enumerate(files)
    )
    weights = learn(base, model, start, own, drawn, args)
    save(args.out, config_json(base.config), chat, weights)
    if own.skipped or drawn.skipped:
        say(f"skipped rows: {reasons(own.skipped + drawn.skipped)}")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --batch or --max-length")
