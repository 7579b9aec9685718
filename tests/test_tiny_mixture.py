"""The mixture that `tools/train_tiny.py` trains is the Mixtral that its checkpoint says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TOOLS = Path(__file__).parent.parent / "tools"


def test_a_checkpoint_of_the_trained_mixture_is_read_by_transformers_with_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(TOOLS))
    train_tiny, tiny_model = importlib.import_module("train_tiny"), importlib.import_module("tiny_model")
    config = tiny_model.TinyConfig(vocab_size=128, hidden_size=128, num_layers=2, num_experts=4, intermediate_size=64)
    model = tiny_model.TinyLM(config, seed=3)
    names = dict.fromkeys((train_tiny.END_OF_TEXT, train_tiny.IM_END), 0)
    (tmp_path / "config.json").write_text(json.dumps(train_tiny._config(model, names)))
    save_file({name: each.contiguous() for name, each in model.checkpoint().items()}, tmp_path / "model.safetensors")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(peer).__name__ == "MixtralForCausalLM"
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), peer(tokens).logits, atol=1e-5, rtol=1e-4)
