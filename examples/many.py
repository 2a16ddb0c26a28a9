"""Several prompts in one batch, each with a tau of its own."""

from decode import Decoder, Options
from model import load

model, chat = load()
asked = {  # prompt: tau
    "Mia has 5 bags with 12 plums in each. How many plums is that?": 1.0,
    "Tom has 40 pens. He gives away 17 pens. How many pens does Tom have now?": 0.8,
    "Ada has 7 boxes with 9 nuts in each. How many nuts does Ada have now?": 0.5,
}
decoder = Decoder(model, Options(tau=1.0, max_new=100), rows=2, longest=512)
answers = []
for prompt, tau in asked.items():
    messages = [{"role": "user", "content": prompt}]
    answers.append(decoder.add(chat.encode_prompt(messages), tau=tau))
list(decoder)  # to the end
for answer in answers:
    per_forward = len(answer.tokens) / answer.forwards
    print(f"tau {answer.tau}, {per_forward:.2f} tokens per forward: {chat.decode(answer.tokens)}")
