"""MARS (arXiv 2604.07023) in transformers: model.generate gives several tokens per forward.

B masks follow the text, in one causal forward. The text's last token predicts the next one, each
mask one further. With a tau they become text while their probability passes it: the paper's way.
Without a tau they are guesses, which the next forward checks: they hold up to the first that
differs from what the model itself says there. So the text is that of plain generate. What followed
the text's last tokens earlier is a guess, too (prompt lookup).

    feed    [ text that is not cached yet | g1 g2 | M M M M ]        two guesses, B = 4
"""

from functools import partial

import torch
from transformers import DynamicCache, GenerationMixin, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

CHANCES = {2: 0.5, 4: 0.8, 8: 0.9}  # that what followed 2, 4 or 8 tokens follows them again


def generate(*args, model, tau=None, streamer=None, assistant_model=None, **kwargs):
    """model.generate, if the model brings this file. transformers prepares what `mars` is given."""
    if kwargs.get("stop_strings") and "tokenizer" in kwargs:  # which transformers would lose
        stop = StopStringCriteria(kwargs.pop("tokenizer"), kwargs.pop("stop_strings"))
        kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or []), stop]
    decode = partial(mars, tau=tau, streamer=streamer, assistant_model=assistant_model)
    kwargs |= {"custom_generate": decode, "streamer": streamer}
    return GenerationMixin.generate(model, *args, **kwargs)


def mars(model, text, logits_processor, stopping_criteria, generation_config,
         tau=None, streamer=None, assistant_model=None, **kwargs):  # fmt: skip
    """Decode one row. A processor may depend on the tokens and scores it is given, on no state."""
    cache_name = "cache" if "cache" in kwargs else "past_key_values"  # transformers 5 and 4
    cache = kwargs.get(cache_name)
    is_padded = kwargs.get("attention_mask") is not None and not kwargs["attention_mask"].all()
    is_usual = generation_config.get_generation_mode(assistant_model) in ("greedy_search", "sample")
    is_guided = generation_config.guidance_scale not in (None, 1)
    if len(text) != 1 or is_padded or not is_usual or is_guided:
        raise ValueError("MARS decodes one row: no padding, beams, assistant or guidance_scale")
    outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    if any(getattr(generation_config, name) for name in outputs) or "inputs_embeds" in kwargs:
        raise ValueError("MARS decodes token ids, and returns no scores, logits or states")
    if not isinstance(cache, DynamicCache) or cache.get_seq_length() >= text.size(1):
        raise ValueError("MARS decodes with generate's default cache, shorter than the text")
    if tau is not None and not 0 <= tau <= 1:
        raise ValueError(f"MARS: tau is a probability, from 0 to 1, and not {tau}")
    mask_id = model.config.mask_token_id
    block = getattr(model.config, "block", None) or 4  # B
    ends = torch.tensor(generation_config.eos_token_id or [], device=text.device)
    guesses = []
    noise = []
    followed = {}  # (2, 4 or 8 tokens) -> (the chance that it follows again, what followed)
    num_forwards = 0
    is_done = False
    while not is_done:
        masks = [] if tau == 1 else [mask_id] * block  # none: plain AR
        length = text.size(1)
        fed = text.new_tensor([text[0, cache.get_seq_length() :].tolist() + guesses + masks])
        width = 1 + len(guesses) + len(masks)  # the positions that predict
        logits = model(fed, **{cache_name: cache}, logits_to_keep=width).logits[0].float()
        logits[:, mask_id] = -torch.inf  # (width, V)
        num_forwards += 1
        from_masks = []
        ahead = text  # and what masks guess
        for i in range(width):
            scores = logits_processor(ahead, logits[i : i + 1].clone())
            if generation_config.do_sample:
                # The best with Gumbel noise is a draw. A guess and its check share the noise.
                if i == len(noise):
                    noise.append(-torch.empty_like(scores).exponential_().log())
                scores = scores + noise[i]
            token = scores.argmax(-1, keepdim=True)  # (1, 1)
            ahead = torch.cat([ahead, token], dim=1)
            is_from_mask = i > len(guesses)
            if is_from_mask and tau is None:
                from_masks.append((scores.softmax(-1).max().item(), token.item()))
                if token in ends:  # a processor may know nothing that comes after it
                    break
                continue
            if is_from_mask and logits[i].softmax(-1)[token.item()] < tau:
                break
            text = ahead
            if streamer is not None:
                streamer.put(token[0].cpu())
            is_done = bool(stopping_criteria(text, None).all())
            if is_done or (i < len(guesses) and guesses[i] != token.item()):
                break
        num_kept = min(length + len(guesses), text.size(1) - 1)  # no mask, no guess that failed
        if cache.get_seq_length() > num_kept:
            cache.crop(num_kept - cache.get_seq_length())
        noise = noise[text.size(1) - length :]
        if tau is None:
            num_read = length if followed else 0
            guesses = next_guesses(text[0].tolist(), num_read, followed, from_masks)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text
    output = GenerateDecoderOnlyOutput(sequences=text, **{cache_name: cache})
    output["num_forwards"] = num_forwards
    return output


def next_guesses(text, num_read, followed, from_masks):
    """At each place the likelier of a mask's guess and what followed, while all probably hold."""
    for run, chance in CHANCES.items():
        for place in range(max(run, num_read), len(text)):
            followed[tuple(text[place - run : place])] = (chance, text[place])
    guesses = []
    all_hold = 1.0
    while True:
        tail = tuple(text[-8:] + guesses)
        options = [followed.get(tail[-run:], (0.0, 0)) for run in CHANCES]
        options += from_masks[len(guesses) :][:1]
        chance, token = max(options)
        all_hold *= chance
        if all_hold < 0.2:
            return guesses
        guesses.append(token)
