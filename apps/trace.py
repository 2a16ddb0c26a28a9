"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --verify --prompt "..."

The page is one file without network access. Its facts are a JSON object in its source.
"""

import json
from pathlib import Path

from torch import Tensor

from decode import Decoder, Options, Sequence, confidences, load_for_decoding
from lossless import best_group
from model import Qwen2
from plumbing.arguments import Parser, path, read_options
from plumbing.attention import FastForward
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.files import all_or_nothing
from plumbing.sampling import with_dice
from plumbing.signals import exit_on_sigterm
from plumbing.terminal import TextStream, note, print_answer

TEMPLATE = Path(__file__).with_suffix(".html")


class RecordedForward(FastForward):
    """Keeps the logits that were asked for last: those of the candidates."""

    def logits_at(self, hidden: Tensor, columns: Tensor) -> Tensor:
        self.logits = super().logits_at(hidden, columns)
        return self.logits


class TracedDecoder(Decoder):
    """A decoder with one row that keeps what each forward saw and decided."""

    def __init__(self, model: Qwen2, chat: Chat, options: Options, longest: int):
        super().__init__(model, options, rows=1, longest=longest)
        self.forward = RecordedForward(model, self.cache, options.compile)
        self.chat = chat
        self.text = TextStream(chat)
        self.forwards: list[dict] = []

    def decide(self, hidden: Tensor, last_columns: list[int], batch: list[Sequence]) -> list:
        [sequence] = batch
        facts = {
            "checked": self.labels(sequence.guesses),
            "groups": sequence.groups,
            "masks": self.block if self.lossless else sequence.num_masks,  # in each group
        }
        decisions = super().decide(hidden, last_columns, batch)
        [(tokens, held)] = decisions
        candidates = self.candidates(sequence, held)
        passed = len(tokens)
        if self.lossless:
            # The new guesses: of masks that saw `seen` of the former ones, then from the text.
            seen = best_group(facts["groups"], held)
            first = self.block if seen is None else held - seen
            candidates = candidates[1 : 1 + max(0, self.block - first)]  # 0: AR's own token
            passed = len(sequence.lookup.from_masks)
            facts |= {"first": first, "looked_up": self.labels(sequence.guesses[passed:])}
        facts |= {"held": held, "tokens": tokens, "candidates": candidates, "passed": passed}
        self.forwards.append(facts)
        return decisions

    def candidates(self, sequence: Sequence, held: int) -> list[tuple[str, float]]:
        """Each candidate and how sure the model was of it."""
        options = self.options
        logits = self.forward.logits  # (1, C, V)
        scores = with_dice(logits, [sequence], options.temperature, options.seed, [held])
        tokens = scores.argmax(-1)
        if options.verify:
            sure = scores.softmax(-1).amax(-1)  # how likely a guess holds
        else:
            sure = confidences(logits.softmax(-1), tokens, options.metric)
        return list(zip(self.labels(tokens[0].tolist()), sure[0].tolist()))

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    def step(self) -> list[tuple[Sequence, list[int]]]:
        news = super().step()
        for sequence, tokens in news:
            forward = self.forwards[-1]
            forward["tokens"] = self.labels(tokens)  # what was within the answer
            forward["text"] = self.text.add(tokens)
            forward["positions"] = sequence.positions[-1]
        return news

    def page(self, prompt: str) -> str:
        facts = {
            "prompt": prompt,
            "tau": self.options.tau,
            "metric": "probability" if self.options.verify else self.options.metric,
            "verify": self.options.verify,
            "forwards": self.forwards,
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
    decoder = TracedDecoder(model, chat, options, len(prompt) + options.max_new)
    decoder.add(prompt)
    with all_or_nothing(args.page.parent) as folder:  # or it fails now, not after the answer
        print_answer(decoder, chat, shaded=False)
        page = decoder.page(args.prompt)
        (folder / args.page.name).write_text(page, encoding="utf-8")
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
