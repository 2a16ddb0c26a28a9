"""train.py with another weight of the clean loss than 1: `--ar-weight 0` is the paper's ablation."""

from dataclasses import replace

import train
from plumbing.arguments import number
from plumbing.processes import run_main_and_exit


def main() -> None:
    parser = train.make_parser()
    parser.add_argument("--ar-weight", type=number(float, 0, 1e6), required=True)
    args = parser.parse_args()

    def add_gradients(model, examples, recipe):
        return train.add_gradients(model, examples, replace(recipe, ar_weight=args.ar_weight))

    train.main(args, add_gradients)


if __name__ == "__main__":
    run_main_and_exit(main, out_of_memory=train.MEMORY_HINT)
