"""Command lines: errors in one line, numbers with a range, the options that every command has."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from numbers import Integral
from pathlib import Path

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
        raise UserError(f"{message.removeprefix('argument ')} (see --help)")

    def add_model(self, default: str | None, help: str) -> None:
        """Add --model, and for `find_device` --device and --dtype."""
        self.add_argument("--model", default=default, help=help)
        self.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps")
        help = "(default: bfloat16 on cuda, else float32)"
        self.add_argument("--dtype", choices=("float32", "bfloat16"), help=help)

    def add_template_option(self) -> None:
        """Add --template-option, for Chat.template_options: a list of (name, value)."""
        help = "for the chat template, such as enable_thinking=false; may be repeated"
        how = {"action": "append", "default": [], "type": template_option, "metavar": "NAME=VALUE"}
        self.add_argument("--template-option", help=help, **how)

    def add_options(self, options: type, without: tuple[str, ...] = ()) -> None:
        """Add the fields of a dataclass of `option`s: block_cache becomes --block-cache."""
        for field in dataclasses.fields(options):
            facts = field.metadata
            if field.name in without:
                continue
            if facts["kind"] is bool:
                how = {"action": "store_true"}
            elif facts["choices"]:
                how = {"default": field.default, "choices": facts["choices"]}
            else:
                how = {"default": field.default, "type": facts["parse"]}
            self.add_argument(f"--{field.name.replace('_', '-')}", help=facts["help"], **how)


def number(kind: type = int, least: float | None = None, below: float | None = None) -> Callable:
    """An argparse type: an int or float with least <= value < below."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, not {text!r}") from None
        if least is not None and not value >= least:  # also true of NaN
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, not {text}")
        if below is not None and not value < below:
            raise argparse.ArgumentTypeError(f"must be below {below:g}, not {text}")
        return value

    return parse


def path(text: str) -> Path:
    """An argparse type; an empty text would be the current directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must name a file or directory")
    return Path(text)


def template_option(text: str) -> tuple[str, object]:
    """An argparse type: a name, and a value as in JSON (true, false, a number) or a plain text."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def option(default: object, help: str, kind=None, least=None, below=None, choices=None):
    """A field of a dataclass of options; `Parser.add_options` makes it a command-line option."""
    kind = kind or type(default)  # only a default of None needs one
    parse = number(kind, least, below)
    metadata = {"help": help, "kind": kind, "parse": parse, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def read_options(args: argparse.Namespace, options: type) -> object:
    """The dataclass of options that the command line asked for."""
    return options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(options)})


def check_options(options: object) -> None:
    """Make of options in Python what the command line makes of them, or raise UserError."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        facts = field.metadata
        is_left_out = value is None and field.default is None
        if is_left_out or callable(value):  # tau may be a function
            continue
        if facts["choices"] and value not in facts["choices"]:
            raise UserError(f"{field.name} {value!r}: must be one of {', '.join(facts['choices'])}")
        if facts["kind"] in (int, float):
            try:
                text = repr(value) if isinstance(value, str) else str(value)
                setattr(options, field.name, facts["parse"](text))  # numpy's would overflow
            except argparse.ArgumentTypeError as error:
                raise UserError(f"{field.name} {value!r}: {error}") from None


def check_request(prompt: object, max_new: object, vocab_size: int) -> None:
    """Raise UserError for what would stop the forward of all rows: a float among token ids, say."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    if not is_list or not all(isinstance(t, Integral) and 0 <= t < vocab_size for t in prompt):
        raise UserError(f"a prompt must be a list of token ids below {vocab_size}, at least one")
    if not isinstance(max_new, Integral) or max_new < 1:
        raise UserError(f"max_new {max_new!r}: must be a whole number, at least 1")


def find_device(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of --device and --dtype; auto is the first of cuda, mps and cpu there is."""
    available = available_devices()
    names = {"auto": available[0], "cuda": "cuda:0", "mps:0": "mps", "cpu:0": "cpu"}
    name = names.get(device, device)
    if name not in available:
        raise UserError(f"--device {device}: this machine has {', '.join(available)}")
    if dtype is None:
        dtype = "bfloat16" if name.startswith("cuda") else "float32"
    if dtype == "bfloat16" and name == "cpu" and not can_pack(torch.bfloat16):
        note("this CPU is slow in bfloat16: --dtype float32 may be several times faster")
    return torch.device(name), getattr(torch, dtype)


def available_devices() -> list[str]:
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return [*names, "cpu"]
