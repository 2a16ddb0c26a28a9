"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --verify --prompt "..."

The page is one file without network access. Its facts are a JSON object in its source.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from decode import Answer, Decision, Decoder, Options, confidences, load_for_decoding
from plumbing.arguments import Parser, path, read_options
from plumbing.chat import Chat
from plumbing.errors import UserError, run_main
from plumbing.files import atomic_write
from plumbing.terminal import TextStream, note, print_answer

TEMPLATE = Path(__file__).with_suffix(".html")


class Trace:
    """What each forward of a decoder with one row saw and decided."""

    def __init__(self, chat: Chat, decoder: Decoder):
        self.chat = chat
        self.options = decoder.options
        self.forwards: list[dict] = []
        self.decoder = decoder
        decoder.watch = self.watch

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]

    def watch(self, batch: list, outputs, candidates, decisions: list[Decision]) -> None:
        """Called by the decoder within each forward, before the answer takes its tokens."""
        [answer], [decision] = batch, decisions
        probs = outputs.logits.softmax(-1)
        sure = confidences(probs, candidates, self.options.metric)[0].tolist()
        pairs = list(zip(self.labels(candidates[0].tolist()), sure))[: 1 + answer.num_masks]
        passed = len(decision.tokens)
        if self.options.verify:
            # The first is for the place of AR's own token. Without their group there are no others.
            pairs = pairs[1:] if decision.num_held in answer.groups else []
            passed = len(decision.guesses)
        self.forwards.append(
            {
                "checked": self.labels(answer.guesses),
                "held": decision.num_held,
                "tokens": self.labels(decision.tokens),
                "groups": answer.groups,
                "masks": answer.num_masks,  # in each group
                "candidates": pairs,
                "passed": passed,
            }
        )

    def __iter__(self) -> Iterator[tuple[Answer, list[int]]]:
        """Decode; yields what the decoder does."""
        text = TextStream(self.chat)
        for answer, tokens in self.decoder:
            forward = self.forwards[-1]
            forward["tokens"] = forward["tokens"][: len(tokens)]  # what was within the answer
            forward["text"] = text.add(tokens)
            forward["positions"] = answer.positions[-1]
            yield answer, tokens

    def page(self, prompt: str) -> str:
        facts = {
            "prompt": prompt,
            "tau": self.options.tau if self.options.tau < math.inf else None,  # JSON has no inf
            "metric": self.options.metric,
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
    parser.add_options(Options)
    args = parser.parse_args()
    if not args.prompt.strip():
        raise UserError("--prompt is empty")
    if args.page.suffix != ".html" or args.page.is_dir():
        raise UserError(f"{args.page}: name a file that ends with .html")
    options = read_options(args, Options)
    model, chat = load_for_decoding(args, options)
    prompt = chat.prompt([{"role": "user", "content": args.prompt}])
    answer = Answer(chat.encode(prompt), model, options)
    trace = Trace(chat, Decoder(model, [answer], options, rows=1))
    print_answer(trace, chat, shaded=False)
    page = trace.page(args.prompt)
    atomic_write(args.page, lambda path: path.write_text(page, encoding="utf-8"))
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
