"""Training data: rows of a JSONL file to examples, and an endless shuffled stream of steps."""

import functools
import itertools
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .chat import Chat
from .errors import UserError
from .jsonl import JsonlFile

NUM_HELD_OUT = 64  # rows to evaluate on; at most a tenth of the file
READ_AHEAD = 512  # examples that are made before the run, to know what it is given


@dataclass
class Example:
    tokens: list[int]  # prompt, response and, unless it was cut, the end-of-turn token
    prompt_length: int
    has_masks: bool = True  # False: apps.low_rank trains its clean stream only

    @property
    def response(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def make_example(row: dict, chat: Chat, ends: tuple[int, ...], max_length: int) -> Example:
    """A row as an example: the last assistant turn is the response, all before it the prompt.

    `"finish_reason": "length"` says that the response was cut and does not end its turn; `"masks":
    false` that apps.low_rank trains no masks on it. UserError says why a row cannot be used.

    ends: all tokens at which a decoder would stop; the first ends the response.
    """
    messages = conversation(row, with_response=True)
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError('no assistant turn and no "response"')
    prompt = chat.encode_prompt(messages[:-1])
    response = chat.encode(messages[-1]["content"])
    if not response:
        raise UserError("an empty response")
    if not {chat.mask_id, *ends}.isdisjoint(response):  # never predicted, or only at the end
        raise UserError("a mask or end-of-turn token in the response")
    if not 0 < len(prompt) < max_length:
        raise UserError(f"prompt of {max_length} tokens or more (--max-length)")
    tokens = prompt + response
    if row.get("finish_reason") != "length":
        tokens.append(ends[0])
    return Example(tokens[:max_length], len(prompt), has_masks=row.get("masks") is not False)


def encode_prompt(row: dict, chat: Chat) -> list[int]:
    """Token ids of a row that asks, by the rules of training; a `response` is left out."""
    messages = conversation(row, with_response=False)
    if messages[-1]["role"] == "assistant":
        raise UserError("the last message is the assistant's")
    asked = [message["content"] for message in messages if message["role"] != "system"]
    if not asked or not asked[-1].strip():
        raise UserError("an empty prompt")
    return chat.encode_prompt(messages)


def conversation(row: dict, with_response: bool) -> list[dict]:
    """A row's `messages`, or its `prompt` as one; UserError if one is not plain text."""
    messages = row.get("messages")
    prompt = row.get("prompt")
    if prompt is None:
        prompt = row.get("question")  # GSM8K's name
    if not messages and prompt is not None:
        messages = [{"role": "user", "content": prompt}]
    is_list = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if not is_list or not messages:
        raise UserError("neither messages nor a prompt")
    response = row.get("response")
    if response is None:
        response = row.get("completion")  # TRL's name
    if with_response and response is not None and messages[-1].get("role") != "assistant":
        messages = [*messages, {"role": "assistant", "content": response}]
    for message in messages:
        if message.get("function_calls") or message.get("tool_calls"):
            raise UserError("a tool call")  # the content lacks it
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UserError("content that is not text, or no role")
    return messages


@functools.lru_cache(maxsize=1)  # `next_batch` asks for the same order row by row
def shuffled(count: int, *key: object) -> array:
    """The numbers below count in an order that is a function of the key."""
    order = array("Q", range(count))
    random.Random(str(key)).shuffle(order)
    return order


class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of the others.

    The order is a function of (seed, epoch): there is no random state to save.
    """

    def __init__(
        self, rows: JsonlFile, chat: Chat, ends: tuple[int, ...], max_length: int, seed: int
    ):
        self.rows = rows
        self.chat = chat
        self.ends = ends
        self.max_length = max_length
        self.seed = seed
        self.consumed = 0  # rows of all epochs, including those that are skipped
        self.skipped: Counter[str] = Counter()  # why rows have no example (see `summary`)
        order = shuffled(len(rows), seed)
        num_held_out = min(NUM_HELD_OUT, len(rows) // 10)
        self.training = order[num_held_out:]
        self.held_out = list(self.examples(order[:num_held_out]))
        self.first = list(itertools.islice(self.examples(self.training), READ_AHEAD))
        if not self.first:
            raise UserError(f"{rows.path}: {self.summary()}; a row has the keys {[*rows[0]]}")
        # How many rows train. A long file is not read through: all its rows count.
        is_long = len(self.first) == READ_AHEAD
        self.num_usable = len(self.training) if is_long else len(self.first)

    def summary(self) -> str:
        """How many rows there are, and why some of those that were read are no examples."""
        text = f"{len(self.rows)} rows, {len(self.held_out)} held out"
        if self.skipped:
            num_read = len(self.held_out) + len(self.first) + self.skipped.total()
            reasons = ", ".join(f"{count} {why}" for why, count in self.skipped.most_common())
            text += f", of the first {num_read} skipped: {reasons}"
        return text

    def examples(self, indices: Iterable[int]) -> Iterator[Example]:
        """The examples of these rows; `skipped` counts why the others have none."""
        for index in indices:
            row = self.rows[index]  # UserError if the file was changed meanwhile
            try:
                yield make_example(row, self.chat, self.ends, self.max_length)
            except UserError as reason:
                self.skipped[str(reason)] += 1

    def next_batch(self, size: int) -> list[Example]:
        """The next examples of the stream, which begins anew, in another order, in each epoch."""
        batch = []
        while len(batch) < size:
            epoch, at = divmod(self.consumed, len(self.training))
            order = shuffled(len(self.training), self.seed, epoch)
            batch += self.examples([self.training[order[at]]])
            self.consumed += 1
        return batch
