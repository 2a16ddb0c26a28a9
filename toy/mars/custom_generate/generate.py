"""MARS (arXiv 2604.07023) in transformers: model.generate gives several tokens per forward.

B masks follow the text, in one causal forward. The text's last token predicts the next one, each
mask one further. With a tau they become text while their probability passes it: the paper's way.
Without a tau they are guesses, which the next forward is fed as text. They hold up to the first
that differs from what the model itself says there, so the text is that of plain generate. What
followed the text's last tokens earlier is a guess, too (prompt lookup).

    feed    [ text that is not cached yet | g1 g2 | M M M M ]        two guesses, B = 4
"""

from functools import partial

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput


def generate(*args, model, tau=None, streamer=None, assistant_model=None, **kwargs):
    """model.generate, if the model brings this file. transformers prepares what `mars` is given."""
    if assistant_model is not None:
        raise ValueError("MARS decodes without an assistant_model")
    decode = partial(mars, tau=tau, streamer=streamer)  # it hands no streamer to a function
    kwargs |= {"custom_generate": decode, "streamer": streamer}
    return GenerationMixin.generate(model, *args, **kwargs)


def mars(model, input_ids, logits_processor, stopping_criteria, generation_config,
         tau=None, streamer=None, **kwargs):  # fmt: skip
    """Decode one row. A processor may depend on the tokens and scores it is given, on no state."""
    cache_name = "cache" if "cache" in kwargs else "past_key_values"  # transformers 5 and 4
    cache = kwargs.get(cache_name)
    is_padded = kwargs.get("attention_mask") is not None and not kwargs["attention_mask"].all()
    mode = generation_config.get_generation_mode()
    if len(input_ids) != 1 or is_padded or mode not in ("greedy_search", "sample"):
        raise ValueError("MARS decodes one row without padding: no batch, no beams, no assistant")
    if generation_config.guidance_scale or not isinstance(cache, DynamicCache):
        raise ValueError("MARS decodes without guidance_scale, and with generate's default cache")
    mask_id = model.config.mask_token_id
    guesser = Guesser(getattr(model.config, "block", None) or 4, tau)
    text, guesses, noise, num_forwards, is_done = input_ids, [], [], 0, False
    forget(cache, text.size(1) - 1)  # the last token is always fed: it predicts the next one
    while not is_done:
        length = text.size(1)
        masks = [mask_id] * guesser.num_masks()
        fed = text.new_tensor([text[0, cache.get_seq_length() :].tolist() + guesses + masks])
        width = 1 + len(guesses) + len(masks)  # the positions that predict
        output = model(fed, **{cache_name: cache}, use_cache=True, logits_to_keep=width)
        logits = output.logits[0].float()  # (width, V)
        logits[:, mask_id] = -torch.inf
        num_forwards += 1
        num_held, ahead, from_masks = 0, text, []  # ahead: the text and what masks guess
        for i in range(width):
            scores = logits_processor(ahead, logits[i : i + 1])
            if generation_config.do_sample:
                # The best of scores + Gumbel noise is a draw. Each place of the text has its own
                # noise, for its guess and its check: so they often agree. The text is AR's draw.
                if i == len(noise):
                    noise.append(-torch.empty_like(scores).exponential_().log())
                scores = scores + noise[i]
            token = scores.argmax(-1, keepdim=True)  # (1, 1)
            ahead = torch.cat([ahead, token], dim=1)
            if tau is None and i > len(guesses):
                from_masks.append((scores.softmax(-1).max().item(), 0, token.item()))
                continue
            if tau is not None and i > 0 and logits[i].softmax(-1)[token.item()] < tau:
                break
            text = ahead
            if streamer is not None:
                streamer.put(token[0].cpu())
            is_done = bool(stopping_criteria(text, None).all())
            guess_holds = guesses[i : i + 1] == [token.item()]
            num_held += guess_holds
            if is_done or (i < len(guesses) and not guess_holds):
                break
        forget(cache, min(length + num_held, text.size(1) - 1))  # what was fed and is text stays
        noise = noise[text.size(1) - length :]
        if tau is None:
            guesses = guesser.next_guesses(text[0].tolist(), num_held, from_masks)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text
    output = GenerateDecoderOnlyOutput(sequences=text, **{cache_name: cache})
    output["num_forwards"] = num_forwards
    return output


def forget(cache, length):
    """Let the cache hold at most `length` positions."""
    if cache.get_seq_length() > length:
        cache.crop(length - cache.get_seq_length())


class Guesser:
    """Chooses how many masks a forward has, and which guesses it checks."""

    def __init__(self, block, tau):
        self.block = block if tau is None or tau < 1 else 0  # B; no masks: plain AR
        self.tau = tau
        self.chances = {0: 0.9, 2: 0.5, 4: 0.8, 8: 0.95}  # of a mask's guess; the text's, by run
        self.runs = []  # of each guess that is checked now
        self.followed = {}  # a run of 2, 4 or 8 tokens -> what followed it last
        self.num_read = 8  # tokens of the text

    def num_masks(self):
        """B; without a tau only while the guesses of all masks before probably hold."""
        size = min(1, self.block)
        while size < self.block and (self.tau is not None or self.chances[0] ** size >= 0.7):
            size += 1
        return size

    def next_guesses(self, text, num_held, from_masks):
        """At each place the likeliest, of a mask or of the text, while all probably hold."""
        for place, run in enumerate(self.runs[: num_held + 1]):  # later ones were not checked
            self.chances[run] += 0.05 * ((place < num_held) - self.chances[run])
        for place in range(self.num_read, len(text)):
            for run in (2, 4, 8):
                self.followed[tuple(text[place - run : place])] = text[place]
        self.num_read = max(self.num_read, len(text))
        guesses, self.runs, all_hold = [], [], 1.0
        while len(guesses) < self.block + 16:
            options = from_masks[len(guesses) :][:1]
            for run in (2, 4, 8):
                token = self.followed.get(tuple((text[-8:] + guesses)[-run:]))
                if token is not None:
                    options.append((self.chances[run], run, token))
            chance, run, token = max(options, default=(0.0, 0, 0))
            all_hold *= chance
            if all_hold < 0.2:
                break
            guesses.append(token)
            self.runs.append(run)
        return guesses
