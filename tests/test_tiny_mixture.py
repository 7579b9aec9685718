"""The mixture that `tools/train_tiny.py` trains is the Mixtral that its checkpoint says."""

from __future__ import annotations

import importlib
import json
import re
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


def test_a_router_foresees_all_where_nothing_is_added_in_between_and_less_where_something_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    train_tiny, tiny_model = importlib.import_module("train_tiny"), importlib.import_module("tiny_model")
    config = tiny_model.TinyConfig(vocab_size=128, num_layers=3, num_experts=8, max_positions=64)
    model = tiny_model.TinyLM(config, seed=3)
    tokens = torch.randint(0, 128, (200,), generator=torch.Generator().manual_seed(5))

    def shares() -> list[float]:
        return [float(share) for share in re.findall(r"[01]\.\d+", train_tiny.foresight_report(model, tokens))]

    assert len(shares()) == 3 and max(shares()) < 1  # of the second and the third layer, and of the first guess
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                weight.zero_()
    assert shares() == [1.0, 1.0, 1.0]
