"""Qwen2 in one file: configuration, transformer, checkpoint reading and writing, chat tokenizer.

What is unusual here, compared with any other small Qwen2:
  * attention takes its mask from outside, and `visible` below is the only mask rule of the project:
    training, decoding and the tests all use it (MARS, arXiv 2604.07023, section 3);
  * `forward` returns hidden states; the caller picks the positions it needs before `logits`,
    because with 152k words the vocabulary projection is most of the work and the memory;
  * `<|mask|>` is an ordinary token that can never be predicted: its logit is -inf everywhere;
  * module names are the checkpoint's names and config fields are config.json's keys, so that loading
    is a strict comparison of names and shapes.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn


class UserError(ValueError):
    """Something the user can put right: one line that says what is wrong, where, and what to do."""


def run(main: Callable[[], None]) -> None:
    """Call a script's main(); what the user can put right is one line and exit status 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def pick_device(name: str) -> torch.device:
    """`auto` is the first of cuda, mps and cpu that is there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, yes in there.items() if yes)
    kind, _, index = name.partition(":")
    if not there.get(kind) or (kind == "cuda" and int(index or 0) >= torch.cuda.device_count()):
        here = ", ".join(kind for kind, yes in there.items() if yes)
        raise UserError(f"device {name!r}: not on this machine, which has {here}")
    return torch.device(name)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA and float32 elsewhere, unless one is named."""
    return getattr(torch, name or ("bfloat16" if device.type == "cuda" else "float32"))


# ---------------------------------------------------------------------------------------------- config


@dataclass
class Config:
    """The keys of config.json that matter here, plus the two that MARS adds (the last two)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()  # every token that ends a turn; the first is the one trained
    mask_token_id: int | None = None
    block_size: int | None = None  # the B that the checkpoint was trained with; None: no MARS yet

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def read_config(directory: Path) -> Config:
    """Read config.json (of transformers 4 or 5) and refuse by name what `Qwen2` would run wrongly."""
    path = directory / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in ("qwen2", "a2d-qwen2"):
        raise UserError(f"{path}: model_type {raw.get('model_type')!r}; only qwen2 is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act {raw['hidden_act']!r}; only silu is supported")
    layers = raw.get("layer_types") or []
    windowed = raw.get("max_window_layers", 0) < raw.get("num_hidden_layers", 0)
    if raw.get("use_sliding_window") and ("sliding_attention" in layers if layers else windowed):
        raise UserError(f"{path}: sliding-window attention is in use, which is not supported")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UserError(f"{path}: rope_type {rope_type!r}; only the default, unscaled one is supported")

    raw["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta"))  # version 5 nests it
    raw["num_key_value_heads"] = raw.get("num_key_value_heads") or raw.get("num_attention_heads")
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = raw.get("eos_token_id") if eos is None else eos
    raw["eos_token_id"] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    known = {k: raw[k] for k in Config.__dataclass_fields__ if raw.get(k) is not None}
    try:
        config = Config(**known)
    except TypeError as error:  # "missing 2 required positional arguments: 'vocab_size' and ..."
        raise UserError(f"{path}: {str(error).partition('() ')[2]}") from None
    if not config.eos_token_id:
        raise UserError(f"{path}: no eos_token_id here or in generation_config.json; no turn would end")
    return config


# ------------------------------------------------------------------------------------------- the mask


def visible(q_pos, q_start, q_doc, k_pos, k_start, k_doc):
    """May query q see key k? Elementwise over integers or tensors: the one mask rule (section 3.2).

    Every position carries three integers: `pos`, its position id; `doc`, its sequence (padding has one
    of its own); and `start`. A clean token has start = pos + 1. A mask token has start = the first
    position of its window: it sees the clean tokens before the window and the masks of its own window
    up to itself. With the prefix `a b c`, then two windows of masks (B = 2), a row per query:

             pos  start |  a  b  c  d  e  f | M3 M4 | M5 M6
        d     3     4   |  x  x  x  x       |       |          clean: causal, never sees a mask
        M3    3     3   |  x  x  x          | x     |
        M4    4     3   |  x  x  x          | x  x  |          not the clean d that it must predict
        M5    5     5   |  x  x  x  x  x    |       | x
        M6    6     5   |  x  x  x  x  x    |       | x  x
    """
    k_is_clean = k_start > k_pos
    clean = k_is_clean & (k_pos < q_start)
    mask = ~k_is_clean & (k_start == q_start) & (k_pos <= q_pos)
    return (q_doc == k_doc) & (clean | mask)


# --------------------------------------------------------------------------------------- transformer


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, (B, 1, T, head_dim / 2) in float32, for positions (B, T)."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, head_dim). Qwen2 pairs dimension i with i + head_dim / 2, not with i + 1."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries)
        self.k_proj = nn.Linear(config.hidden_size, keys)
        self.v_proj = nn.Linear(config.hidden_size, keys)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (
            project(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)  # (B, kv_heads, S, head_dim), the old and the new
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
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

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache=None) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T) at positions (B, T).

        mask: bool (B, 1, T, S), True where a query may look; None is plain causal. With a cache the T
        new positions are written behind each row's own length, and S of its slots are looked at.
        """
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, D); `<|mask|>` is never predicted, so its logit is -inf.

        Pick positions before calling, and keep it 2-D: on a CPU, a sliced 3-D bfloat16 tensor is 30
        times slower.
        """
        tied = self.config.tie_word_embeddings
        logits = F.linear(hidden, self.model.embed_tokens.weight if tied else self.lm_head.weight)
        if self.config.mask_token_id is not None:
            logits[:, self.config.mask_token_id] = float("-inf")
        return logits

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device


def initialize(config: Config, seed: int) -> Qwen2:
    """A fresh float32 model on the CPU, as transformers would initialise it."""
    torch.manual_seed(seed)
    model = Qwen2(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weight)
        elif "norm" not in name:  # norms start at one
            nn.init.normal_(weight, std=config.initializer_range)
    return model


# ---------------------------------------------------------------------------------------- checkpoints


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def locate(name: str) -> Path:
    """The directory `name`, or the hub's repository of that name, downloaded (or from the cache)."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name}: no such directory, and not a hub id (org/name)")
    from huggingface_hub import snapshot_download  # slow to import, and only needed here

    try:
        patterns = ["*.json", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # no network, no such repository, no right to read it: many types
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{name}: no such directory here, and the hub says: {reason}") from None


def read_tensors(directory: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names, straight to `device`."""
    files = {"model.safetensors"}
    index = directory / "model.safetensors.index.json"
    if index.exists() and not (directory / "model.safetensors").exists():
        files = set(read_json(index).get("weight_map", {}).values())
    tensors = {}
    for file in sorted(files):
        try:
            with safe_open(directory / file, framework="pt", device=str(device)) as shard:
                tensors |= {name: shard.get_tensor(name).to(dtype) for name in shard.keys()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{directory / file}: missing or damaged ({error})") from None
        except RuntimeError as error:
            size = sum((directory / f).stat().st_size for f in files if (directory / f).exists())
            reason = str(error).partition("\n")[0]
            raise UserError(f"{directory}: {size / 2**30:.1f} GiB of weights do not fit: {reason}") from None
    return tensors


def load_model(directory: Path, device="cpu", dtype=torch.float32) -> Qwen2:
    """The model in `directory`. A missing, surplus or misshapen tensor is an error that names it."""
    config = read_config(directory)
    tensors = read_tensors(directory, torch.device(device), dtype)
    # A head in the file is the head, whatever the config says: some checkpoints carry both.
    config.tie_word_embeddings &= "lm_head.weight" not in tensors
    with torch.device("meta"):
        model = Qwen2(config)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            want, got = expected.get(name, "no such tensor"), found.get(name, "none")
            raise UserError(f"{directory}: tensor {name}: expected {want}, found {got}")
    model.load_state_dict(tensors, assign=True)
    return model


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, flush, rename: whoever reads `path` sees the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not saved ({error}); what was there before is intact") from None
    finally:
        temporary.unlink(missing_ok=True)


def save(model: Qwen2, chat: "Chat", directory: Path, dtype=torch.bfloat16) -> None:
    """A directory that `load` and transformers both read; any Qwen2 server can serve it as AR."""
    config = {k: v for k, v in asdict(model.config).items() if v is not None}
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {"rope_type": "default", "rope_theta": model.config.rope_theta},
    }
    texts = {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps({"eos_token_id": model.config.eos_token_id}),
        "tokenizer.json": chat.tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(chat.settings, indent=2, ensure_ascii=False),
        "chat_template.jinja": chat.template,
    }
    for name, text in texts.items():
        replace(directory / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.state_dict().items()}
    weights = directory / "model.safetensors"
    replace(weights, lambda path: save_file(tensors, path, metadata={"format": "pt"}))


# ----------------------------------------------------------------------------------------------- chat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MASK = "<|mask|>"


class Chat:
    """A checkpoint's tokenizer and chat template: messages -> text -> token ids, and back."""

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for all that goes wrong
            raise UserError(f"{path}: missing or damaged ({error})") from None
        settings = directory / "tokenizer_config.json"
        self.settings = read_json(settings) if settings.exists() else {}
        template = self.settings.get("chat_template") or CHATML
        if isinstance(template, list):  # several named templates
            template = next(t["template"] for t in template if t["name"] == "default")
        file = directory / "chat_template.jinja"
        self.template = file.read_text(encoding="utf-8") if file.exists() else template
        self.settings["chat_template"] = self.template
        self._render = self._compile()

    def _compile(self) -> Callable[..., str]:
        # Sandboxed, with transformers' whitespace rules: the template is a program from a stranger.
        def fail(message: str):
            raise TemplateError(message)

        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        tokens = {k: v for k, v in self.settings.items() if k.endswith("_token") and v}
        names = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items()}
        return jinja.from_string(self.template, globals={"raise_exception": fail, **names}).render

    def prompt(self, messages: list[dict]) -> str:
        """The text that asks for the assistant's next turn, as transformers' apply_chat_template."""
        try:
            return self._render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from None

    @functools.cached_property
    def roles(self) -> set[str]:
        """The roles whose text the template shows; Qwen2.5's, for one, silently drops the others."""
        shown = set()
        for role in ("system", "user", "assistant", "tool"):
            turns = [{"role": role, "content": "0?0"}, {"role": "user", "content": "."}]
            try:
                shown |= {role} if "0?0" in self.prompt(turns) else set()
            except UserError:
                pass
        return shown

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def add_mask_token(model: Qwen2, chat: Chat) -> None:
    """Give the model a `<|mask|>`: the tokenizer's, else the first free embedding row, else a new row."""
    if chat.tokenizer.token_to_id(MASK) is None:
        chat.tokenizer.add_special_tokens([AddedToken(MASK, normalized=False, special=True)])
    model.config.mask_token_id = chat.tokenizer.token_to_id(MASK)
    missing = model.config.mask_token_id + 1 - model.config.vocab_size
    if missing <= 0:
        return
    model.config.vocab_size += missing
    matrices = [model.model.embed_tokens] + ([] if model.config.tie_word_embeddings else [model.lm_head])
    for matrix in matrices:  # a new row starts as the average word
        mean = matrix.weight.data.mean(0, keepdim=True).expand(missing, -1)
        matrix.weight = nn.Parameter(torch.cat([matrix.weight.data, mean]))


def load(name: str, device="cpu", dtype=torch.float32) -> tuple[Qwen2, Chat]:
    """Model and chat tokenizer of a directory or hub id, ready for MARS: the mask token is there."""
    directory = locate(name)
    model, chat = load_model(directory, device, dtype), Chat(directory)
    add_mask_token(model, chat)
    return model, chat
