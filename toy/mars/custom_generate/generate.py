"""MARS (arXiv 2604.07023) in transformers: model.generate gives several tokens per forward.

B masks follow the text, in one causal forward. The text's last token predicts the next one, each
mask one further. With a tau they become text while their probability passes it: the paper's way.
Without a tau they are guesses, which the next forward checks: they hold up to the first that
differs from what the model itself says there. So the text is that of plain generate. What followed
the text's last tokens earlier is a guess, too (prompt lookup); with guard=True it is a witness.

    feed    [ text that is not cached yet | g1 g2 | M M M M ]        two guesses, B = 4
"""

from functools import partial

import torch
from transformers import DynamicCache, GenerationMixin, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

CHANCES = {2: 0.5, 4: 0.8, 8: 0.95}  # that what followed 2, 4 or 8 tokens follows them again
NOTHING = (0.0, -1)  # no chance, no token
HUB = "cache_dir force_download local_files_only proxies revision subfolder token".split()
OUTPUTS = "output_scores output_logits output_hidden_states output_attentions".split()


def generate(inputs=None, generation_config=None, *args, model, **kwargs):
    """model.generate, if the model brings this file. transformers prepares what `mars` is given."""
    if kwargs.get("custom_generate") is None:  # else the caller's own decodes
        kwargs = {name: value for name, value in kwargs.items() if name not in HUB}
        stops = getattr(generation_config, "stop_strings", None)
        stops = kwargs.get("stop_strings", stops or model.generation_config.stop_strings)
        if stops and kwargs.get("tokenizer"):  # which transformers would lose
            stop = StopStringCriteria(kwargs["tokenizer"], stops)
            kwargs["stopping_criteria"] = [*(kwargs.get("stopping_criteria") or []), stop]
            kwargs["stop_strings"] = None
        lost = {name: kwargs.get(name) for name in ("streamer", "assistant_model")}
        kwargs["custom_generate"] = partial(mars, **lost)
    return GenerationMixin.generate(model, inputs, generation_config, *args, **kwargs)


def mars(model, text, logits_processor, stopping_criteria, generation_config,
         tau=None, guard=False, streamer=None, assistant_model=None, **kwargs):  # fmt: skip
    """Decode one row. A processor may depend on the tokens and scores it is given, on no state."""
    cache_name = "cache" if "cache" in kwargs else "past_key_values"  # transformers 5 and 4
    cache = kwargs.get(cache_name)
    is_padded = kwargs.get("attention_mask") is not None and not kwargs["attention_mask"].all()
    is_usual = generation_config.get_generation_mode(assistant_model) in ("greedy_search", "sample")
    is_guided = generation_config.guidance_scale not in (None, 1)
    has_outputs = any(getattr(generation_config, name) for name in OUTPUTS)
    if len(text) != 1 or is_padded or not is_usual or is_guided or "inputs_embeds" in kwargs:
        raise ValueError("MARS takes one row of ids: no padding, beams, assistant, guidance_scale")
    if has_outputs and generation_config.return_dict_in_generate:
        raise ValueError("MARS returns no scores, logits or states")
    if not isinstance(cache, DynamicCache) or cache.get_seq_length() >= text.size(1):
        raise ValueError("MARS needs generate's default cache, shorter than the (not empty) text")
    is_tau = isinstance(tau, (int, float)) and 0 <= tau <= 1
    if not is_tau and (guard or tau is not None):
        raise ValueError(f"MARS: tau is a number from 0 to 1, not {tau!r}; guard=True needs one")
    mask_id = model.config.mask_token_id
    block = getattr(model.config, "block", None) or 4  # B
    ends = torch.tensor(generation_config.eos_token_id or [], device=text.device)
    followed = {}  # (2, 4 or 8 tokens) -> (the chance that it follows again, what followed)
    num_indexed = 0  # how many tokens of the text `followed` knows
    from_masks = []  # (probability, token) of each guess
    seed = torch.randint(2**62, ()).item() if generation_config.do_sample else None
    num_forwards = 0
    is_done = False

    def decide(i):
        """Add what position i predicts to the text or to the guesses. Does the next one count?"""
        nonlocal text, ahead, is_done
        scores = logits_processor(ahead, logits[i : i + 1].clone())
        if generation_config.do_sample:
            # The best with Gumbel noise is a draw. A guess and its check, in one place, share it.
            dice = torch.Generator(scores.device).manual_seed(seed + ahead.size(1))
            scores = scores - torch.empty_like(scores).exponential_(generator=dice).log()
        token = scores.argmax(-1, keepdim=True)  # (1, 1)
        ahead = torch.cat([ahead, token], dim=1)
        is_from_mask = i > len(guesses)
        if is_from_mask and tau is None:
            from_masks.append((scores.softmax(-1).max().item(), token.item()))
            return token not in ends  # a processor may know nothing that comes after it
        least = tau
        if is_from_mask and guard:
            tail = tuple(text[0, -8:].tolist())
            _, witness = max(followed.get(tail[-run:], NOTHING) for run in CHANCES)
            if witness == -1:  # the text says nothing: a twentieth of the doubt
                least = 1 - (1 - tau) / 20
            if token.item() == tail[-1] or witness not in (-1, token.item()):
                return False
        if is_from_mask and logits[i].softmax(-1)[token.item()] < least:
            return False
        text = ahead
        if streamer is not None:
            streamer.put(token[0].cpu())
        is_done = bool(stopping_criteria(text, None).all())
        has_failed = i < len(guesses) and guesses[i] != token.item()
        return not (is_done or has_failed)

    while not is_done:
        ids = text[0].tolist()
        for run, chance in CHANCES.items():
            for place in range(max(run, num_indexed), len(ids)):
                followed[tuple(ids[place - run : place])] = (chance, ids[place])
        num_indexed = len(ids)
        guesses = next_guesses(ids, followed, from_masks) if tau is None else []
        masks = [] if tau == 1 else [mask_id] * block  # none: plain AR
        fed = text.new_tensor([ids[cache.get_seq_length() :] + guesses + masks])
        width = 1 + len(guesses) + len(masks)  # the positions that predict
        logits = model(fed, **{cache_name: cache}, logits_to_keep=width).logits[0].float()
        logits[:, mask_id] = -torch.inf  # (width, V)
        num_forwards += 1
        from_masks = []
        ahead = text  # and what masks guess
        for i in range(width):
            if not decide(i):
                break
        num_kept = min(len(ids) + len(guesses), text.size(1) - 1)  # no mask, no guess that failed
        if cache.get_seq_length() > num_kept:
            cache.crop(num_kept - cache.get_seq_length())
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return text
    output = GenerateDecoderOnlyOutput(sequences=text, **{cache_name: cache})
    output["num_forwards"] = num_forwards
    return output


def next_guesses(ids, followed, from_masks):
    """At each place the likelier of a mask's guess and what followed, while all probably hold."""
    guesses = []
    all_hold = 1.0
    while True:
        tail = tuple(ids[-8:] + guesses)
        options = [followed.get(tail[-run:], NOTHING) for run in CHANCES]
        options += from_masks[len(guesses) :][:1]
        chance, token = max(options)
        all_hold *= chance
        if all_hold < 0.2:
            return guesses
        guesses.append(token)
