"""Files of Ollama's own converter, told as llama.cpp's would be: older versions of it, whose files its library still
has, call architectures, keys and tensors otherwise and leave some out.

Source: what Ollama itself changes as it loads such a file, `llama/compat` in github.com/ollama/ollama.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from localllm.errors import UnsupportedModelError
from localllm.gguf.header import GgufEntry, GgufHeader
from localllm.gguf.metadata import Json

_ARCHITECTURES = MappingProxyType({"gptoss": "gpt-oss", "olmo3": "olmo2", "qwen25vl": "qwen2vl"})
_SLIDING_THETA = "rope.freq_base_swa"
_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma3": {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": _SLIDING_THETA},
        "gemma3n": {"rope.freq_base_local": _SLIDING_THETA, "head_dim": "attention.key_length"},
        "mistral3": {
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
    }
)
# What the files of an architecture leave out, where all models of it have the same.
_ABSENT: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gemma3": {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
        "gpt-oss": {"rope.scaling.type": "yarn"},
    }
)
_LONG_GEMMA3 = 131072  # the context of the models whose RoPE is scaled: all but the smallest
_LINEAR = MappingProxyType({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
_WORDS = MappingProxyType({"gpt-oss": "gpt-4o", "mistral3": "tekken"})
_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt-oss": {"attn_out.": "attn_output.", "ffn_norm.": "post_attention_norm."},
        "gemma4": {"ffn_gate_inp.per_expert_scale": "ffn_down_exps.scale"},
    }
)
_HEADS = "attention.head_count_kv"  # 0 in Qwen's layers with states
_LLAMA3_ENDING = 128009, "<|eot_id|>"
_TOKENIZER = "tokenizer.ggml."
_OF_A_TOKEN = ("tokens", "scores", "token_type")


def as_llama_cpp(header: GgufHeader) -> GgufHeader:
    """Return the header with llama.cpp's names, which errors name then, and with what Ollama's converter left out. One
    of llama.cpp's stays as it is. Raises UnsupportedModelError for a form that is not read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        return header
    architecture = architecture_of(name)
    tensors = {each.name: each for each in _tensors(header, architecture)}
    if name == "gptoss" and any(".ffn_gate_up_exps." in each for each in tensors):
        why = "in Ollama's first conversion of gpt-oss the rows of gate and up take turns"
        fix = "ollama pull gpt-oss, which fetches its present form"
        raise UnsupportedModelError(f"{header.path} has a form that is not read", why=why, fix=fix)
    metadata = {_key(key, name, architecture): value for key, value in header.metadata.items()}
    metadata["general.architecture"] = architecture
    renamed = replace(header, metadata=metadata, tensors=tensors)
    added = {f"{architecture}.{key}": value for key, value in _absent(renamed, architecture)}
    return replace(renamed, metadata={**added, **metadata, **_corrected(renamed, architecture)})


def architecture_of(name: str) -> str:
    """Return llama.cpp's name of an architecture."""
    return _ARCHITECTURES.get(name, name)


def _tensors(header: GgufHeader, architecture: str) -> Iterator[GgufEntry]:
    parts = _PARTS.get(architecture, {})
    for name, entry in header.tensors.items():
        part = next((each for each in parts if f".{each}" in name), None)
        yield entry if part is None else replace(entry, name=name.replace(f".{part}", f".{parts[part]}"))


def _key(key: str, name: str, architecture: str) -> str:
    return f"{architecture}.{key.removeprefix(f'{name}.')}" if key.startswith(f"{name}.") else key


def _absent(header: GgufHeader, architecture: str) -> Iterator[tuple[str, object]]:
    """Yield the keys that all files of the architecture have by these names, where this one has another name or none:
    the later ones count."""
    own = {key.removeprefix(f"{architecture}."): value for key, value in header.metadata.items()}
    yield from _ABSENT.get(architecture, {}).items()
    context, has_encoder = own.get("context_length"), any(name.startswith("v.") for name in header.tensors)
    if architecture == "gemma3" and has_encoder and isinstance(context, int) and context >= _LONG_GEMMA3:
        yield from _LINEAR.items()
    yield from ((new, own[old]) for old, new in _KEYS.get(architecture, {}).items() if old in own)


def _corrected(header: GgufHeader, architecture: str) -> Json:
    """Return the keys that say something else than is meant, as they are meant."""
    found: Json = {}
    heads = header.metadata.get(f"{architecture}.{_HEADS}")
    if architecture.startswith("qwen3") and isinstance(heads, list | array) and heads:
        found[f"{architecture}.{_HEADS}"] = max(heads)
    tokens, words = (header.metadata.get(f"{_TOKENIZER}{key}") for key in ("tokens", "pre"))
    tokens = tokens if isinstance(tokens, list) else []
    index, ending = _LLAMA3_ENDING
    is_llama3 = architecture == "llama" and tokens[index : index + 1] == [ending]
    meant = "llama-bpe" if is_llama3 else _WORDS.get(architecture)
    if meant is not None and words in (None, "default"):
        found[f"{_TOKENIZER}pre"] = meant
    if architecture in ("gemma3", "gemma3n"):
        found |= _gemma3_tokenizer(header)
    return found


def _gemma3_tokenizer(header: GgufHeader) -> Json:
    """Return SentencePiece's pieces without the marks of images behind the last row of the embedding. No space goes in
    front of a text."""
    embedding = header.tensors.get("token_embd.weight")
    rows = next(iter(embedding.shape), None) if embedding else None
    lists = {f"{_TOKENIZER}{key}": header.metadata.get(f"{_TOKENIZER}{key}") for key in _OF_A_TOKEN}
    cut: Json = {key: value[:rows] for key, value in lists.items() if isinstance(value, list | array)}
    prefix = f"{_TOKENIZER}add_space_prefix"
    return {**cut, prefix: header.metadata.get(prefix, False)}
