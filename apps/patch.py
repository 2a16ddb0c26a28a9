"""Share what MARS training changed in a model as a small file, and make the model from it.

    python -m apps.patch make BASE TUNED FILE --rank 64
    python -m apps.patch apply BASE FILE OUT

BASE and TUNED are directories or hub ids. The patch fits only the base that it was made from.
"""

from dataclasses import replace
from pathlib import Path

from model import Config, load
from plumbing.arguments import Parser, number, path
from plumbing.config import config_json
from plumbing.errors import UserError, failure_as, run_main
from plumbing.files import check_shapes, has_model, save
from plumbing.patch import apply_patch, fingerprint, make_patch, read_patch, write_patch
from plumbing.signals import exit_on_sigterm
from plumbing.terminal import note


def settings(config: Config) -> dict:
    """What neither training nor loading changes."""
    return config_json(replace(config, block=None, mask_token_id=None))


def make(base: str, tuned: str, file: Path, rank: int, license: str) -> None:
    """Write the patch that turns `base` into `tuned`."""
    if file.exists():
        raise UserError(f"{file}: is there already; choose another name")
    before, _ = load(base)
    after, chat = load(tuned)
    weights = before.state_dict()
    check_shapes(Path(tuned), expected=weights, found=after.state_dict())
    if settings(before.config) != settings(after.config):
        raise UserError(f"{tuned}: is not a training of {base}: their config.json differ")
    patch = make_patch(weights, after.state_dict(), chat.mask_id, rank)
    facts = {"base": base, "license": license, "block": after.config.block}
    write_patch(file, patch, facts | {"fingerprint": fingerprint(weights)})
    note(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def apply(base: str, file: Path, out: Path, any_weights: bool) -> None:
    """Write the directory `out`: base and patch. UserError if the patch is for another model."""
    patch, facts = read_patch(file)
    if has_model(out):
        raise UserError(f"{out}: has a model; choose another directory")
    model, chat = load(base)
    weights = model.state_dict()
    with failure_as(f"{file}: does not fit {base}"):
        if fingerprint(weights) != facts["fingerprint"]:
            message = f"{file}: is for {facts['base']}; {base} has other weights"
            if not any_weights:
                raise UserError(f"{message} (--any-weights applies it nevertheless)")
            note(f"{message}: expect fewer tokens per forward")
        config = replace(model.config, block=facts["block"])
        apply_patch(weights, patch, chat.mask_id)
    save(out, config_json(config), chat, weights)


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
