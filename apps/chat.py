"""A conversation with a knob: `/tau 0.7` takes effect at the next answer.

    python -m apps.chat --tau 0.8

The cache keeps the conversation, so each turn feeds only what is new.
"""

import contextlib
import sys
from dataclasses import replace

from decode import Answer, Decoder, Options, load_for_decoding
from model import Qwen2
from plumbing.arguments import Parser, read_options
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.terminal import note, print_answer

COMMANDS = "/tau 0.7 sets tau, /reset starts a new conversation"


class Conversation:
    """The messages so far, and a decoder whose one row holds them."""

    def __init__(self, model: Qwen2, chat: Chat, options: Options, opening: list[dict]):
        """opening: the system message, if there is one."""
        self.chat = chat
        self.options = options
        self.opening = opening
        self.messages = opening
        self.num_turns = 0
        longest = model.config.max_position_embeddings
        self.decoder = Decoder(model, [], options, rows=1, longest=longest)

    def request(self, messages: list[dict]) -> Answer:
        prompt = self.chat.encode(self.chat.prompt(messages))
        return Answer(prompt, self.decoder.model, self.options, index=self.num_turns)

    def ask(self, text: str, shaded: bool) -> None:
        """Print an answer. If Ctrl-C ends it, what there is stays in the conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self.request(asked)
        self.num_turns += 1
        self.decoder.waiting.append(answer)
        try:
            print_answer(self.decoder, self.chat, shaded)
        except KeyboardInterrupt:
            self.decoder.waiting.clear()
            answer.done = True
        reply = {"role": "assistant", "content": self.chat.decode(answer.tokens)}
        self.messages = [*asked, reply]

    def take(self, line: str, shaded: bool) -> None:
        """A command or a turn; a line with an error changes nothing."""
        if line == "/reset":
            self.messages = self.opening
        elif line.startswith("/tau "):
            self.options = replace(self.options, tau=float(line.removeprefix("/tau ")))
        elif line.startswith("/"):
            raise UserError(f"{line}: no such command")
        elif line:
            self.ask(line, shaded)


def main() -> None:
    parser = Parser("A conversation, several tokens per forward (MARS).")
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    parser.add_argument("--show", action="store_true", help="shade tokens accepted in one forward")
    parser.add_model(None, "directory or hub id (default: the bundled toy/mars)")
    parser.add_options(Options)
    args = parser.parse_args()
    options = read_options(args, Options)
    model, chat = load_for_decoding(args, options)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    conversation = Conversation(model, chat, options, opening)
    # Find out now if no turn is possible.
    conversation.request([*opening, {"role": "user", "content": "?"}])
    with contextlib.suppress(ImportError):  # on Windows
        import readline  # noqa: F401  arrow keys and history for input()
    note(f"{COMMANDS}, Ctrl-C ends an answer, Ctrl-D the conversation")
    while True:
        knob = f"tau {conversation.options.tau:g}> " if sys.stdout.isatty() else ""
        try:
            conversation.take(input(knob).strip(), args.show)
        except EOFError:
            return note("")
        except KeyboardInterrupt:  # of a half-typed line
            note("")
        except ValueError as error:  # a UserError; not a number; not UTF-8
            note(f"error: {error}; {COMMANDS}")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a model with a shorter context")
