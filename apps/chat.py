"""A conversation with a knob: `/tau 0.7` takes effect at the next answer.

    python -m apps.chat --tau 0.8

Without --tau there is no knob: every answer is the one of tau 1. The cache keeps the conversation,
so each turn feeds only what is new.
"""

import contextlib

from decode import Decoder, Options, add_options, load_for_decoding, read_options
from model import Qwen2
from plumbing.arguments import Parser, check_tau
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.terminal import note, print_answer

COMMANDS = "/tau 0.7 sets tau (after --tau), /reset starts a new conversation"
LONGEST = 16384  # tokens of a conversation; its cache is made once


class Conversation:
    """The messages so far, and a decoder whose one row holds them."""

    def __init__(self, model: Qwen2, chat: Chat, options: Options):
        self.chat = chat
        self.tau = options.tau
        self.messages = []
        self.decoder = Decoder(model, options, rows=1, longest=LONGEST)

    def take(self, line: str) -> None:
        """A command or a turn; a line with an error changes nothing."""
        if line == "/reset":
            self.messages = []
        elif line.startswith("/tau "):
            if self.tau is None:
                raise UserError("there is no tau to set: start the conversation with --tau")
            tau = float(line.removeprefix("/tau "))
            check_tau(tau, self.decoder.options.metric)
            self.tau = tau
        elif line.startswith("/"):
            raise UserError(f"{line}: no such command (Ctrl-D ends the conversation)")
        elif line:
            self.ask(line)

    def ask(self, text: str) -> None:
        """Print an answer. If Ctrl-C ends it, what there is stays in the conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self.decoder.add(self.chat.encode_prompt(asked), self.tau)
        try:
            print_answer(self.decoder, self.chat)
        except KeyboardInterrupt:
            answer.done = True
        reply = {"role": "assistant", "content": self.chat.decode(answer.tokens)}
        self.messages = [*asked, reply]


def main() -> None:
    parser = Parser("A conversation, several tokens per forward (MARS).")
    parser.add_model()
    add_options(parser)
    args = parser.parse_args()
    options = read_options(args)
    model, chat = load_for_decoding(args, options)
    conversation = Conversation(model, chat, options)
    with contextlib.suppress(ImportError):  # on Windows
        import readline  # noqa: F401  arrow keys and history for input()
    note(f"{COMMANDS}, Ctrl-C ends an answer, Ctrl-D the conversation")
    while True:
        knob = "> " if conversation.tau is None else f"tau {conversation.tau:g}> "
        try:
            conversation.take(input(knob).strip())
        except EOFError:
            return note("")
        except KeyboardInterrupt:  # of a half-typed line
            note("")
        except ValueError as error:  # a UserError; not a number; not UTF-8
            note(f"error: {error}; {COMMANDS}")


if __name__ == "__main__":
    run_main(main, out_of_memory="use /reset sooner, or a smaller model")
