"""The head that a checkpoint brings for it drafts what transformers' drafts, and changes no token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from benchmarks.oracle import FixedCount
from localllm import Engine, Request, SamplingParams
from localllm.engine import planner
from localllm.engine.speculative.head_drafter import HeadDrafter
from localllm.engine.speculative.speculator import Speculation
from localllm.errors import CheckpointError, UsageError
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint
from tests.speculative.support import Said, answers, said, stats
from tests.thinning import thinned


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of a quarter of its model is none that would pay."""
    monkeypatch.setattr(planner, "why_left_out", lambda *_: "")


QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3"]
DEEPSEEK = {"post_norm": "shared_head.norm"}


def write_with_head(folder: Path, family: str = "qwen3_5") -> MtpModel:
    """A checkpoint with a head of one layer, named as the family's makers do; returns transformers' own head."""
    is_qwen = family.startswith("qwen")
    peer = write_checkpoint(folder, family, **({} if is_qwen else {"num_nextn_predict_layers": 1}))
    text = peer.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    torch.manual_seed(5)
    head = MtpModel(peer, 1).eval()
    stored = load_file(folder / "model.safetensors")
    for name, values in head.layers[0].state_dict().items():
        noise = torch.randn_like(values)
        values.copy_(values + 0.3 * noise if "norm" in name else 0.1 * noise)
        part = name.split(".")[0]
        if is_qwen:
            is_block = part == "mtp_block"
            ours = f"mtp.layers.0.{name.removeprefix('mtp_block.')}" if is_block else f"mtp.{QWEN[part]}.weight"
        else:
            ours = f"model.layers.4.{name.removeprefix('mtp_block.').replace(part, DEEPSEEK.get(part, part))}"
        stored[ours] = values.contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return head


@torch.inference_mode()
def their_drafts(head: MtpModel, peer: Any, token_ids: list[int], count: int) -> list[int]:
    """The likeliest tokens behind these, each drafted behind the last: by all that came before."""
    decoder = peer.get_decoder()
    states = decoder(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state
    ids, drafts = token_ids[1:], []
    for _ in range(count):
        positions = torch.arange(1, len(ids) + 1)[None]
        made = head.forward_layer(0, states, positions, None, input_ids=torch.tensor([ids]))
        drafts.append(int(head._project_to_logits(made[:, -1]).argmax()))
        states, ids = torch.cat((states, made[:, -1:]), dim=1), [*ids, drafts[-1]]
    return drafts


def opened(folder: Path, speculate: str = "mtp", **others: Any) -> Engine:
    config = EngineConfig(device="cpu", speculate=speculate, **others)
    return Engine.load(folder, config)


def drafted_by(engine: Engine) -> HeadDrafter:
    (drafter,) = engine.speculation._drafters
    assert isinstance(drafter, HeadDrafter)
    return drafter


def always(engine: Engine, draft_tokens: int) -> None:
    drafter = drafted_by(engine)
    engine.speculation = Speculation(engine.residency, None, [drafter], draft_tokens, FixedCount)


def wish(num_prompt: int, max_tokens: int, **sampling: Any) -> Request:
    params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return Request(tuple(range(3, 3 + num_prompt)), SamplingParams(**params))


@pytest.mark.parametrize("family", thinned(FAMILIES, {"qwen3_5", "deepseek_v3"}.__contains__))
def test_it_drafts_what_transformers_drafts(family: str, tmp_path: Path) -> None:
    head = write_with_head(tmp_path, family)
    peer = write_checkpoint(tmp_path / "again", family)
    engine = opened(tmp_path, weights="fp32", dtype="fp32")
    drafter, seen = drafted_by(engine), list[tuple[list[int], tuple[int, ...]]]()
    propose = drafter.propose

    def watched(sequences: Any, *rest: Any) -> Any:
        drafts = propose(sequences, *rest)
        seen.append((list(sequences[0].token_ids), drafts[0].token_ids))
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    always(engine, 3)
    answers(engine, [wish(70, 24)])
    engine.close()
    drafts = [(ids, draft) for ids, draft in seen if draft]
    assert len(drafts) > 4 and max(len(draft) for _, draft in drafts) == 3
    for token_ids, draft in drafts:
        assert list(draft) == their_drafts(head, peer, token_ids, len(draft))


@pytest.mark.parametrize("family", thinned(FAMILIES, "qwen3_5_moe".__eq__))
@pytest.mark.parametrize("draft_tokens", [2, 15])
def test_the_text_is_that_of_plain_decoding(family: str, draft_tokens: int, tmp_path: Path) -> None:
    write_with_head(tmp_path, family)
    engine = opened(tmp_path, weights="int4", dtype="bf16")
    drafter, wishes = drafted_by(engine), [wish(30, 90), wish(130, 70, temperature=0.9, seed=4), wish(64, 70)]
    engine.speculation = Speculation(engine.residency, None, (), 0)
    expected = said(engine, *wishes)
    for _ in range(2):  # the second time what the prompts begin with is known, and no state of it is heard
        engine.speculation = Speculation(engine.residency, None, [drafter], draft_tokens, FixedCount)
        heard = answers(engine, wishes)
        assert [Said.of(events) for events in heard] == expected
        assert any(stats(events).drafted for events in heard)
    assert not drafter._readings and not engine.residency.kv_pages.sequences
    engine.close()


def test_a_model_without_a_head_says_so_where_it_is_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "stripped", "qwen3_5")
    write_checkpoint(tmp_path / "llama", "llama")
    for folder, why in (("stripped", "mtp.fc.weight"), ("llama", "brings no head")):
        with pytest.raises(UsageError, match="nobody can draft") as refused:
            opened(tmp_path / folder)
        assert why in refused.value.why
        opened(tmp_path / folder, "auto").close()


def test_a_torn_head_is_named_where_it_is_asked_for(tmp_path: Path) -> None:
    write_with_head(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["mtp.layers.0.self_attn.k_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape("mtp.layers.0.self_attn.k_proj")):
        opened(tmp_path)
    engine = opened(tmp_path, "auto")  # the model is whole, and a new copy need not have a whole head
    assert not any(isinstance(drafter, HeadDrafter) for drafter in engine.speculation._drafters)
    engine.close()
