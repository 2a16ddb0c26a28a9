"""Write a page that shows every forward of an answer: its guesses, how sure, what became of them.

    python -m apps.trace page.html --tau 0.8 --prompt "..."
    python -m apps.trace page.html --prompt "..."
    python -m apps.trace picture.svg --prompt "..."  # moves: AR's forwards, below them these

The page is one file without network access. Its facts are a JSON object in its source.
"""

import json
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import escape

from decode import AR_TAU, Decoder, Method, Options, add_options, load_for_decoding, read_options
from lossless import useful_masks, witness
from model import Qwen2
from plumbing.arguments import Parser
from plumbing.chat import Chat
from plumbing.data import encode_prompt
from plumbing.errors import run_main
from plumbing.files import atomic_write
from plumbing.terminal import TextStream, note
from scheduler import Position, Sequence, num_in_common

TEMPLATE = Path(__file__).with_suffix(".html")
LEFT, LINE = 14, 28  # of the picture: where lines begin, and their height


class TracedMethod:
    """A decoding method for one sequence, which keeps what each forward was fed and decided."""

    def __init__(self, method: Method, options: Options, chat: Chat):
        self.method = method
        self.options = options
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
            "guesses": [],  # of the next forward
        }
        shown = range(len(tokens))
        passed = len(accepted)
        rejected = tokens[passed:]
        if self.options.is_lossless:
            plan = sequence.state
            shown = useful_masks(plan, facts["held"])
            rejected = guesses[facts["held"] :]
            text = sequence.token_ids + accepted
            chain = self.method.chain(plan.lookup, text, plan.from_masks)
            planned = [guess.token for guess in chain]
            passed = num_in_common([tokens[i] for i in shown], planned)
            facts["guesses"] = self.labels(planned)
            # So many masks of the group are of no use: they stand where tokens are known by now.
            facts["first"] = plan.group_size - len(shown)
        if self.options.guard:  # of each mask's token, as if all before it were accepted
            later = range(1, len(tokens))
            facts["witness"] = [witness(sequence, tokens[:i], tokens[i]) for i in later]
        labels = self.labels(tokens)
        facts |= {"passed": passed, "rejected": self.labels(rejected)}
        facts["candidates"] = [(labels[i], confidences[i]) for i in shown]
        self.forwards.append(facts)
        return accepted

    def labels(self, tokens: list[int]) -> list[str]:
        return [self.chat.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


def trace(model: Qwen2, chat: Chat, prompt: list[int], options: Options) -> list[dict]:
    """The facts of each forward of a prompt's answer."""
    decoder = Decoder(model, options, rows=1, longest=len(prompt) + options.max_new)
    method = decoder.method = TracedMethod(decoder.method, options, chat)
    decoder.add(prompt)
    text = TextStream(chat)
    for sequence, tokens in decoder:
        facts = method.forwards[-1]
        facts["tokens"] = method.labels(tokens)
        facts["text"] = text.add(tokens)
        facts["positions"] = sequence.widths[-1]
    if options.is_lossless:  # no forward checks the last one's guesses
        facts |= {"candidates": [], "passed": 0, "guesses": []}
    return method.forwards


def make_page(prompt: str, options: Options, forwards: list[dict]) -> str:
    facts = {"prompt": prompt, "forwards": forwards, "lossless": options.is_lossless}
    facts |= {"tau": options.tau, "metric": options.metric}
    text = json.dumps(facts).replace("<", "\\u003c")  # "</script>" would end the JSON
    return TEMPLATE.read_text(encoding="utf-8").replace("FACTS", text, 1)


class Picture:
    """SVG of tokens in boxes, each seen from one tick to another; a forward takes two ticks."""

    svg = ""
    bottom = 38  # y, below all that was put

    def put(self, kind: str, tokens: list[str], place: tuple, begin: int, end=9999) -> tuple:
        """Put tokens line by line from a place (x, y) on. Returns the place after them."""
        x, y = place
        boxes = ""
        for token in tokens:
            text = token.replace("\n", "⏎").replace(" ", "\xa0")  # SVG drops a leading space
            text = "".join(c if c.isprintable() else "\xa0" for c in text)  # XML has no others
            width = 10 * len(text)
            if x + width > 466:
                x, y = LEFT, y + LINE
            boxes += f'<rect x="{x}" y="{y}" width="{width + 6}"/>'
            boxes += f'<text x="{x + 3}" y="{y + 17}" textLength="{width}">{escape(text)}</text>'
            x += width + 8
        if tokens:
            self.svg += f'<g class="{kind}" style="--begin:{begin};--end:{end}">{boxes}</g>\n'
            self.bottom = max(self.bottom, y + LINE)
        return x, y


def make_picture(answers: dict[str, list[dict]]) -> str:
    """The page's facts as SVG that moves. answers: the forwards of each, by its title."""
    picture = Picture()
    for title, forwards in answers.items():
        top = picture.bottom + 8
        place = (LEFT, top + LINE)
        for n, forward in enumerate(forwards):
            begin, middle, end = 2 * n, 2 * n + 1, 2 * n + 2
            picture.put("count", [f"{title:30} forwards: {n + 1:3}"], (LEFT, top), begin)
            after = picture.put("guess", forward["checked"], place, begin, middle)
            picture.put("mask", ["M"] * forward["masks"], after, begin, middle)
            place = picture.put(f"yes shade{n % 2}", forward["tokens"], place, middle)
            after = picture.put("no", forward["rejected"], place, middle, end)
            picture.put("guess", forward["guesses"], after, middle, end)
    ticks = 2 * max(map(len, answers.values())) + 8  # for the last 8 it stands still
    text = TEMPLATE.with_suffix(".svg").read_text(encoding="utf-8").replace("TICKS", str(ticks))
    return text.replace("HEIGHT", str(picture.bottom + 8)).replace("BOXES", picture.svg)


def main() -> None:
    parser = Parser("Write a page that shows every forward of an answer (MARS).")
    parser.add_argument("page", metavar="PAGE.html", type=Path, help="the file to write, or .svg")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_model()
    add_options(parser)
    args = parser.parse_args()
    options = read_options(args)
    model, chat = load_for_decoding(args, options)
    prompt = encode_prompt({"prompt": args.prompt}, chat)
    forwards = trace(model, chat, prompt, options)
    if args.page.suffix == ".svg":
        plain = trace(model, chat, prompt, replace(options, tau=AR_TAU[options.metric]))
        page = make_picture({"One token per forward": plain, "MARS": forwards})
    else:
        page = make_page(args.prompt, options, forwards)
    atomic_write(args.page, lambda file: file.write_text(page, encoding="utf-8"))
    note(f"{args.page}: open it in a browser")


if __name__ == "__main__":
    run_main(main, out_of_memory="use a smaller --max-new or a shorter prompt")
