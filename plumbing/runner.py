"""One forward of several rows: padding, shapes, and what makes it fast; no part of the method.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import itertools
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cpu import fast_copy, is_int8
from .sampling import GumbelNoise

NARROW = 96  # positions per row: with more there is nothing left to gain from folding


class Runner:
    """Runs a model on what its rows are fed (decode.Feed), all of them in one forward."""

    def __init__(self, model: nn.Module, method, cache, options):
        """method, cache, options: the decoder's (decode.Method, a KVCache, decode.Options)."""
        self.config = model.config
        self.method = method
        self.cache = cache
        self.temperature = options.temperature
        self.noise = GumbelNoise(options.seed, model.config.vocab_size, cache.device)
        self.model = fast_copy(model, options.compile)
        self.num_threads = torch.get_num_threads()  # the attention mask's best shape depends on it
        self.attention_dtype = torch.float64 if is_int8(self.model) else cache.dtype  # see int8.py
        self.compiled_forward = None
        if options.compile:
            self.compiled_forward = compiled(self.forward, cache)
        # Padding has the mask's token id (any would do), but is a clean token: prefix = pos + 1. It
        # stands after every text, so no text and no mask sees it.
        end = cache.capacity
        self.padding = (model.config.mask_token_id, end, end + 1)
        # In bfloat16 on a CPU a product with one position sums in another order than with several.
        # So a forward of one row has at least two: its text is then that of a batch.
        is_bfloat16_on_cpu = (model.device.type, model.dtype) == ("cpu", torch.bfloat16)
        self.least_width = 2 if is_bfloat16_on_cpu else 1

    def run(self, feeds: list, is_prefill: bool) -> list[tuple[list[int], list[float]]]:
        """For each feed the tokens that its columns predict, and how confident they are."""
        width = max(len(feed.positions) for feed in feeds)
        num_columns = max(len(feed.columns) for feed in feeds)
        if len(feeds) == 1:
            width = max(width, self.least_width)
        forward = self.forward
        if self.compiled_forward and not is_prefill:
            forward = self.compiled_forward
            if width > 1:  # two shapes are compiled: the widest, and one position (plain AR)
                width = self.cache.widest
                num_columns = width  # no feed has more columns than positions
        inputs = []  # (R, T, 3)
        columns = []  # (R, C)
        for feed in feeds:
            inputs.append(feed.positions + [self.padding] * (width - len(feed.positions)))
            columns.append([*feed.columns] + [0] * (num_columns - len(feed.columns)))
        inputs = torch.tensor(inputs, device=self.cache.device)
        columns = torch.tensor(columns, device=self.cache.device)
        noise = None
        if self.temperature > 0:
            noise = self.noise.draw([feed.predicted for feed in feeds], num_columns)
        self.cache.reserve(width, [feed.row for feed in feeds])
        tokens, confidences = forward(inputs, columns, noise).tolist()
        predictions = []
        for feed, of_row, how_sure in zip(feeds, tokens, confidences):
            n = len(feed.columns)
            predictions.append(([int(token) for token in of_row[:n]], how_sure[:n]))
        return predictions

    def forward(self, inputs: Tensor, columns: Tensor, noise: Tensor | None) -> Tensor:
        """The token that each column (R, C) predicts, and its confidence: (2, R, C).

        They are one tensor, for one transfer to the host.

        inputs (R, T, 3): token, pos and prefix. noise (R, C, V): the Gumbel noise that draws the
        tokens; None: the best are taken. --compile compiles this.

        At a temperature T > 0 every token is drawn from p^(1/T) of its own position, independently
        of the others. So with a tau that accepts masks' tokens the text is not a sample of the AR
        distribution. The text of lossless decoding is one.
        """
        mask = self.cache.mask(inputs[..., 1:])
        mask = additive_mask(mask, self.config, self.num_threads, self.attention_dtype)
        hidden = self.model(inputs[..., 0], inputs[..., 1], mask, self.cache, attend_folded)
        logits = self.model.logits_at(hidden, columns)  # (R, C, V)
        scores = logits
        if noise is not None:  # the argmax of logits + T * noise is a draw from p^(1/T)
            scores = logits + self.temperature * noise
        tokens = scores.argmax(-1)
        confidence = self.method.confidence(logits, scores, tokens)
        # Logits are float32 or wider, so confidence is, and that holds every token id exactly.
        return torch.stack([tokens.to(confidence.dtype), confidence])


def additive_mask(mask: Tensor, config, num_threads: int, dtype: torch.dtype) -> Tensor:
    """The mask (R, 1, T, S) as `attend_folded` takes it: 0 where visible, else -inf; maybe folded.

    Made once for all layers; torch would turn a mask of booleans into this one in each of them.
    Attention is computed in its dtype.
    For few positions it is (R, 1, group * T, S): the query heads that share a key head become more
    positions of one head. The products are the same, but those of one token are 2 (float32) to 6
    times (bfloat16) faster on a CPU. With fewer key heads than threads, though, some would be idle.
    """
    heads = mask.size(0) * config.num_key_value_heads
    if mask.size(2) <= NARROW and (mask.is_cuda or heads >= num_threads):
        mask = mask.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """model.attend, with a mask from `additive_mask`."""
    R, num_heads, T, head_dim = q.shape
    num_queries = mask.size(2)
    if num_queries > T:
        q = q.reshape(R, k.size(1), num_queries, head_dim)
    elif q.is_cuda and num_heads > k.size(1):  # fast kernels with a mask cannot share key heads
        k = k.repeat_interleave(num_heads // k.size(1), dim=1)
        v = v.repeat_interleave(num_heads // v.size(1), dim=1)
    q, k, v, dtype = q.to(mask.dtype), k.to(mask.dtype), v.to(mask.dtype), q.dtype
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y.reshape(R, num_heads, T, head_dim).to(dtype)


def compiled(forward: Callable[..., Tensor], cache) -> Callable[..., Tensor]:
    """A method for static shapes; on a GPU as one CUDA graph, which needs no Python.

    Guards on the model's modules would take half a millisecond a token, so they are left out. Torch
    keeps what it compiled with the code of a function; so that no object gets what was compiled for
    another's modules, each has a copy of the code.
    """
    for tensor in (cache.pos_prefix, *itertools.chain(*cache.layers)):
        torch._dynamo.mark_static_address(tensor)  # or a CUDA graph would copy it at each forward
    torch._dynamo.config.recompile_limit = 256  # graphs: two widths for each 256 slots of span
    options = {
        "triton.cudagraphs": cache.device.type == "cuda",
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
    }
    function = forward.__func__
    own = types.FunctionType(function.__code__.replace(), function.__globals__)
    own = types.MethodType(own, forward.__self__)
    return torch.compile(own, dynamic=False, options=options)
