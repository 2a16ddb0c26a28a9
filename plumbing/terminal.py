"""Text on a terminal: whole characters as they come, shading, and a line of statistics."""

import os
import sys
import time
from collections.abc import Iterable

from .chat import Chat

# Blue, the darker the more tokens one forward gave: colours of the 256-colour palette.
SHADES = (255, 195, 153, 117, 111, 75)


class TextStream:
    """Tokens to text as they come, in whole characters: an emoji may take several tokens."""

    def __init__(self, chat: Chat):
        self.chat = chat
        self.tokens: list[int] = []
        self.num_shown = 0  # characters

    def add(self, tokens: list[int]) -> str:
        """The text that is certain now and was not before."""
        self.tokens += tokens
        text = self.chat.decode(self.tokens)  # all of it: a token's text may depend on others
        certain = text.rstrip("\ufffd")  # the first bytes of a character decode to this
        new = certain[self.num_shown :]
        self.num_shown += len(new)
        return new


def shade(text: str, num_tokens: int) -> str:
    """Black on blue for the text of one forward, readable whatever the terminal's colours are."""
    blue = SHADES[min(num_tokens, len(SHADES)) - 1]
    colour = f"\033[38;5;16;48;5;{blue}m"
    words = text.lstrip()
    gap = text[: len(text) - len(words)]  # unshaded, so that each forward's text stands apart
    return gap + colour + words.replace("\n", f"\033[0m\n{colour}") + "\033[0m"


def note(line: str) -> None:
    """Print to standard error: standard output is for the model's text alone."""
    print(line, file=sys.stderr)


def decode_command(directory: object) -> str:
    """What to do with a model that was made."""
    return f'{directory} holds a model: python decode.py --model {directory} --prompt "..."'


def statistics(num_tokens: int, num_forwards: int, seconds: float) -> str:
    per_forward = num_tokens / max(1, num_forwards)
    return f"{per_forward:.2f} tokens per forward, {num_tokens / seconds:.0f} tok/s"


def print_answer(steps: Iterable[tuple], chat: Chat) -> None:
    """Print one answer as it comes, then its statistics, also after Ctrl-C.

    steps: (answer, new tokens) of each forward, as a Decoder yields them. On a terminal the tokens
    that one forward gave are shaded, unless the environment has NO_COLOR.
    """
    shaded = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = TextStream(chat)
    num_forwards = 0
    is_cut = False
    began = time.perf_counter()
    try:
        for answer, tokens in steps:
            num_forwards += 1
            is_cut = answer.done and tokens[-1] not in answer.stop
            piece = text.add(tokens)
            if shaded and piece:
                piece = shade(piece, len(tokens))
            print(piece, end="", flush=True)
    finally:
        num_tokens = len(text.tokens)
        if num_tokens:
            print()
            figures = statistics(num_tokens, num_forwards, time.perf_counter() - began)
            cut = ", cut by --max-new" if is_cut else ""
            note(f"{num_tokens} tokens in {num_forwards} forwards: {figures}{cut}")
        if num_tokens and shaded:
            keys = " ".join(shade(f"{n} ", n) for n in range(1, len(SHADES) + 1))
            note(f"tokens that came together: {keys} or more")
