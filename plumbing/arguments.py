"""Command lines: errors in one line, numbers with a range, the options that every command has."""

import argparse
from collections.abc import Callable
from numbers import Integral
from pathlib import Path

import torch

from .cpu import can_pack
from .errors import UserError, failure_as
from .files import has_model
from .int8 import IN_8_BITS, largest_weight
from .terminal import note

LARGE = 10**8  # weights; a smaller model is fast enough in float32


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None or action.default is False:
            return action.help  # it says what happens without the option, if that needs words
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose help shows the defaults and whose errors are one line."""

    def __init__(self, description: str, **options):
        options |= {"formatter_class": ShowDefaults, "allow_abbrev": False}
        super().__init__(description=description, **options)

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see --help)")

    def add_model(
        self,
        default: str | None = None,
        help="directory or hub id (default: the bundled toy/mars)",
        dtypes=("auto", "float32", "bfloat16", "int8"),
    ) -> None:
        """Add --model, and for `find_device` --device and --dtype."""
        self.add_argument("--model", default=default, help=help)
        self.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
        if "auto" in dtypes:
            help = "int8: weights in 8 bits, on a CPU; auto: what is fastest for this model here"
            self.add_argument("--dtype", choices=dtypes, default="auto", help=help)
        else:
            help = "(default: bfloat16 on cuda, else float32)"
            self.add_argument("--dtype", choices=dtypes, help=help)


def check_number(name: str, value: object, kind: type, least: float, most: float = 10**9) -> float:
    """The value; UserError unless it is of this kind, int or float, and from least to most."""
    if not isinstance(value, int | kind) or not least <= value <= most:
        expected = f"expected {kind.__name__} from {least} to {most}"
        raise UserError(f"{name}: {expected}, not {value!r}")
    return value


def number(kind: type, least: float, most: float = 10**9) -> Callable[[str], float]:
    """The same check as an argparse type."""

    def parse(text: str) -> float:
        return check_number(text, kind(text), kind, least, most)

    parse.__name__ = f"{kind.__name__} ({least} to {most})"  # argparse: invalid int (1 to 9) value
    return parse


def out_directory(text: str) -> Path:
    """An argparse type: a directory that there is, or that can be made: no file is in the way."""
    for path in (Path(text), *Path(text).parents):
        if path.exists() and not path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a file; choose another directory")
    return Path(text)


def new_model(text: str) -> Path:
    """An argparse type: a directory without a model."""
    if has_model(out_directory(text)):
        raise argparse.ArgumentTypeError(f"{text} has a model; choose another directory")
    return Path(text)


def check_tau(tau: float, metric: str) -> None:
    """Raise UserError for an impossible tau."""
    most = 100 if metric == "entropy" else 1  # nats, more than any vocabulary gives
    check_number("tau", tau, float, 0, most)


def check_request(prompt: list[int], max_new: int, vocab_size: int) -> None:
    """Raise UserError for what would stop the forward of all rows: a float among token ids, say."""
    are_ids = all(isinstance(token, Integral) and 0 <= token < vocab_size for token in prompt)
    if len(prompt) == 0 or not are_ids:  # `not prompt` is an error for a tensor
        raise UserError(f"a prompt must be a list of token ids below {vocab_size}, at least one")
    check_number("max_new", max_new, int, 1)


def find_device(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype | str]:
    """Device and dtype of --device and --dtype; "auto" stays so: `load` chooses by the model."""
    found = available_device(device)
    if found.type not in ("cpu", "cuda"):
        note(f"{found.type}: nobody has tried this project on it; --device cpu was tested")
    if dtype is None:
        dtype = "bfloat16" if found.type == "cuda" else "float32"
    if found.type == "cpu" and dtype == "bfloat16" and not can_pack(torch.bfloat16):
        note("this CPU is slow in bfloat16: --dtype float32 may be several times faster")
    return found, dtype if dtype == "auto" else getattr(torch, dtype)


def fastest_dtype(device: torch.device, num_weights: int) -> torch.dtype:
    """What `auto` is for a model that decodes; a note says so if it is not float32 on a CPU."""
    if device.type == "cuda":
        return torch.bfloat16
    if device.type != "cpu" or num_weights < LARGE:
        return torch.float32
    if largest_weight() == IN_8_BITS:
        note("in 8 bits, which is fastest on this CPU; --dtype float32 is slower and rounds less")
        return torch.int8
    if can_pack(torch.bfloat16):
        note("in bfloat16, faster on this CPU; --dtype float32 is slower and rounds less")
        return torch.bfloat16
    return torch.float32


def available_device(name: str | torch.device) -> torch.device:
    """The device of this name; auto is cuda, if this machine has it, else the CPU."""
    if str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    with failure_as(f"device {name}: this machine has none"):
        return torch.empty(0, device=name).device
