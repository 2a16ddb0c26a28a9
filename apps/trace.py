"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --verify --prompt "..."

The page is one file without network access. Its facts are a JSON object in its source.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from decode import Decoder, Options, Sequence, Threshold, confidences, load_for_decoding
from lossless import Lossless, State
from plumbing.arguments import Parser, path, read_options
from plumbing.attention import FastModel
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.files import all_or_nothing
from plumbing.sampling import with_dice
from plumbing.signals import exit_on_sigterm
from plumbing.terminal import TextStream, note, print_answer

TEMPLATE = Path(__file__).with_suffix(".html")


class RecordedModel:
    """Keeps the logits that were asked for last: those of the candidates."""

    def __init__(self, model: FastModel):
        self.model = model

    def logits_at(self, hidden: Tensor, columns: Tensor) -> Tensor:
        self.logits = self.model.logits_at(hidden, columns)
        return self.logits


class TracedMethod:
    """A decoding method for one sequence; it keeps what each forward saw and decided."""

    def __init__(self, method: Threshold | Lossless, options: Options, chat: Chat):
        self.method = method
        self.widest = method.widest
        self.feed = method.feed
        self.options = options
        self.chat = chat
        self.forwards: list[dict] = []

    def decide(self, model: FastModel, hidden: Tensor, last: list[int], sequences: list) -> list:
        [sequence] = sequences
        before = copy.copy(sequence.state)
        recorded = RecordedModel(model)
        decisions = self.method.decide(recorded, hidden, last, sequences)
        [(tokens, _, held)] = decisions
        if self.options.verify:
            facts = self.of_guesses(before, sequence.state, held)
            first_ahead = held + 1
        else:
            facts = {"checked": [], "groups": [0], "masks": before[1], "passed": len(tokens)}
            first_ahead = 0
        candidates = self.candidates(sequence, recorded.logits, first_ahead)
        if self.options.verify:
            candidates = candidates[: max(0, self.method.block - facts["first"])]
        self.forwards.append(facts | {"held": held, "candidates": candidates})
        return decisions

    def of_guesses(self, before: State, after: State, held: int) -> dict:
        """What a forward of `verify` checked, and what the next one will check."""
        block = self.method.block
        num_useful = len(before.useful_masks(held, block))
        from_masks = len(after.lookup.from_masks)
        return {
            "checked": self.labels(before.guesses),
            "groups": before.groups,
            "masks": block,  # in each group
            "first": block - num_useful,  # of the group's masks, that is of use
            "passed": from_masks,
            "looked_up": self.labels(after.guesses[from_masks:]),
        }

    def candidates(self, sequence: Sequence, logits: Tensor, ahead: int) -> list[tuple[str, float]]:
        """Each candidate and how sure the model was of it. logits: (1, C, V)."""
        options = self.options
        scores = with_dice(logits, [sequence], options.temperature, options.seed, [ahead])
        tokens = scores.argmax(-1)
        if options.verify:
            sure = scores.softmax(-1).amax(-1)  # how likely a guess holds
        else:
            sure = confidences(logits.softmax(-1), tokens, options.metric)
        return list(zip(self.labels(tokens[0].tolist()), sure[0].tolist()))

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def trace(decoder: Decoder, chat: Chat) -> list[dict]:
    """The facts of each forward; a decoder's one sequence is printed as it comes."""
    method = TracedMethod(decoder.method, decoder.options, chat)
    decoder.method = method
    text = TextStream(chat)

    def steps() -> Iterator[tuple[Sequence, list[int]]]:
        for sequence, tokens in decoder:
            method.forwards[-1]["tokens"] = method.labels(tokens)
            method.forwards[-1]["text"] = text.add(tokens)
            method.forwards[-1]["positions"] = sequence.widths[-1]
            yield sequence, tokens

    print_answer(steps(), chat, shaded=False)
    return method.forwards


def make_page(prompt: str, options: Options, forwards: list[dict]) -> str:
    facts = {
        "prompt": prompt,
        "tau": options.tau,
        "metric": "probability" if options.verify else options.metric,
        "verify": options.verify,
        "forwards": forwards,
    }
    text = json.dumps(facts).replace("<", "\\u003c")  # "</script>" would end the JSON
    return TEMPLATE.read_text(encoding="utf-8").replace("FACTS", text, 1)


def main() -> None:
    parser = Parser("Write a page that shows every forward of an answer (MARS).")
    parser.add_argument("page", metavar="PAGE.html", type=path, help="the file to write")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model(None, "directory or hub id (default: the bundled toy/mars)")
    parser.add_template_option()
    parser.add_options(Options)
    args = parser.parse_args()
    exit_on_sigterm()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    if args.page.suffix != ".html" or args.page.is_dir():
        raise UserError(f"{args.page}: name a file that ends with .html")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args)
    prompt = chat.encode(chat.prompt([{"role": "user", "content": args.prompt}]))
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    decoder.add(prompt)
    with all_or_nothing(args.page.parent) as folder:  # or it fails now, not after the answer
        page = make_page(args.prompt, options, trace(decoder, chat))
        (folder / args.page.name).write_text(page, encoding="utf-8")
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
