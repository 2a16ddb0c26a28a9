"""Training data: rows of a JSONL file to examples, and an endless shuffled stream of steps."""

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .chat import Chat
from .errors import UserError
from .jsonl import JsonlFile

CHARACTERS_PER_TOKEN = 64  # no ordinary text has more on average


class Unusable(Exception):
    """Why a row cannot be trained on; such rows are skipped and counted."""


@dataclass
class Example:
    tokens: list[int]  # prompt, response and, unless it was cut, the end-of-turn token
    prompt: int  # length of the prompt
    phase: int = 0  # of the block grid

    @property
    def targets(self) -> int:
        """How many tokens are to be predicted."""
        return len(self.tokens) - self.prompt


def encode(row: dict, chat: Chat, eos: int, max_length: int, ends: tuple[int, ...] = ()) -> Example:
    """The last assistant turn is the response, everything before it the prompt, as in the paper.

    eos: the token that ends the response; ends: all tokens at which a decoder would stop.
    """
    messages = usable_messages(row)
    try:
        text = chat.prompt(messages[:-1])
        prompt = encode_start(chat, text, max_length)
        response = encode_start(chat, messages[-1]["content"], max_length)
    except UserError:
        raise Unusable("refused by the chat template or the tokenizer") from None
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


def with_prompt(row: dict) -> dict:
    """The row with a `prompt`, also where its name is `question`, as in GSM8K."""
    if row.get("prompt") is None and row.get("question") is not None:
        return row | {"prompt": row["question"]}
    return row


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
    if not all(isinstance(m.get("content"), str) for m in messages):
        raise Unusable("content that is not text")
    return messages


def encode_start(chat: Chat, text: str, max_tokens: int) -> list[int]:
    """The first max_tokens tokens of a text; of a very long text only the start is tokenized."""
    start = text[: CHARACTERS_PER_TOKEN * max_tokens]
    tokens = chat.encode(start)
    if len(start) < len(text) and len(tokens) < 2 * max_tokens:  # very long tokens, such as spaces
        tokens = chat.encode(text)
    return tokens[:max_tokens]


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


class Dataset:
    """Examples of a JSONL file: a held-out slice, and an endless shuffled stream of the others.

    Order and block phases are functions of (seed, epoch, row): there is no random state to save.
    """

    def __init__(
        self,
        rows: JsonlFile,
        chat: Chat,
        eos: int,
        phases: int,
        max_length: int,
        seed: int,
        held_out: int,
        ends: tuple[int, ...] = (),
    ):
        """eos, ends: see `encode`."""
        self.rows = rows
        self.chat = chat
        self.eos = eos
        self.ends = ends
        self.phases = phases  # of the block grid: 1, or as many as a block has positions
        self.max_length = max_length
        self.seed = seed
        self.skipped: Counter[str] = Counter()
        order = shuffled(len(rows), seed)
        num_held_out = min(held_out, len(rows) // 10)
        self.training = order[num_held_out:]
        held_out_examples = [self.example(index, epoch=-1) for index in order[:num_held_out]]
        self.held_out = [example for example in held_out_examples if example]
        self._check_usable()

    def _check_usable(self) -> None:
        """Raise UserError if no training row is usable; the first usable row ends the search."""
        found = Counter(self.skipped)
        for index in self.training:
            try:
                self._encode(index)
                return
            except Unusable as reason:
                found[str(reason)] += 1
        raise UserError(f"{self.rows.path}: no usable row: {reasons(found)}")

    def _encode(self, index: int) -> Example:
        return encode(self.rows[index], self.chat, self.eos, self.max_length, self.ends)

    def example(self, index: int, epoch: int) -> Example | None:
        try:
            example = self._encode(index)
        except Unusable as reason:
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
