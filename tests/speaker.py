"""A checkpoint that always says the same: the programs around a model need none that knows anything.

After each token of what it says comes the next, and after any other the first: a table in the weights of the head, over
blocks that add nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import zeros

from tests.cli_support import TEMPLATE, write_checkpoint

EOS = "<|eos|>"
THINKS = ("<think>", "\n", "Hm, an owl.", "</think>", "\n\n", "Once upon a time.")
# Templates of thinking models: one that has a switch, as Qwen3; one that opens the thought, as DeepSeek-R1; one that
# has levels; and one that leaves in what was thought before earlier answers, as SmolLM3.
KEEPING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
OPENING = KEEPING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
SWITCHED = OPENING.replace(
    "<think>\n", "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
EFFORT = "{% if reasoning_effort is defined %}<|system|>Reasoning: {{ reasoning_effort }}<|eos|>{% endif %}" + SWITCHED


def write_speaker(directory: Path, says: Sequence[str], template: str = TEMPLATE, *, ends: bool = True) -> Path:
    """says: texts of one token each, all different. ends: an end-of-sequence token comes behind them."""
    write_checkpoint(directory, hidden=384)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in says])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = [tokenizer.token_to_id(text) for text in (*says, *([EOS] if ends else []))]
    size = tokenizer.get_vocab_size()
    _say(directory / "model.safetensors", ids, size)
    roles = {"bos_token": "<|bos|>", "eos_token": EOS, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))
    path = directory / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "vocab_size": size, "eos_token_id": ids[-1] if ends else None})
    )
    return directory


def _say(path: Path, ids: Sequence[int], size: int) -> None:
    tensors = load_file(path)
    hidden = tensors["model.norm.weight"].shape[0]
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    embed, head = (zeros(size, hidden, dtype=tensors["lm_head.weight"].dtype) for _ in range(2))
    for token_id in range(size):
        embed[token_id, token_id] = 1.0
    follower = dict(pairwise(ids))
    for token_id in range(size):
        head[follower.get(token_id, ids[0]), token_id] = 10.0
    save_file({**tensors, "model.embed_tokens.weight": embed, "lm_head.weight": head}, path)
