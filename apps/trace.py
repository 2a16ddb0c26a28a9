"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --verify --prompt "..."

The page is one file without network access. Its facts are a JSON object in its source.
"""

import json
from pathlib import Path

if not __package__:
    import as_file  # noqa: F401 - says how to run it, and exits

from decode import Decoder, Options, load_for_decoding
from plumbing.arguments import Parser, read_options
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.scheduler import Decision, Fed, Method, Sequence, num_in_common
from plumbing.terminal import TextStream, note

TEMPLATE = Path(__file__).with_suffix(".html")


class TracedMethod:
    """A decoding method for one sequence, which keeps what each forward was fed and decided."""

    def __init__(self, method: Method, verify: bool, chat: Chat):
        self.method = method
        self.verify = verify
        self.chat = chat
        self.widest = method.widest
        self.metric = method.metric
        self.forwards: list[dict] = []

    def feed(self, sequence: Sequence) -> list[Fed]:
        self.fed = self.method.feed(sequence)
        return self.fed

    def decide(self, sequence: Sequence, best: list[int], sure: list[float]) -> Decision:
        decision = self.method.decide(sequence, best, sure)
        fed = self.fed[: len(best) - 1]  # a cache block may have had no room for all of it
        guesses, masks = split(fed)
        facts = {
            "checked": self.labels(guesses),
            "held": decision.num_held,
            "masks": len(masks),
            "groups": len({prefix for _, _, prefix in masks}),
        }
        if self.verify:
            facts |= self.next_guesses(sequence, fed, best, sure, decision.num_held)
        else:
            facts["candidates"] = list(zip(self.labels(best), sure))
            facts["passed"] = len(decision.tokens)
        self.forwards.append(facts)
        return decision

    def next_guesses(
        self, sequence: Sequence, fed: list[Fed], best: list[int], sure: list[float], held: int
    ) -> dict:
        """What the masks predict that saw the most guesses that hold, and what comes of it."""
        end = len(sequence.text) + held  # where the model's own token stands
        _, masks = split(fed)
        saw_no_failure = [prefix for _, _, prefix in masks if prefix <= end]
        most_seen = max(saw_no_failure, default=end)
        useful = []  # positions: 0 is the last real token, then comes what was fed
        for i, (_, pos, prefix) in enumerate(fed, start=1):
            if prefix == most_seen and pos >= end:
                useful.append(i)
        tokens = [best[i] for i in useful]
        guesses, _ = split(self.method.feed(sequence))  # of the next forward
        num_from_masks = num_in_common(tokens, guesses)
        return {
            "candidates": list(zip(self.labels(tokens), [sure[i] for i in useful])),
            "first": end - most_seen,  # of the group's masks, that is of use
            "passed": num_from_masks,
            "looked_up": self.labels(guesses[num_from_masks:]),
        }

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def split(fed: list[Fed]) -> tuple[list[int], list[Fed]]:
    """The guesses among what follows a text (a real token has prefix = pos + 1), and the masks."""
    guesses = [token for token, pos, prefix in fed if prefix == pos + 1]
    return guesses, fed[len(guesses) :]


def trace(decoder: Decoder, chat: Chat) -> list[dict]:
    """The facts of each forward of a decoder's one sequence."""
    method = TracedMethod(decoder.method, decoder.options.verify, chat)
    decoder.method = method
    text = TextStream(chat)
    for sequence, tokens in decoder:
        facts = method.forwards[-1]
        facts["tokens"] = method.labels(tokens)
        facts["text"] = text.add(tokens)
        facts["positions"] = sequence.widths[-1]
    return method.forwards


def make_page(prompt: str, options: Options, forwards: list[dict]) -> str:
    facts = {"prompt": prompt, "forwards": forwards, **vars(options)}
    text = json.dumps(facts).replace("<", "\\u003c")  # "</script>" would end the JSON
    return TEMPLATE.read_text(encoding="utf-8").replace("FACTS", text, 1)


def main() -> None:
    parser = Parser("Write a page that shows every forward of an answer (MARS).")
    parser.add_argument("page", metavar="PAGE.html", type=Path, help="the file to write")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model()
    parser.add_options(Options)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    if not args.page.parent.is_dir():
        raise UserError(f"{args.page.parent}: no such directory")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args)
    prompt = chat.encode_prompt([{"role": "user", "content": args.prompt}])
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    page = make_page(args.prompt, options, trace(decoder, chat))
    args.page.write_text(page, encoding="utf-8")
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
