"""Qwen2 and Qwen3 in one file: configuration, mask rule, transformer, reading checkpoints.

What is unusual here, compared with other small implementations:
  * attention takes its mask from the caller. `visible` below defines it (MARS, arXiv 2604.07023):
    training calls it for the positions of its streams, the cache for its slots;
  * `forward` returns hidden states. The caller picks positions, then asks for their logits: a
    vocabulary of 152k tokens makes logits most of a small model's work and memory;
  * `<|mask|>` is an ordinary token that is never predicted: its logit is always -inf;
  * module names are the checkpoint's names and config fields are config.json's keys, so loading is
    a strict comparison of names and shapes.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plumbing.arguments import available_device, fastest_dtype
from plumbing.chat import MASK, Chat
from plumbing.cpu import int8_copy
from plumbing.errors import UserError
from plumbing.files import check_shapes, locate, read_json, read_tensors
from plumbing.int8 import float_dtype

TOY = Path(__file__).parent / "toy" / "mars"
GENERATE = TOY / "custom_generate" / "generate.py"  # saved with a model whose masks were trained

# ------------------------------------------------------------------------------------------- config


@dataclass
class Config:
    """The keys of config.json that Qwen2 and Qwen3 need; the last two are MARS's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    model_type: str = "qwen2"
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()  # every token that ends a turn; training uses the first
    mask_token_id: int | None = None
    block: int | None = None  # B of the MARS training; None without it

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:  # left out
                continue
            if field.type is float:
                if not (type(value) in (int, float) and 0 < value < math.inf):
                    raise ValueError(f"{field.name} {value!r}: must be a number above 0")
            elif field.type in (int, int | None):
                if not (type(value) is int and value > 0):
                    raise ValueError(f"{field.name} {value!r}: must be a whole number above 0")
        if self.block and self.block >= 1000:  # as on the command lines
            raise ValueError(f"block {self.block}: must be below 1000")
        head_dim = self.head_dim or self.hidden_size / self.num_attention_heads
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim:g}: must be even")
        self.head_dim = int(head_dim)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        ends = self.eos_token_id
        if not ends or not all(type(id) is int and 0 <= id < self.vocab_size for id in ends):
            raise ValueError(f"eos_token_id {list(ends)}: no tokens that could end a turn")

    def to_json(self) -> dict:
        """The content of config.json, for transformers and for `read_config`."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        family = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return known | {
            "architectures": [family[self.model_type]],
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }


MODEL_TYPES = {  # in config.json: what the model becomes here
    "qwen2": "qwen2",
    "a2d-qwen2": "qwen2",  # the MARS paper's
    "qwen3": "qwen3",
    "llama": "qwen2",  # a Qwen2 whose biases are zero: `load_model` adds them
}


def read_config(directory: Path) -> tuple[Config, dict]:
    """The configuration, and what config.json says; UserError for what is not supported."""
    path = directory / "config.json"
    raw = read_json(path)
    generation = directory / "generation_config.json"
    if generation.exists():  # it lists all end-of-turn tokens, config.json often only one
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    try:
        return parse_config(raw), raw
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None


def parse_config(raw: dict) -> Config:
    """The configuration from the content of config.json, as transformers 4 or 5 writes it."""
    check_supported("model_type", raw.get("model_type"), *MODEL_TYPES)
    if raw["model_type"] in ("llama", "qwen3"):
        check_supported("attention_bias", raw.get("attention_bias") or False, False)
        check_supported("mlp_bias", raw.get("mlp_bias") or False, False)
    check_supported("hidden_act", raw.get("hidden_act", "silu"), "silu")
    check_supported("sliding-window attention", raw.get("use_sliding_window") or False, False)
    found = raw | {"model_type": MODEL_TYPES[raw["model_type"]]}
    for key in ("rope_scaling", "rope_parameters"):  # of transformers 4, and of 5
        rope = raw.get(key) or {}
        for name in ("type", "rope_type"):
            check_supported(f"{key}: {name}", rope.get(name) or "default", "default")
        if "rope_theta" in rope:
            found["rope_theta"] = rope["rope_theta"]
    eos = raw.get("eos_token_id")
    found["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
    known = {field.name: found.get(field.name) for field in fields(Config)}
    return Config(**{name: value for name, value in known.items() if value is not None})


def check_supported(name: str, value: object, *supported: object) -> None:
    if value not in supported:
        alternatives = " or ".join(map(str, supported))
        raise ValueError(f"{name} {value!r} is not supported, only {alternatives}")


# ----------------------------------------------------------------------------------------- the mask


def visible(q_pos, q_prefix, q_doc, k_pos, k_prefix, k_doc):
    """May query q see key k? The paper's mask rule (section 3), elementwise on integer tensors.

    Position i sees position j of the same document if j is a clean token of i's prefix, or if both
    are masks of the same block and j does not come after i. (A block is a run of masks: of the
    training grid, or after the text in decoding.)

    Every position carries three integers: `pos`, its position id; `doc`, its document (in training
    padding has one of its own, -1; in decoding it stands after every text); and `prefix`, the
    number of clean tokens that it sees. A clean token sees itself and all before it:
    prefix = pos + 1. A mask sees the clean tokens before its block: prefix = the first position of
    the block. An example: the clean tokens a b c d e f, and two blocks of B = 2 masks, at positions
    3 and 5 (they may begin anywhere); one row per query.

            pos prefix | a b c d e f | M3 M4 | M5 M6    (a stands at position 0)
        d    3    4    | x x x x     |       |          clean: causal, and never sees a mask
        M3   3    3    | x x x       | x     |          stands in the place of d, predicts e
        M4   4    3    | x x x       | x  x  |
        M5   5    5    | x x x x x   |       | x
        M6   6    5    | x x x x x   |       | x  x
    """
    k_is_mask = k_prefix <= k_pos  # a clean token has prefix = pos + 1
    in_prefix = ~k_is_mask & (k_pos < q_prefix)
    # Masks of one block have the same prefix. A clean q may have it, too, but stands before them.
    in_block = k_is_mask & (k_prefix == q_prefix) & (k_pos <= q_pos)
    return (q_doc == k_doc) & (in_prefix | in_block)


# -------------------------------------------------------------------------------------- transformer

LOGITS_AT_A_TIME = 2**26  # in training: 256 MiB in float32
NUM_EXACT = 32  # logits that are computed again in float32, where the model is in bfloat16


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at positions (R, T), for `rotate`: (R, 1, T, head_dim).

    Qwen2 pairs dimension i with i + head_dim / 2, not with i + 1. The angle turns a pair (a, b)
    into (a cos - b sin, b cos + a sin); the minus goes into the first half of sin.
    """
    twice_i = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-twice_i / head_dim)  # of pair i
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()  # (R, 1, T, head_dim / 2)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys x (R, heads, T, head_dim) by the angles from `rotary`."""
    halves_swapped = x.roll(x.size(-1) // 2, dims=-1)
    return x * cos + halves_swapped * sin


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v, where the mask is True: (R, heads, T, head_dim).

    q has more heads than k and v (R, kv_heads, S, head_dim): query heads share key heads. The mask
    is (R, 1, T, S); None is plain causal. Faster drop-ins: plumbing/attention.py.
    """
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


class Attention(nn.Module):
    def __init__(self, config: Config, layer_index: int):
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        has_bias = config.model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=has_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=has_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=has_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.has_qk_norm = config.model_type == "qwen3"
        if self.has_qk_norm:  # each head's queries and keys, with one weight for all heads
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask, cache, kernel) -> Tensor:
        R, T, _ = x.shape  # R rows of T positions
        q, k, v = self.qkv(x)
        q = q.view(R, T, -1, self.head_dim).transpose(1, 2)  # (R, heads, T, head_dim)
        k = k.view(R, T, -1, self.head_dim).transpose(1, 2)  # (R, kv_heads, T, head_dim)
        v = v.view(R, T, -1, self.head_dim).transpose(1, 2)
        if self.has_qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)  # autocast decides q's dtype
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer_index, k, v)  # (R, kv_heads, S, head_dim)
        y = kernel(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(R, T, -1))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down_proj(F.silu(gate) * up)

    def gate_up(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.gate_proj(x), self.up_proj(x)


class Layer(nn.Module):
    def __init__(self, config: Config, layer_index: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer_index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask, cache, kernel) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, kernel)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """The transformer of Qwen2 and Qwen3 (and of Llama, whose q, k and v have no biases).

    Attention.qkv, MLP.gate_up and Qwen2.project are methods so that plumbing/cpu.py can replace
    them in a copy that decodes faster.
    """

    is_fast_copy = False

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers)),
                "norm": nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            }
        )
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, mask, cache=None, kernel=attend) -> Tensor:
        """Hidden states (R, T, D) of tokens (R, T) at positions (R, T).

        mask: bool (R, 1, T, S), True where a query may look; None is plain causal. S is T without
        a cache, else the cache's span. kernel: an `attend` that takes another kind of mask.
        """
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache, kernel)
        return self.model.norm(x)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden times the head: (N, V)."""
        return F.linear(hidden, self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, D), in float32 or float64.

        That is for the caller's softmax: in bfloat16 a probability of 0.9989 is 1 and passes any
        tau. `hidden` is 2-D: a sliced 3-D bfloat16 tensor is 30 times slower on a CPU.
        """
        logits = self.project(hidden)
        if self.config.mask_token_id is not None:
            logits[:, self.config.mask_token_id] = float("-inf")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def logits_at(self, hidden: Tensor, columns: Tensor) -> Tensor:
        """Logits (R, C, V) of hidden states (R, T, D) at columns (R, C), to choose tokens by.

        In bfloat16 the product rounds to three digits. Of the best tokens two are then often equal,
        so the best NUM_EXACT logits are computed again in float32.
        """
        picked = hidden.gather(1, columns[..., None].expand(-1, -1, hidden.size(-1)))  # (R, C, D)
        picked = picked.flatten(0, 1)
        logits = self.logits(picked)  # (R * C, V)
        if hidden.dtype == torch.bfloat16:
            rounded, best = logits.topk(min(NUM_EXACT, logits.size(-1)))  # (R * C, K)
            exact = (self.head[best].float() @ picked[..., None].float())[..., 0]
            exact = exact.where(rounded.isfinite(), rounded)  # the mask token's stays -inf
            logits.scatter_(1, best, exact)
        return logits.unflatten(0, columns.shape)

    @property
    def head(self) -> Tensor:
        """The weight (V, D) that turns hidden states into logits."""
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.weight

    def in_chunks(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply `function` to tensors (N, ...), a few rows at a time; concatenate what it returns.

        For training: the logits of N hidden states would need more memory than all else together.
        The backward pass computes each chunk again, except the last. (A method, so that
        plumbing/processes.py can register it: FSDP then gathers the head once for all chunks.)
        """
        num_chunks = math.ceil(len(tensors[0]) * self.config.vocab_size / LOGITS_AT_A_TIME)
        parts = [tensor.chunk(max(1, num_chunks)) for tensor in tensors]
        last = len(parts[0]) - 1
        results = []
        for i in range(last):
            chunk = [part[i] for part in parts]  # the same rows of every tensor
            results.append(checkpoint(function, *chunk, use_reentrant=False))
        results.append(function(*[part[last] for part in parts]))
        return torch.cat(results)

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype


def initialize(config: Config, seed: int) -> Qwen2:
    """A model with fresh random weights: float32, on the CPU."""
    torch.manual_seed(seed)
    model = Qwen2(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=config.initializer_range)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


# -------------------------------------------------------------------------------------- checkpoints


def load_model(directory: Path, device="cpu", dtype=torch.float32) -> Qwen2:
    """The model in `directory`; UserError names a tensor that is missing, surplus or misshapen.

    A Llama without biases becomes a Qwen2 whose q, k and v biases are zero.
    """
    device = available_device(device)
    config, raw = read_config(directory)
    tensors = read_tensors(directory, device, dtype)
    if "lm_head.weight" in tensors:  # some checkpoints have a head and still say that it is tied
        config.tie_word_embeddings = False
    with torch.device("meta"):
        model = Qwen2(config)
    if raw["model_type"] == "llama":
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                tensors.setdefault(name, torch.zeros(weight.shape, dtype=dtype, device=device))
    check_shapes(directory, expected=model.state_dict(), found=tensors)
    model.load_state_dict(tensors, assign=True)
    return model


def num_weights(directory: Path) -> int:
    """How many numbers the model in `directory` has, by its config.json."""
    with torch.device("meta"):
        model = Qwen2(read_config(directory)[0])
    return sum(weight.numel() for weight in model.parameters())


def add_mask_token(model: Qwen2, chat: Chat) -> None:
    """Find the tokenizer's `<|mask|>`, or add it, in a free embedding row or in a new one."""
    config = model.config
    other_ids = [id for token, id in chat.tokenizer.get_vocab().items() if token != MASK]
    largest = max(other_ids, default=0)
    if largest >= config.vocab_size:
        raise UserError(f"the tokenizer's id {largest} exceeds vocab_size {config.vocab_size}")
    chat.tokenizer.add_special_tokens([AddedToken(MASK, normalized=False, special=True)])
    config.mask_token_id = chat.mask_id
    if config.mask_token_id in other_ids:  # a new token's id is the number of tokens
        raise UserError(f"the tokenizer's ids have gaps: {MASK} would share id {chat.mask_id}")
    if config.mask_token_id < config.vocab_size:
        return
    matrices = [model.model.embed_tokens]
    if not config.tie_word_embeddings:
        matrices.append(model.lm_head)
    num_new = config.mask_token_id + 1 - config.vocab_size
    config.vocab_size += num_new
    for matrix in matrices:  # a new token starts as the mean of all others
        mean = matrix.weight.data.mean(0, keepdim=True)
        matrix.weight = nn.Parameter(torch.cat([matrix.weight.data, mean.expand(num_new, -1)]))


def load(name: str | None = None, device="cpu", dtype=torch.float32) -> tuple[Qwen2, Chat]:
    """Model and chat tokenizer of a directory or hub id, with a mask token: ready for decoding.

    Without a name, the bundled toy. Its weights have no gradients; to train it, call
    model.requires_grad_(). torch.int8: a model for decoding only, on a CPU, with products in 8 bits
    (docs/speed.md). "auto": the dtype that decodes fastest here.
    """
    device = available_device(device)
    directory = TOY if name is None else locate(name)
    if dtype == "auto":
        dtype = fastest_dtype(device, num_weights(directory))
    model = load_model(directory, device, float_dtype(dtype, device))
    chat = Chat(directory)
    add_mask_token(model, chat)
    if dtype == torch.int8:
        model = int8_copy(model)
    return model.requires_grad_(False), chat
