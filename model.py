"""Qwen2 in one file: configuration, transformer, checkpoint reading and writing, chat tokenizer.

What is unusual here, compared with any other small Qwen2:
  * attention takes its mask from outside, and `visible` below is the only mask rule: training
    calls it, and decoding is held to it (MARS, arXiv 2604.07023);
  * `forward` returns hidden states, and the caller picks positions before asking for `logits`:
    with 152k words the vocabulary projection is most of the work and of the memory;
  * `<|mask|>` is an ordinary token that is never predicted: its logit is -inf, always;
  * module names are the checkpoint's and config fields are config.json's, so that loading is a
    strict comparison of names and shapes.
"""

import contextlib
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
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class UserError(ValueError):
    """Something the user can put right: one line that says what is wrong, where, and what to do."""


def run(main: Callable[[], None]) -> None:
    """Call a script's main(); what the user can put right is one line and exit status 2."""
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as in `... | head`; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        line = str(error).strip().partition("\n")[0]
        if isinstance(error, MemoryError | RuntimeError):
            kind = f"{type(error).__name__}: {line}".lower()
            if not re.search("memoryerror|out of ?memory|allocate memory", kind):
                raise  # a bug of ours
            line = f"out of memory: use smaller batches, fewer rows or shorter texts ({line})"
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def place(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """`auto` is the first of cuda, mps and cpu that is there; dtype None is bfloat16 on cuda."""
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there += ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if device != "auto" and not {device, f"{device}:0"} & set(there):
        raise UserError(f"device {device!r}: not on this machine, which has {', '.join(there)}")
    chosen = torch.device(there[0] if device == "auto" else device)
    return chosen, getattr(torch, dtype or ("bfloat16" if chosen.type == "cuda" else "float32"))


# ------------------------------------------------------------------------------------------- config


@dataclass
class Config:
    """The keys of config.json that matter here; the last two are MARS's own."""

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
    eos_token_id: tuple[int, ...] = ()  # all that end a turn; the first is the one to train
    mask_token_id: int | None = None
    block_size: int | None = None  # the B of its MARS training, if it had any

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be; a comparison of shapes finds the rest."""
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers)
        sizes += (self.num_attention_heads, self.num_key_value_heads, self.max_position_embeddings)
        sizes += (self.block_size or 1,)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes must be whole numbers above 0, not {sizes}")
        ends = [i for i in self.eos_token_id if isinstance(i, int) and 0 <= i < self.vocab_size]
        if not ends or len(ends) < len(self.eos_token_id):
            raise ValueError(f"eos_token_id {self.eos_token_id}: no tokens that could end a turn")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def read_config(directory: Path) -> Config:
    """config.json of transformers 4 or 5; what `Qwen2` would run wrongly is refused by name."""
    path, generation = directory / "config.json", directory / "generation_config.json"
    raw = read_json(path)
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = raw.get("eos_token_id") if eos is None else eos
    raw["eos_token_id"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    try:
        return parse_config(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {str(error).rpartition('__init__() ')[2]}") from None


def parse_config(raw: dict) -> Config:
    """Raises ValueError for what is not supported, and other errors for what is not a config."""
    layers, count = raw.get("layer_types"), raw.get("num_hidden_layers", 0)
    windows = "sliding_attention" in layers if layers else raw.get("max_window_layers", 0) < count
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    used = {  # what else there is, and what Qwen2 has instead
        "model_type": (raw.get("model_type"), ("qwen2", "a2d-qwen2")),
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
        "sliding-window attention": (bool(raw.get("use_sliding_window") and windows), (False,)),
    }
    for name, (value, supported) in used.items():
        if value not in supported:
            raise ValueError(
                f"{name} {value!r} is not supported, only {' or '.join(map(str, supported))}"
            )
    raw["rope_theta"] = rope.get("rope_theta", raw.get("rope_theta"))  # transformers 5 nests it
    raw["num_key_value_heads"] = raw.get("num_key_value_heads") or raw.get("num_attention_heads")
    raw["eos_token_id"] = tuple(raw["eos_token_id"])
    return Config(**{k: raw[k] for k in Config.__dataclass_fields__ if raw.get(k) is not None})


# ----------------------------------------------------------------------------------------- the mask


def visible(q_pos, q_start, q_doc, k_pos, k_start, k_doc):
    """May query q see key k? The paper's mask rule, elementwise over integer tensors.

    Every position carries three integers: `pos`, its position id; `doc`, its sequence (padding has
    one of its own); and `start`. A clean token has start = pos + 1. A mask has start = the first
    position of its window: it sees the clean tokens before the window, and the masks of the window
    up to itself. For the tokens a b c d e f with two windows of masks (B = 2), a row per query:

             pos start | a b c d e f | M3 M4 | M5 M6
        d     3    4   | x x x x     |       |          clean: causal, and never sees a mask
        M3    3    3   | x x x       | x     |          predicts e, so it must not see d
        M4    4    3   | x x x       | x  x  |
        M5    5    5   | x x x x x   |       | x
        M6    6    5   | x x x x x   |       | x  x
    """
    k_is_clean = k_start > k_pos
    clean = k_is_clean & (k_pos < q_start)
    mask = ~k_is_clean & (k_start == q_start) & (k_pos <= q_pos)
    return (q_doc == k_doc) & (clean | mask)


# -------------------------------------------------------------------------------------- transformer

LOGITS_AT_A_TIME = 2**26  # in training: 256 MiB in float32


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, float32 (B, 1, T, head_dim / 2), of positions (B, T)."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * theta ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, head_dim). Qwen2 pairs dimension i with i + head_dim / 2, not i + 1."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@functools.cache
def flex_attention() -> Callable[..., Tensor]:
    """Compiled at its first call, for one shape; only training on a GPU calls it."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


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
        q, k = rotate(torch.cat([q, k], dim=1), cos, sin).split([q.size(1), k.size(1)], dim=1)
        if cache is not None:
            k, v = cache.write(self.layer, k, v)  # (B, kv_heads, S, head_dim), the old and the new
            q = q.reshape(B, -1, mask.size(2), self.head_dim)  # see KVCache.mask
            if q.is_cuda and q.size(1) > k.size(1):  # no fast kernel takes a mask and shared heads
                k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        if mask is None or isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        else:
            y = flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)
        y = y.reshape(B, -1, T, self.head_dim)
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

        mask: bool (B, 1, T, S), True where a query may look, or FlexAttention's BlockMask of these;
        None is plain causal. S is T. With a cache mask is `cache.mask`'s and S the slots that it
        spans, where the T new keys and values are written first.
        """
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, D); that of `<|mask|>` is -inf, it is never predicted.

        Pick positions first, and keep it 2-D: sliced 3-D bfloat16 is 30 times slower on a CPU.
        """
        tied = self.config.tie_word_embeddings
        logits = F.linear(hidden, self.model.embed_tokens.weight if tied else self.lm_head.weight)
        if self.config.mask_token_id is not None:
            logits[:, self.config.mask_token_id] = float("-inf")
        return logits

    def in_chunks(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function` of tensors (N, ...), a few of the N at a time, put together again.

        For training, where it takes the logits of N hidden states: all at once they would need more
        memory than all the rest, so the backward pass makes them again (not the last, with which it
        begins). Under FSDP this is the call that gathers the head: a call for each chunk would be
        more of them in one process than in another, which would wait for ever.
        """
        count = -(-len(tensors[0]) * self.config.vocab_size // LOGITS_AT_A_TIME)
        *parts, last = zip(*(tensor.chunk(max(1, count)) for tensor in tensors))
        again = functools.partial(checkpoint, function, use_reentrant=False)
        return torch.cat([*(again(*part) for part in parts), function(*last)])

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device


def initialize(config: Config, seed: int) -> Qwen2:
    """A fresh float32 model on the CPU; norms start at 1 by themselves."""
    torch.manual_seed(seed)
    model = Qwen2(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=config.initializer_range)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    return model


# -------------------------------------------------------------------------------------- checkpoints


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {str(content)[:40]}")
    return content


FILES = ["config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"]
FILES += ["model.safetensors.index.json", "chat_template.jinja", "added_tokens.json"]
FILES += ["tokenizer.json", "tokenizer_config.json"]


def locate(name: str) -> Path:
    """The directory `name`, or the hub's repository, downloaded unless it is in the cache.

    The cache, the progress bar, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT are huggingface_hub's.
    """
    if name and len(name) < 1000 and Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"\w[\w.-]{,95}/[\w.-]{1,96}", name):
        raise UserError(f"{name[:200]!r}: no such directory, and not a hub id (org/name)")
    from huggingface_hub import constants, errors, snapshot_download  # slow, and only needed here

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except errors.GatedRepoError:
        reason = "asks for its terms to be accepted on its page; then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "has no such model, or it is private and HF_TOKEN is not a token that may read it"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        offline = "is not asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "does not answer"
        reason = f"{offline}, and nothing complete was downloaded before"
    except Exception as error:  # a proxy, a full disk, a file that changed on the way: many types
        reason = "says: " + str(error).strip().partition("\n")[0]
    raise UserError(f"{name}: no such directory in {Path.cwd()}; the hub {reason}")


def read_tensors(directory: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or else of the indexed shards, straight to `device`."""
    files, tensors = {"model.safetensors"}, {}
    index = directory / "model.safetensors.index.json"
    if index.exists() and not (directory / "model.safetensors").exists():
        files = set(map(str, dict(read_json(index).get("weight_map") or {}).values()))
    for path in sorted(directory / file for file in files):
        try:
            with safe_open(path, framework="pt", device=str(device)) as shard:
                tensors |= {name: shard.get_tensor(name).to(dtype) for name in shard.keys()}
        except FileNotFoundError:
            hint = "to start without weights: train.py --from-scratch"
            raise UserError(f"{path}: no such file ({hint})") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: damaged ({error})") from None
        except RuntimeError as error:  # out of memory, on a CPU or a GPU
            size = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 2**30
            raise UserError(f"{directory}: {size:.1f} GiB of weights do not fit: {error}") from None
    return tensors


def load_model(directory: Path, device="cpu", dtype=torch.float32) -> Qwen2:
    """The model in `directory`; a missing, surplus or misshapen tensor is an error by name."""
    config = read_config(directory)
    tensors = read_tensors(directory, torch.device(device), dtype)
    # A head in the file is the head, whatever the config says: some checkpoints carry both.
    config.tie_word_embeddings &= "lm_head.weight" not in tensors
    with torch.device("meta"):
        model = Qwen2(config)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        want, got = expected.get(name, "no such tensor"), found.get(name, "none")
        if want != got:
            raise UserError(f"{directory}: tensor {name}: expected {want}, found {got}")
    model.load_state_dict(tensors, assign=True)
    return model


def replace(writers: dict[Path, Callable[[Path], object]]) -> None:
    """Write all files beside their places, flush, then rename: a failure leaves the old ones."""
    temporaries = {path: path.with_name(path.name + ".tmp") for path in writers}
    umask = os.umask(0)
    os.umask(umask)
    try:
        for path, write in writers.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporaries[path])
            with open(temporaries[path], "r+b") as file:
                os.fsync(file.fileno())
            temporaries[path].chmod(0o666 & ~umask)  # safetensors' are for their owner only
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not saved ({error}); what was there before is intact") from None
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def save(model: Qwen2, chat: "Chat", directory: Path, dtype=torch.bfloat16, weights=None) -> None:
    """A directory that `load` and transformers both read; any Qwen2 server can serve it as AR.

    weights: the state_dict, if it is not `model`'s own (which holds but a part if it is sharded).
    """
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
    weights = weights or model.state_dict()
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in weights.items()}
    writers = {
        directory / name: functools.partial(Path.write_text, data=text, encoding="utf-8")
        for name, text in texts.items()
    }
    weights = functools.partial(save_file, tensors, metadata={"format": "pt"})
    replace({**writers, directory / "model.safetensors": weights})


# --------------------------------------------------------------------------------------------- chat

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
        settings, template = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        self.settings = read_json(settings) if settings.exists() else {}
        self._add_tokens(directory / "added_tokens.json")
        self.template = self.settings.pop("chat_template", None) or CHATML
        try:
            if isinstance(self.template, list):  # several, by name
                self.template = {t["name"]: t["template"] for t in self.template}["default"]
            if template.exists():
                self.template = template.read_text(encoding="utf-8")
            self.render = self._compile()
        except (TemplateError, OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{directory}: the chat template is damaged ({error})") from None

    def _add_tokens(self, path: Path) -> None:
        """Those that tokenizer.json lacks: some checkpoints list what they added beside it."""
        added = read_json(path) if path.exists() else {}
        try:
            listed = {int(id): AddedToken(word, normalized=False) for word, id in added.items()}
            for id, token in (self.settings.get("added_tokens_decoder") or {}).items():
                special = token.get("special", True)
                listed[int(id)] = AddedToken(token["content"], normalized=False, special=special)
        except (TypeError, ValueError, AttributeError, KeyError):
            raise UserError(f"{path.parent}: its list of added tokens is damaged") from None
        for id, token in sorted(listed.items(), key=lambda pair: pair[0]):
            if self.tokenizer.token_to_id(token.content) is None:
                self.tokenizer.add_tokens([token])
            found = self.tokenizer.token_to_id(token.content)
            if found != id:
                raise UserError(f"{path.parent}: {token.content} is listed as {id}, but is {found}")

    def _compile(self) -> Callable[..., str]:
        """With transformers' whitespace rules, and sandboxed: it is a program from a stranger."""

        def raise_exception(message: str):
            raise TemplateError(message)

        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        jinja.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        tokens = {k: v for k, v in self.settings.items() if k.endswith("_token") and v}
        names = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items()}
        names["raise_exception"] = raise_exception
        return jinja.from_string(self.template, globals=names).render

    @property
    def mask_id(self) -> int | None:
        return self.tokenizer.token_to_id(MASK)

    def prompt(self, messages: list[dict]) -> str:
        """The text that asks for the assistant's next turn (transformers: apply_chat_template)."""
        try:
            return self.render(messages=messages, add_generation_prompt=True)
        except Exception as error:  # a stranger's program may fail in any way
            raise UserError(f"the chat template refuses this conversation: {error}") from None

    def encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # half of a surrogate pair, from broken JSON or a broken terminal
            raise UserError(f"not valid Unicode: {text[:40]!a}") from None

    def decode(self, ids: list[int]) -> str:
        """Text of token ids without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def add_mask_token(model: Qwen2, chat: Chat) -> None:
    """Find the tokenizer's `<|mask|>`, or add it: in the first free embedding row or a new one."""
    config, words = model.config, chat.tokenizer.get_vocab()
    largest = max((id for word, id in words.items() if word != MASK), default=0)
    if largest >= config.vocab_size:
        raise UserError(
            f"token id {largest} of the tokenizer exceeds vocab_size {config.vocab_size}"
        )
    chat.tokenizer.add_special_tokens([AddedToken(MASK, normalized=False, special=True)])
    config.mask_token_id = chat.mask_id
    missing = max(0, config.mask_token_id + 1 - config.vocab_size)
    config.vocab_size += missing
    matrices = [model.model.embed_tokens, *([] if config.tie_word_embeddings else [model.lm_head])]
    for matrix in matrices if missing else ():
        mean = matrix.weight.data.mean(0, keepdim=True)  # a new word starts as the average one
        matrix.weight = nn.Parameter(torch.cat([matrix.weight.data] + [mean] * missing))


def load(name: str, device="cpu", dtype=torch.float32) -> tuple[Qwen2, Chat]:
    """Model and chat tokenizer of a directory or hub id, with a mask token: ready for decoding.

    To train it, let its weights have gradients: model.requires_grad_().
    """
    directory = locate(name)
    model, chat = load_model(directory, device, dtype), Chat(directory)
    add_mask_token(model, chat)
    return model.requires_grad_(False), chat
