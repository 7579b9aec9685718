"""What the config.json of a GGUF file's model would say: the same keys, made of GGUF's metadata and tensors.

Knows what all architectures have; `architectures` knows the rest. The values are checked where a config.json is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from localllm.errors import FETCH_ANEW, CheckpointError, Fixes, UnsupportedModelError, show
from localllm.gguf.architectures import ARCHITECTURES, HYBRIDS, OF_OTHER_HEADS, VARYING
from localllm.gguf.metadata import MOST, Json, Metadata, Shape
from localllm.gguf.rope import DEFAULT_THETA, rope_scaling, share_of
from localllm.registry import unknown_architecture

_SPECIAL = (3, 4)  # token types: control, user-defined
_ENDINGS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
    | {"<eos>", "</s>", "<EOT>", "[e~[", "<|observation|>", "<|return|>", "<|call|>", "<turn|>", "<|tool_response>"}
)
# Tokens that end no text where another one does: gpt-oss' end of a message, and a tag of HTML that Gemma knows.
_OTHERWISE = MappingProxyType({"<|return|>": "<|end|>", "<eos>": "</s>"})
_NOT_MODELS = {
    "adapter": ("a LoRA adapter", "name the model that it was made for, and this file behind --adapter"),
    "mmproj": ("the image or audio encoder of a model", "give the file without mmproj in its name, for text alone"),
    "imatrix": ("an importance matrix, which quantizers use", "give the GGUF file of a model"),
}


def hf_config(
    metadata: Mapping[str, object],
    tensors: Mapping[str, Shape],
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
    source: str = "the GGUF file",
) -> Json:
    """Return the content of the model's config.json.

    tensors: shapes, rows first, by the names in the file. factors: see `rope_factors`. source: the file in errors.
    Raises UnsupportedModelError for what is no model or none that runs here, CheckpointError for an unusable value.
    """
    _require_model(metadata, tensors, source)
    architecture = str(metadata["general.architecture"])
    own = ARCHITECTURES.get(architecture)
    if own is None:
        raise unknown_architecture(source, {"model_type": architecture}, ARCHITECTURES)
    file = Metadata(metadata, tensors, factors, architecture, source)
    usual = file.in_first_layer() if architecture in VARYING else file
    usual = file.without_gaps() if architecture in HYBRIDS else usual
    heads = {} if architecture in OF_OTHER_HEADS else _heads(usual)
    return _common(usual) | heads | own(file)


def eos_ids(metadata: Mapping[str, object]) -> list[int]:
    """Return the ids that end a text: of the end of the sequence, of a turn and of a message, as they are declared, and
    then those of special tokens whose texts are known to end a turn, since many files declare one id alone."""
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    declared = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    listed = metadata.get("tokenizer.ggml.eos_token_ids")  # Ollama's
    declared += listed if isinstance(listed, list | array) else []
    known: list[object] = []
    if isinstance(tokens, list) and isinstance(kinds, Sequence) and len(kinds) == len(tokens):
        endings = _ENDINGS.difference(inner for outer, inner in _OTHERWISE.items() if outer in tokens)
        known += [index for index, token in enumerate(tokens) if token in endings and kinds[index] in _SPECIAL]
    size = len(tokens) if isinstance(tokens, list) else MOST
    found = [index for index in (*declared, *known) if type(index) is int and 0 <= index < size]
    return list(dict.fromkeys(found))


def _require_model(metadata: Mapping[str, object], tensors: Mapping[str, Shape], source: str) -> None:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        why = f"general.architecture is {show(architecture)}; the name of the architecture is needed"
        raise CheckpointError(f"{source} does not say what it holds", why=why, fix=FETCH_ANEW)
    kind = "mmproj" if architecture == "clip" else metadata.get("general.type", "model")
    if isinstance(kind, str) and kind in _NOT_MODELS:
        what, fix = _NOT_MODELS[kind]
        raise UnsupportedModelError(f"{source} is {what}", why=f"it has the type {show(kind)}, not model", fix=fix)
    if len(tensors.get("token_embd.weight", ())) != 2:
        why = f"of its {len(tensors)} tensors none is the matrix token_embd.weight"
        fixes: Fixes = ("give the file with the model's weights", FETCH_ANEW)
        raise CheckpointError(f"{source} holds no model that writes text", why=why, fix=fixes)


# What all architectures have


def _common(file: Metadata) -> Json:
    if file.get("attention.causal") is False:
        raise file.unsupported("attention in both directions")
    return {
        "vocab_size": file.tensors["token_embd.weight"][0],
        "hidden_size": file.integer("embedding_length"),
        # A model of experts alone may have no such key, and no use for one.
        "intermediate_size": file.integer("feed_forward_length", 0 if file.has("ffn_down_exps.weight") else None),
        "num_hidden_layers": file.num_layers,
        "num_nextn_predict_layers": file.integer("nextn_predict_layers", 0),
        "max_position_embeddings": file.integer("context_length"),
        "rms_norm_eps": file.norm_eps,
        "rope_theta": file.number("rope.freq_base", DEFAULT_THETA),
        "rope_local_base_freq": file.optional_number("rope.freq_base_swa"),
        "rope_scaling": rope_scaling(file),
        "sliding_window": file.window,
        "attention_bias": file.has_bias,
        "use_bias": file.has_bias,
        "mlp_bias": file.has("ffn_down.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _bos_id(file.keys),
        "eos_token_id": eos_ids(file.keys) or None,
    }


def _heads(file: Metadata) -> Json:
    """Return what nearly all architectures say of their heads."""
    heads = file.integer("attention.head_count")
    if heads < 1:
        raise file.refused("attention.head_count", heads, "a positive number")
    head_dim = file.head_dim
    if file.integer("attention.value_length", head_dim) != head_dim:
        raise file.unsupported("values of another size than its keys")
    rotary_dim = file.integer("rope.dimension_count", head_dim)
    share = {} if rotary_dim == head_dim else {"partial_rotary_factor": share_of(rotary_dim, head_dim)}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **share,
    }


def _bos_id(metadata: Mapping[str, object]) -> int | None:
    index = metadata.get("tokenizer.ggml.bos_token_id")
    return index if type(index) is int and 0 <= index <= MOST else None
