"""Training data: rows of a JSONL file to examples, and an endless shuffled stream of steps."""

import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from typing import NamedTuple

from .chat import Chat
from .errors import UserError
from .jsonl import JsonlFile, with_prompt


class Unusable(UserError):
    """Why a row cannot be trained on; such rows are skipped and counted."""


@dataclass
class Example:
    tokens: list[int]  # prompt, response and, unless it was cut, the end-of-turn token
    prompt_length: int
    phase: int = 0  # of the block grid

    @property
    def num_targets(self) -> int:
        """How many tokens are to be predicted."""
        return len(self.tokens) - self.prompt_length

    @property
    def response(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def encode(row: dict, chat: Chat, eos: int, max_length: int, ends: tuple[int, ...] = ()) -> Example:
    """The last assistant turn is the response, everything before it the prompt, as in the paper.

    eos: the token that ends the response; ends: all tokens at which a decoder would stop.
    """
    messages = usable_messages(row)
    text = chat.prompt(messages[:-1])
    prompt = chat.encode(text)
    response = chat.encode(messages[-1]["content"])
    for message in messages[:-1]:
        said = message["content"].split("</think>")[-1]  # Qwen3's template drops former thoughts
        if said.strip() not in text:  # and Qwen2.5's some roles
            raise Unusable("a turn that the chat template drops")
    if not response:
        raise Unusable("an empty response")
    if not {chat.mask_id, eos, *ends}.isdisjoint(response):  # never predicted, or only at the end
        raise Unusable("a mask or end-of-turn token in the response")
    if not 0 < len(prompt) < max_length:
        raise Unusable(f"prompt of {max_length} tokens or more")
    tokens = prompt + response
    if row.get("finish_reason") != "length":  # a response that was cut short has no end
        tokens.append(eos)
    return Example(tokens[:max_length], len(prompt))


def encode_prompt(row: dict, chat: Chat) -> list[int]:
    """Token ids of a prompt. The rules are those of training, which may read the output."""
    example = encode(row | {"response": "?"}, chat, eos=-1, max_length=sys.maxsize)
    if row.get("messages") and row["messages"][-1]["role"] == "assistant":
        raise Unusable("the last message is the assistant's")
    return example.tokens[: example.prompt_length]


def usable_messages(row: dict) -> list[dict]:
    """The conversation up to the last assistant turn; Unusable if there is none."""
    row = with_prompt(row)
    messages = row.get("messages")
    if messages is None and "prompt" in row and "response" in row:
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Unusable("neither messages nor prompt and response")
    if "response" in row and messages and messages[-1].get("role") != "assistant":
        messages = [*messages, {"role": "assistant", "content": row["response"]}]
    while messages and messages[-1].get("role") != "assistant":
        messages = messages[:-1]
    if not messages:
        raise Unusable("no assistant turn")
    for message in messages:
        if message.get("function_calls") or message.get("tool_calls"):
            raise Unusable("a tool call")  # the content lacks it
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise Unusable("content that is not text, or no role")
    return messages


def shuffled(count: int, *key: object) -> array:
    """The numbers below count in an order that is a function of the key."""
    order = array("Q", range(count))
    random.Random(str(key)).shuffle(order)
    return order


class Step(NamedTuple):
    """What one step trains on, and how far the data is consumed after it."""

    examples: list[Example]
    consumed: int  # rows, including the skipped ones
    skipped: dict[str, int]


@dataclass
class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of the others.

    Order and block phases are functions of (seed, epoch, row): there is no random state to save.
    """

    rows: JsonlFile
    chat: Chat
    eos: int  # this and `ends`: see `encode`
    phases: int  # of the block grid: 1, or as many as a block has positions
    max_length: int
    seed: int
    num_held_out: InitVar[int]
    ends: tuple[int, ...] = ()

    def __post_init__(self, num_held_out: int):
        self.skipped: Counter[str] = Counter()
        order = shuffled(len(self.rows), self.seed)
        num_held_out = min(num_held_out, len(self.rows) // 10)
        self.training = order[num_held_out:]
        held_out_examples = [self.example(index, epoch=-1) for index in order[:num_held_out]]
        self.held_out = [example for example in held_out_examples if example]
        skipped = Counter(self.skipped)
        if not any(self.example(index, epoch=0) for index in self.training):
            raise UserError(f"{self.rows.path}: no usable row: {reasons(self.skipped)}")
        self.skipped = skipped  # without the rows that were only tried here

    def example(self, index: int, epoch: int) -> Example | None:
        row = self.rows[index]
        try:
            example = encode(row, self.chat, self.eos, self.max_length, self.ends)
        except UserError as reason:  # also of the chat template
            if epoch <= 0:  # count a row once, however many epochs there are
                self.skipped[str(reason)] += 1
            return None
        example.phase = random.Random(f"{self.seed} {epoch} {index}").randrange(self.phases)
        return example

    def steps(self, batch: int, start_at: int = 0) -> Iterator[Step]:
        """Yield steps of `batch` examples endlessly, from row `start_at` of all epochs on."""
        consumed = start_at
        examples = []
        order_of = None
        while True:
            epoch, at = divmod(consumed, len(self.training))
            if epoch != order_of:
                order = shuffled(len(self.training), self.seed, epoch)
                order_of = epoch
            example = self.example(self.training[order[at]], epoch)
            consumed += 1
            if example:
                examples.append(example)
            if len(examples) == batch:
                yield Step(examples, consumed, dict(self.skipped))
                examples = []


def reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in Counter(skipped).most_common())
