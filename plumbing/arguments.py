"""Command lines: errors in one line, numbers with a range, the options that every command has."""

import argparse
import sys
from collections.abc import Callable
from math import inf, isnan
from numbers import Integral

import torch

from .cpu import can_pack
from .errors import UserError
from .terminal import note


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None or action.default is False:
            return action.help  # it says what happens without the option, if that needs words
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help shows the defaults and whose errors are UserErrors."""

    def __init__(self, description: str, **options):
        super().__init__(description=description, formatter_class=ShowDefaults, **options)

    def error(self, message: str) -> None:
        """Raise UserError; where something is missing, it names an option that does not exist."""
        typed = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
        for word in typed:
            is_known = any(option.startswith(word) for option in self._option_string_actions)
            if not is_known and not message.startswith("argument "):
                message = f"there is no {word}"
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")

    def add_model(
        self, default: str | None = None, help="directory or hub id (default: the bundled toy/mars)"
    ) -> None:
        """Add --model, and for `find_device` --device and --dtype."""
        self.add_argument("--model", default=default, help=help)
        self.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
        help = "(default: bfloat16 on cuda, else float32)"
        self.add_argument("--dtype", choices=("float32", "bfloat16"), help=help)


def problem_with(value: object, kind: type, least: float, below: float) -> str:
    """What is wrong with a number that must be an int or a float with least <= value < below."""
    is_number = isinstance(value, int if kind is int else int | float)
    if not is_number or isinstance(value, bool) or isnan(value):
        return f"must be a {'whole ' if kind is int else ''}number, not {value!r}"
    if value < least:
        return f"must be at least {least:g}, not {value}"
    if value >= below:
        return f"must be below {below:g}, not {value}"
    return ""


def number(kind: type = int, least: float = -inf, below: float = inf) -> Callable:
    """An argparse type: an int or float with least <= value < below."""

    def parse(text: str) -> float:
        value = kind(text)
        if problem := problem_with(value, kind, least, below):
            raise argparse.ArgumentTypeError(problem)
        return value

    parse.__name__ = kind.__name__  # argparse says: invalid int value: 'x'
    return parse


def check_number(name: str, value: object, kind: type, least=-inf, below=inf) -> None:
    """Raise UserError if a value is not what `number` would let pass."""
    if problem := problem_with(value, kind, least, below):
        raise UserError(f"{name}: {problem}")


def check_tau(tau: float, metric: str) -> None:
    """Raise UserError for an impossible tau."""
    most = 100 if metric == "entropy" else 1  # nats, more than any vocabulary gives
    check_number("tau", tau, float)
    if not 0 <= tau <= most:
        raise UserError(f"tau {tau}: must be between 0 and {most} for the metric {metric}")


def check_request(prompt: object, max_new: object, vocab_size: int) -> None:
    """Raise UserError for what would stop the forward of all rows: a float among token ids, say."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    if not is_list or not all(isinstance(t, Integral) and 0 <= t < vocab_size for t in prompt):
        raise UserError(f"a prompt must be a list of token ids below {vocab_size}, at least one")
    check_number("max_new", max_new, int, least=1)


def find_device(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of --device and --dtype; auto is the first of cuda, mps and cpu there is."""
    available = available_devices()
    names = {"auto": available[0], "cuda": "cuda:0"}
    name = names.get(device, device)
    if name not in available:
        raise UserError(f"--device {device}: this machine has {', '.join(available)}")
    if dtype is None:
        dtype = "bfloat16" if name.startswith("cuda") else "float32"
    if name == "cpu" and dtype == "bfloat16" and not can_pack(torch.bfloat16):
        note("this CPU is slow in bfloat16: --dtype float32 may be several times faster")
    return torch.device(name), getattr(torch, dtype)


def available_devices() -> list[str]:
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [*names, "cpu"]
