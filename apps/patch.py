"""Share what MARS training changed in a model as a small file, and make the model from it.

    python -m apps.patch make BASE TUNED FILE --rank 64
    python -m apps.patch apply BASE FILE OUT

BASE and TUNED are directories or hub ids. The patch fits only the base that it was made from.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from model import load
from plumbing.arguments import Parser, number, path
from plumbing.config import config_json
from plumbing.errors import UserError, run_main
from plumbing.files import check_shapes, has_model, save
from plumbing.patch import (
    apply_patch,
    check_tensors,
    fingerprint,
    make_patch,
    read_patch,
    write_patch,
)
from plumbing.signals import exit_on_sigterm
from plumbing.terminal import note

NOT_OF_THE_BASE = ("block", "mask_token_id")  # what training, or loading, adds


def differences(base: dict, tuned: dict) -> list[str]:
    """The settings of `tuned` that are not those of `base`, but for what training changes."""
    base = json.loads(json.dumps(base))  # lists, as in a file
    tuned = json.loads(json.dumps(tuned))
    found = []
    for name, value in tuned.items():
        if name not in NOT_OF_THE_BASE and base.get(name) != value:
            found.append(f"{name} {value}, found {base.get(name)}")
    return found


def make(base: str, tuned: str, file: Path, rank: int, license: str) -> None:
    """Write the patch that turns `base` into `tuned`."""
    if file.exists():
        raise UserError(f"{file}: is there already; choose another name")
    before, _ = load(base)
    after, chat = load(tuned)
    weights = before.state_dict()
    check_shapes(Path(tuned), expected=weights, found=after.state_dict())
    other = differences(config_json(before.config), config_json(after.config))
    if other:
        raise UserError(f"{tuned}: is not a training of {base} ({other[0]})")
    patch = make_patch(weights, after.state_dict(), chat.mask_id, rank)
    facts = {
        "base": base,
        "license": license,
        "rank": rank,
        "config": config_json(after.config),
        "fingerprint": fingerprint(weights),
    }
    write_patch(file, patch, facts)
    note(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def apply(base: str, file: Path, out: Path, any_weights: bool, dtype=torch.bfloat16) -> None:
    """Write the directory `out`: base and patch. UserError if the patch is for another model."""
    patch, facts = read_patch(file)
    if has_model(out):
        raise UserError(f"{out}: has a model; choose another directory")
    model, chat = load(base)
    other = differences(config_json(model.config), facts["config"])
    if other:
        raise UserError(f"{file}: is for {facts['base']}, not for {base} ({other[0]})")
    weights = model.state_dict()
    if fingerprint(weights) != facts["fingerprint"]:
        message = f"{file}: is for {facts['base']}; {base} has other weights"
        if not any_weights:
            raise UserError(f"{message} (--any-weights applies it nevertheless)")
        note(f"{message}: expect fewer tokens per forward")
    try:
        new_config = replace(model.config, block=facts["config"].get("block"))
        check_tensors(weights, patch, facts["rank"])
        apply_patch(weights, patch, chat.mask_id)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    save(out, config_json(new_config) | {"patch": fingerprint(patch)}, chat, weights, dtype)


def main() -> None:
    parser = Parser("Share what MARS training changed in a model as a small file.")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("make", description="Write the patch between two models.")
    new.add_argument("base", help="the model before training: a directory or hub id")
    new.add_argument("tuned", help="the model after training")
    new.add_argument("file", type=path, help="the patch to write")
    new.add_argument("--rank", type=number(int, 1), default=64, help="directions kept per matrix")
    new.add_argument("--license", default="", help="of base, data and patch")
    use = commands.add_parser("apply", description="Write a model: base and patch.")
    use.add_argument("base", help="a directory or hub id")
    use.add_argument("file", type=path, help="the patch")
    use.add_argument("out", type=path, help="the directory to write")
    use.add_argument("--any-weights", action="store_true", help="even if the base has others")
    args = parser.parse_args()
    exit_on_sigterm()
    if args.command == "make":
        make(args.base, args.tuned, args.file, args.rank, args.license)
    else:
        apply(args.base, args.file, args.out, args.any_weights)


if __name__ == "__main__":
    run_main(main)
