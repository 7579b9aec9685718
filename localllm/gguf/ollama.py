"""GGUF files of older versions of Ollama's converter, translated to llama.cpp's names.

Ollama's library still has such files: their architectures, keys and tensors have other names, some keys are missing,
and some are wrong. Source: what Ollama itself changes as it loads them, `llama/compat` in github.com/ollama/ollama.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from localllm.errors import UnsupportedModelError, show
from localllm.gguf.header import GgufEntry, GgufHeader, refused
from localllm.gguf.metadata import Json
from localllm.gguf.templates import GEMMA3, GPT_OSS

_ARCHITECTURES = MappingProxyType({"gptoss": "gpt-oss", "olmo3": "olmo2", "qwen25vl": "qwen2vl"})
_YARN_BETAS = {
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}
_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma3": {
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
            **_YARN_BETAS,
        },
        "gemma3n": {"rope.freq_base_local": "rope.freq_base_swa", "head_dim": "attention.key_length"},
        "mistral3": {
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
            **_YARN_BETAS,
        },
    }
)
# Keys that Ollama's files of an architecture leave out, with the value of all its models.
_MISSING: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gemma3": {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6},
        "gptoss": {"rope.scaling.type": "yarn"},
    }
)
_PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gptoss": {".attn_out.": ".attn_output."},
        "gemma4": {".ffn_gate_inp.per_expert_scale": ".ffn_down_exps.scale"},
    }
)
_MIXED_ROWS = ".ffn_gate_up_exps."  # of gptoss: a row of the gate, then one of up
_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
_HEADS = "attention.head_count_kv"  # of hybrids a list, with 0 for each layer that keeps a state
_WORDS = MappingProxyType({"gptoss": "gpt-4o", "mistral3": "tekken"})
_LLAMA3_ENDING = 128009, "<|eot_id|>"
_TOKENIZER, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
_OF_A_TOKEN = ("tokens", "scores", "token_type")

# Gemma 3: all but the smallest model stretch RoPE by 8. They are known by their context, or by their layers where the
# file has another context.
_STRETCHED_CONTEXT, _STRETCHED_LAYERS = 131072, (34, 48, 62)
_STRETCHED = MappingProxyType({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
_ONLY_OLLAMAS = (f"{_TOKENIZER}add_padding_token", f"{_TOKENIZER}add_unknown_token")
_TEMPLATES = MappingProxyType({"gemma3": GEMMA3, "gemma3n": GEMMA3, "gptoss": GPT_OSS})


def as_llama_cpp(headers: Sequence[GgufHeader]) -> tuple[GgufHeader, ...]:
    """Return the headers of a model's files under llama.cpp's names, with the keys that Ollama's converter left out.
    Errors use these names. A file of llama.cpp's keeps its meaning.

    Raises UnsupportedModelError for a form that is not read, CheckpointError where two tensors get one name.
    """
    name = headers[0].metadata.get("general.architecture")
    if not isinstance(name, str):
        return tuple(headers)
    first, *others = (replace(header, tensors=_tensors(header, name)) for header in headers)
    if name == "gptoss" and any(_MIXED_ROWS in tensor for header in headers for tensor in header.tensors):
        why = "its experts' rows of gate and up take turns, as Ollama's converter wrote them until October 2025"
        fix = "pull the model again with Ollama, whose present file has them apart"
        raise UnsupportedModelError(f"{first.path} has a form that is not read", why=why, fix=fix)
    return replace(first, metadata=_metadata(first, name)), *others


def architecture_of(name: str) -> str:
    """Return llama.cpp's name of an architecture."""
    return _ARCHITECTURES.get(name, name)


def _tensors(header: GgufHeader, name: str) -> Mapping[str, GgufEntry]:
    renamed: dict[str, GgufEntry] = {}
    for tensor, entry in header.tensors.items():
        plain = tensor
        for own, usual in _PARTS.get(name, {}).items():
            plain = plain.replace(own, usual)
        if plain in renamed:
            raise refused(header.path, f"it has two tensors {show(plain)}")
        renamed[plain] = replace(entry, name=plain)
    return renamed


def _metadata(header: GgufHeader, name: str) -> Json:
    architecture = architecture_of(name)
    own = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    shared = {key: value for key, value in header.metadata.items() if not key.startswith(f"{name}.")}
    usual = {**dict(_missing(header, name, own)), **own, **_key_heads(name, own)}
    if name == "gemma3" and "rope.global.freq_base" in own:
        usual["final_logit_softcapping"] = 0.0  # the version that wrote this key added a cap that no Gemma 3 has
    return {
        **({_TEMPLATE: _TEMPLATES[name]} if name in _TEMPLATES and _is_of_ollama(header, name) else {}),
        **shared,
        **{f"{architecture}.{key}": value for key, value in usual.items()},
        **_words(header, name),
        **(_gemma3_tokenizer(header) if name in ("gemma3", "gemma3n") else {}),
        "general.architecture": architecture,
    }


def _missing(header: GgufHeader, name: str, own: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the keys that may be missing: usual values, then what the file has under another name, which counts more.
    own: the architecture's keys."""
    yield from _MISSING.get(name, {}).items()
    context, layers = own.get("context_length"), own.get("block_count")
    is_stretched = layers in _STRETCHED_LAYERS or (isinstance(context, int) and context >= _STRETCHED_CONTEXT)
    if name == "gemma3" and is_stretched and _is_of_ollama(header, name):
        yield from _STRETCHED.items()
    yield from ((usual, own[key]) for key, usual in _KEYS.get(name, {}).items() if key in own)


def _is_of_ollama(header: GgufHeader, name: str) -> bool:
    """Return whether a file of gpt-oss, Gemma 3 or 3n is of Ollama's converter: by its name, its encoder, its keys, or
    one that it lacks."""
    has_encoder = any(tensor.startswith(("v.", "mm.")) for tensor in header.tensors)
    lacks_epsilon = f"{name}.attention.layer_norm_rms_epsilon" not in header.metadata
    keys = (*_ONLY_OLLAMAS, *(f"{name}.{key}" for key in (*_KEYS.get(name, {}), "mm.tokens_per_image")))
    return name == "gptoss" or has_encoder or lacks_epsilon or any(key in header.metadata for key in keys)


def _key_heads(name: str, own: Mapping[str, object]) -> Json:
    """Return the heads of keys of a hybrid's layers of attention, where these have the same number."""
    heads = own.get(_HEADS)
    if name not in _HYBRIDS or not isinstance(heads, list | array):
        return {}
    counts = {count for count in heads if count}
    return {_HEADS: counts.pop()} if len(counts) == 1 else {}


def _words(header: GgufHeader, name: str) -> Json:
    """Return how the text is cut into words, where the file does not say it."""
    tokens, words = (header.metadata.get(f"{_TOKENIZER}{key}") for key in ("tokens", "pre"))
    index, ending = _LLAMA3_ENDING
    is_llama3 = name == "llama" and isinstance(tokens, list) and tokens[index : index + 1] == [ending]
    meant = "llama-bpe" if is_llama3 else _WORDS.get(name)
    says_nothing = words in (None, "", "default") or name == "gptoss"
    return {f"{_TOKENIZER}pre": meant} if says_nothing and meant is not None else {}


def _gemma3_tokenizer(header: GgufHeader) -> Json:
    """Return the lists of tokens without those behind the last row of the embedding, which mark images; no space goes
    in front of a text."""
    embedding = header.tensors.get("token_embd.weight")
    rows = next(iter(embedding.shape), None) if embedding else None
    lists = {f"{_TOKENIZER}{key}": header.metadata.get(f"{_TOKENIZER}{key}") for key in _OF_A_TOKEN}
    cut: Json = {key: value[:rows] for key, value in lists.items() if isinstance(value, list | array)}
    prefix = f"{_TOKENIZER}add_space_prefix"
    return {**cut, prefix: header.metadata.get(prefix, False)}
