"""An answer as it comes, in whole characters."""

from decode import Decoder, Options
from model import load
from plumbing.terminal import TextStream

model, chat = load()  # the bundled toy; load("smollm2/model", dtype=torch.bfloat16)
prompt = "Mia has 5 bags with 12 plums in each. How many plums is that?"
decoder = Decoder(model, Options(max_new=100), rows=1, longest=512)
decoder.add(chat.encode_prompt([{"role": "user", "content": prompt}]))
text = TextStream(chat)
for _, tokens in decoder:  # the new tokens of each forward
    print(text.add(tokens), end="", flush=True)
print()
