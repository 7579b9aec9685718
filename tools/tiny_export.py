"""Writing the tiny model as a Hugging Face checkpoint directory.

Owns the files' contents and their atomic replacement. Knows nothing of training.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_data import END_OF_TEXT, IM_END, IM_START, special_ids
from tiny_model import TinyLM
from tokenizers import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _config(model: TinyLM, ids: dict[str, int]) -> dict[str, object]:
    c = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_positions,
        "mlp_bias": False,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "pad_token_id": ids[END_OF_TEXT],
        "pretraining_tp": 1,
        "rms_norm_eps": c.rms_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": c.vocab_size,
    }


def _tokenizer_config(ids: dict[str, int], max_positions: int) -> dict[str, object]:
    added = {
        str(number): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True}
        for token, number in ids.items()
    }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": max_positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def export(model: TinyLM, tokenizer: Tokenizer, directory: Path, sampling: dict[str, object]) -> None:
    """Write all files beside `directory` first, then rename them into it, so that no reader sees half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = special_ids(tokenizer)
    generation = {"bos_token_id": ids[END_OF_TEXT], "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
                  "pad_token_id": ids[END_OF_TEXT], **sampling}  # fmt: skip
    scratch = Path(tempfile.mkdtemp(prefix=".tiny-", dir=directory.parent))
    try:
        weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(scratch / "tokenizer.json"))
        for name, content in (
            ("config.json", _config(model, ids)),
            ("generation_config.json", generation),
            ("tokenizer_config.json", _tokenizer_config(ids, model.config.max_positions)),
        ):
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        for path in sorted(scratch.iterdir()):
            path.chmod(0o644)
            path.replace(directory / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
