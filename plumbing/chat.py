"""A checkpoint's tokenizer and chat template: messages -> text -> token ids, and back."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from .errors import UserError, failure_as
from .files import read_json, write_json

MASK = "<|mask|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Chat:
    """The tokenizer and chat template in `directory`; without a template, ChatML."""

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        with failure_as(f"{path}: missing or damaged"):
            self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()  # transformers saves what it was last called with
        self.tokenizer.no_padding()
        self.settings = {}
        if (directory / "tokenizer_config.json").exists():
            self.settings = read_json(directory / "tokenizer_config.json")
        with failure_as(f"{directory}: the chat template is damaged"):
            template = self.settings.pop("chat_template", None)
            if (directory / "chat_template.jinja").exists():
                template = (directory / "chat_template.jinja").read_text("utf-8")
            self.has_template = bool(template)
            self.template = template or CHATML
            names = {}  # eos_token and the like, some as text, some as an object
            for name, token in self.settings.items():
                if name.endswith("_token") and token:
                    names[name] = token["content"] if isinstance(token, dict) else token
            self.render = compile_template(self.template, names)

    @property
    def mask_id(self) -> int | None:
        return self.tokenizer.token_to_id(MASK)

    def prompt(self, messages: list[dict]) -> str:
        """The text that asks for the assistant's next turn (transformers: apply_chat_template)."""
        with failure_as("the chat template refuses this conversation"):
            return self.render(messages=messages, add_generation_prompt=True)

    def encode_prompt(self, messages: list[dict]) -> list[int]:
        """Token ids of a prompt in which the chat template shows every turn."""
        # A template would take a text for a list of empty messages.
        if isinstance(messages, str) or not all({"role", "content"} <= set(m) for m in messages):
            raise UserError('messages: expected a list of {"role": "user", "content": "..."}')
        text = self.prompt(messages)
        for message in messages:
            # Qwen3's template drops former thoughts, and Qwen2.5's some roles.
            said = message["content"].split("</think>")[-1]
            if said.strip() not in text:
                raise UserError(f"a turn that the chat template drops (role {message['role']!r})")
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        with failure_as("not valid Unicode"):  # half of a surrogate pair, from broken JSON
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=True), "utf-8")
        write_json(directory / "tokenizer_config.json", self.settings)
        (directory / "chat_template.jinja").write_text(self.template, "utf-8")


def compile_template(template: str, names: dict) -> Callable[..., str]:
    """With transformers' whitespace rules, and sandboxed: it is a program from a stranger."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    names = names | {"raise_exception": raise_exception}
    return jinja.from_string(template, globals=names).render
