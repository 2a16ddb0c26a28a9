"""One forward of several rows: padding, shapes, and what makes it fast; no part of the method.

`python -m bench.speed --shape 0.5B --widths` shows what a forward costs.
"""

import itertools
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import additive_mask, attend_folded
from .cpu import fast_copy
from .sampling import GumbelNoise


class Runner:
    """Runs a model on what its rows are fed (decode.Feed), all of them in one forward."""

    def __init__(self, model: nn.Module, method, cache, widest: int, options):
        """method, cache, options: the decoder's (decode.Method, a KVCache, decode.Options).

        widest: the most positions of a row in a forward, prefills aside.
        """
        self.config = model.config
        self.method = method
        self.cache = cache
        self.widest = widest
        self.temperature = options.temperature
        self.noise = GumbelNoise(options.seed, model.config.vocab_size, cache.device)
        self.model = fast_copy(model, options.compile)
        self.num_threads = torch.get_num_threads()  # the attention mask's best shape depends on it
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
        rows = [feed.row for feed in feeds]
        if not is_prefill and not self.can_leave_out_others(rows):
            rows = list(range(len(self.cache.lengths)))  # the others are fed padding
        width = max(len(feed.positions) for feed in feeds)
        num_columns = max(len(feed.columns) for feed in feeds)
        if len(rows) == 1:
            width = max(width, self.least_width)
        forward = self.forward
        if self.compiled_forward and not is_prefill:
            forward = self.compiled_forward
            if width > 1:  # two shapes are compiled: the widest, and one position (plain AR)
                width = self.widest
                num_columns = width  # as many as positions; the surplus is not read
        positions = {row: [self.padding] * width for row in rows}
        columns = {row: [0] * num_columns for row in rows}
        predicted = {row: [] for row in rows}
        for feed in feeds:
            positions[feed.row][: len(feed.positions)] = feed.positions
            columns[feed.row][: len(feed.columns)] = feed.columns
            predicted[feed.row] = feed.predicted
        inputs = torch.tensor(list(positions.values()), device=self.cache.device)  # (R, T, 3)
        at = torch.tensor(list(columns.values()), device=self.cache.device)  # (R, C)
        noise = None
        if self.temperature > 0:
            noise = self.noise.draw(list(predicted.values()), num_columns)
        self.cache.reserve(width, rows)
        tokens, confidences = forward(inputs, at, noise).tolist()
        predictions = []
        for feed in feeds:
            i = rows.index(feed.row)
            n = len(feed.columns)
            predictions.append(([int(token) for token in tokens[i][:n]], confidences[i][:n]))
        return predictions

    def can_leave_out_others(self, rows: list[int]) -> bool:
        """Is a forward of these rows faster than one of all, in which the others are padding?

        To leave out a row makes the cache copy all others. So it pays on a CPU only, where an idle
        row costs as much as any, and only if at least half of the rows are idle. Compiled forwards
        have static shapes.
        """
        is_on_cpu = self.cache.device.type == "cpu"
        return is_on_cpu and not self.compiled_forward and 2 * len(rows) <= len(self.cache.lengths)

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
        mask = additive_mask(mask, self.config, self.num_threads, self.cache.dtype)
        hidden = self.model(inputs[..., 0], inputs[..., 1], mask, self.cache, attend_folded)
        logits = self.model.logits_at(hidden, columns)  # (R, C, V)
        scores = logits
        if noise is not None:  # the argmax of logits + T * noise is a draw from p^(1/T)
            scores = logits + self.temperature * noise
        tokens = scores.argmax(-1)
        confidence = self.method.confidence(logits, scores, tokens)
        # Logits are float32 or wider, so confidence is, and that holds every token id exactly.
        return torch.stack([tokens.to(confidence.dtype), confidence])


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
