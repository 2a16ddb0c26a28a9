"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --prompt "..."

The page is one file without network access. Its facts are a JSON object in its source.
"""

import json
from pathlib import Path

from decode import Decoder, Method, Options, add_options, load_for_decoding, read_options
from lossless import useful_masks
from plumbing.arguments import Parser
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import run_main
from plumbing.files import atomic_write
from plumbing.terminal import TextStream, note
from scheduler import Position, Sequence, num_in_common

TEMPLATE = Path(__file__).with_suffix(".html")


class TracedMethod:
    """A decoding method for one sequence, which keeps what each forward was fed and decided."""

    def __init__(self, method: Method, is_lossless: bool, chat: Chat):
        self.method = method
        self.is_lossless = is_lossless
        self.chat = chat
        self.forwards: list[dict] = []

    def additions(self, sequence: Sequence) -> list[Position]:
        self.fed = self.method.additions(sequence)
        return self.fed

    def accept(self, sequence: Sequence, tokens: list[int], confidences: list[float]) -> list[int]:
        accepted = self.method.accept(sequence, tokens, confidences)
        fed = self.fed[: len(tokens) - 1]  # a cache block may have had no room for all of it
        guesses = [position.token for position in fed if not position.is_mask]
        facts = {
            "checked": self.labels(guesses),
            "held": num_in_common(guesses, accepted),
            "masks": len(fed) - len(guesses),
            "groups": len({position.prefix for position in fed if position.is_mask}),
        }
        shown = range(len(tokens))
        passed = len(accepted)
        if self.is_lossless:
            plan = sequence.state
            shown = useful_masks(plan, facts["held"])
            text = sequence.token_ids + accepted
            chain = self.method.chain(plan.lookup, text, plan.from_masks)  # of the next forward
            planned = [guess.token for guess in chain]
            passed = num_in_common([tokens[i] for i in shown], planned)
            facts["looked_up"] = self.labels(planned[passed:])
            # So many masks of the group are of no use: they stand where tokens are known by now.
            facts["first"] = plan.group_size - len(shown)
        labels = self.labels(tokens)
        facts["passed"] = passed
        facts["candidates"] = [(labels[i], confidences[i]) for i in shown]
        self.forwards.append(facts)
        return accepted

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def trace(decoder: Decoder, chat: Chat) -> list[dict]:
    """The facts of each forward of a decoder's one sequence."""
    method = decoder.method = TracedMethod(decoder.method, decoder.options.is_lossless, chat)
    text = TextStream(chat)
    for sequence, tokens in decoder:
        facts = method.forwards[-1]
        facts["tokens"] = method.labels(tokens)
        facts["text"] = text.add(tokens)
        facts["positions"] = sequence.widths[-1]
    return method.forwards


def make_page(prompt: str, options: Options, forwards: list[dict]) -> str:
    facts = {"prompt": prompt, "forwards": forwards, "lossless": options.is_lossless}
    facts |= {"tau": options.tau, "metric": options.metric}
    text = json.dumps(facts).replace("<", "\\u003c")  # "</script>" would end the JSON
    return TEMPLATE.read_text(encoding="utf-8").replace("FACTS", text, 1)


def main() -> None:
    parser = Parser("Write a page that shows every forward of an answer (MARS).")
    parser.add_argument("page", metavar="PAGE.html", type=Path, help="the file to write")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model()
    add_options(parser)
    args = parser.parse_args()
    options = read_options(args)
    model, chat = load_for_decoding(args, options)
    prompt = encode_prompt({"prompt": args.prompt}, chat)
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    page = make_page(args.prompt, options, trace(decoder, chat))
    atomic_write(args.page, lambda file: file.write_text(page, encoding="utf-8"))
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
