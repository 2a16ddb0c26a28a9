"""A checkpoint's tokenizer and chat template: messages -> text -> token ids, and back."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from .errors import UserError, failure_as, first_line
from .files import read_json

MASK = "<|mask|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Chat:
    """The tokenizer and chat template in `directory`; without a template, ChatML."""

    def __init__(self, directory: Path):
        self.template_options: dict[str, object] = {}  # names that the template may ask for
        path = directory / "tokenizer.json"
        with failure_as(f"{path}: missing or damaged"):
            self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()  # transformers saves what it was last called with
        self.tokenizer.no_padding()
        self.settings = read_if_there(directory / "tokenizer_config.json")
        self._add_listed_tokens(directory)
        with failure_as(f"{directory}: the chat template is damaged"):
            self.template = read_template(directory, self.settings.pop("chat_template", None))
            self._render = compile_template(self.template, self.settings)

    def _add_listed_tokens(self, directory: Path) -> None:
        """Add tokens that other files list and tokenizer.json lacks, at the ids listed there."""
        listed = {}
        with failure_as(f"{directory}: its list of added tokens is damaged"):
            for content, id in read_if_there(directory / "added_tokens.json").items():
                listed[int(id)] = AddedToken(content, normalized=False)
            for id, token in (self.settings.get("added_tokens_decoder") or {}).items():
                special = token.get("special", True)
                listed[int(id)] = AddedToken(token["content"], normalized=False, special=special)
        for id, token in sorted(listed.items()):
            if self.tokenizer.token_to_id(token.content) is None:
                self.tokenizer.add_tokens([token])
            found = self.tokenizer.token_to_id(token.content)
            if found != id:
                raise UserError(f"{directory}: {token.content} is listed as {id}, but is {found}")

    @property
    def mask_id(self) -> int | None:
        return self.tokenizer.token_to_id(MASK)

    def prompt(self, messages: list[dict]) -> str:
        """The text that asks for the assistant's next turn (transformers: apply_chat_template)."""
        try:
            text = self._render(
                messages=messages, add_generation_prompt=True, **self.template_options
            )
        except Exception as error:  # the template is somebody's program: it may fail in any way
            reason = first_line(error)
            raise UserError(f"the chat template refuses this conversation: {reason}") from None
        if not text:
            raise UserError("the chat template makes an empty text of this conversation")
        return text

    def encode(self, text: str) -> list[int]:
        with failure_as(f"the tokenizer fails on {text[:40]!a}"):
            try:
                return self.tokenizer.encode(text, add_special_tokens=False).ids
            except TypeError:  # half of a surrogate pair, from broken JSON or a broken terminal
                raise UserError(f"not valid Unicode: {text[:40]!a}") from None

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        with failure_as("the tokenizer cannot turn tokens into text"):
            return self.tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(self.tokenizer.to_str(pretty=True), "utf-8")
        settings = json.dumps(self.settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(settings, "utf-8")
        (directory / "chat_template.jinja").write_text(self.template, "utf-8")


def read_if_there(path: Path) -> dict:
    if not path.exists():
        return {}
    return read_json(path)


def read_template(directory: Path, setting: str | list | None) -> str:
    """The text of a template: a file of its own, else what tokenizer_config.json says."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    if isinstance(setting, list):  # several templates with names
        by_name = {entry["name"]: entry["template"] for entry in setting}
        return by_name["default"]
    return setting or CHATML


def compile_template(template: str, settings: dict) -> Callable[..., str]:
    """With transformers' whitespace rules, and sandboxed: it is a program from a stranger."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    names = {"raise_exception": raise_exception}
    for name, token in settings.items():  # eos_token and the like, as text or as an object
        if name.endswith("_token") and token:
            names[name] = token["content"] if isinstance(token, dict) else token
    return jinja.from_string(template, globals=names).render
