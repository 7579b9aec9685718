"""Every family, KV format and RoPE rolls back, over the ends of pages and windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.oracle import FixedCount
from localllm import Engine, Request, SamplingParams
from localllm.cache.prefix import PrefixCache
from localllm.engine import planner
from localllm.engine.prefix_config import IN_POOLS, NO_REUSE, KVReuse
from localllm.engine.speculative.choice import Speculate
from localllm.engine.speculative.drafter import ModelDrafter, SkipDrafter
from localllm.engine.speculative.speculator import Speculation, speculation
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.quant.recipe import RECIPES
from localllm.settings import EngineConfig
from tests.packed_support import small_checkpoint
from tests.speculative.support import Said, answers, draft_by_oracle, loaded, request, said, stats
from tests.thinning import thinned


def opened(folder: Path, weights: str, dtype: str, reuse: KVReuse = IN_POOLS) -> Engine:
    config = EngineConfig(device="cpu", weights=weights, dtype=dtype, speculate="off")
    return Engine.load(folder, config, reuse=reuse)


def drawn(num_prompt: int, max_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=max_tokens, ignore_eos=True)
    return Request(tuple(range(3, 3 + num_prompt)), sampling)


def check(engine: Engine, wish: Request, *drafts: tuple[int, float]) -> None:
    """drafts: how many at once, and the share of them that is right."""
    engine.speculation = Speculation(engine.residency, None, (), 0)
    (expected,) = said(engine, wish)
    for draft_tokens, alpha in drafts:
        draft_by_oracle(engine, wish, expected, alpha, draft_tokens)
        (events,) = answers(engine, [wish])
        assert Said.of(events) == expected and bool(stats(events).accepted) == bool(alpha)
        assert not engine.residency.kv_pages.sequences
    engine.speculation = speculation(Speculate("auto"), engine.residency, None)
    assert said(engine, wish) == [expected] and not engine.residency.kv_pages.sequences


@pytest.mark.parametrize("kv", thinned(["bf16", "int8", "k8v4", "int4"], "k8v4".__eq__))
def test_every_kv_format_rolls_back(kv: str) -> None:
    engine = loaded(kv=kv, ctx=512)
    long = request(engine, temperature=0, max_tokens=3 * PAGE_TOKENS)
    check(engine, long, (3, 0.5), (15, 0.9), (15, 0.0), (15, 1.0))
    check(engine, request(engine, "a " * 61, temperature=0, max_tokens=80), (4, 0.8))
    check(engine, request(engine, temperature=0.9, seed=3, max_tokens=80), (7, 0.9))
    engine.close()


@pytest.mark.parametrize(
    ("family", "weights"),
    thinned(
        [
            ("llama-mha-wide-heads", "fp32"),  # heads that no compiled kernel takes
            ("llama-dynamic-rope", "fp32"),
            ("phi3-longrope", "fp32"),
            ("llama-one-kv-head-odd-sizes", "fp32"),
            ("mistral-windowed", "fp32"),
            ("gemma2", "int4"),
            ("gemma3", "bf16"),
            ("qwen3", "bf16"),
            ("olmo2", "int8"),
            ("qwen3_5", "int4"),
            ("qwen3_next", "int8"),
            ("qwen3_5-odd", "fp32"),
            ("olmo_hybrid", "bf16"),
        ],
        lambda case: case[0] in {"llama-mha-wide-heads", "phi3-longrope", "mistral-windowed", "gemma3", "qwen3_5"},
    ),
)
def test_every_family_rolls_back(family: str, weights: str, tmp_path: Path) -> None:
    """Windows among them, whose pages are let go of while others are verified."""
    engine = opened(small_checkpoint(tmp_path / family, family), weights, "bf16" if weights == "bf16" else "fp32")
    check(engine, drawn(30, min(100, engine.ctx - 31)), (3, 0.8), (15, 0.95))
    engine.close()


@pytest.mark.parametrize("weights", thinned(RECIPES, {"bf12", "int4-g64"}.__contains__))
def test_every_weight_format_rolls_back(weights: str, tmp_path: Path) -> None:
    dtype = "fp32" if weights in ("fp32", "nf4") else "bf16"
    engine = opened(small_checkpoint(tmp_path / "llama", "llama"), weights, dtype)
    check(engine, drawn(30, 70), (6, 0.8))
    engine.close()


@pytest.mark.parametrize("num_prompt", thinned([30, 60, 63], (63).__eq__))
def test_a_window_of_whole_pages_gives_every_page_back(num_prompt: int, tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "windowed", "mistral-windowed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    engine = opened(folder, "int8", "fp32", NO_REUSE)
    check(engine, drawn(num_prompt, 120), (4, 0.6), (7, 0.9))
    engine.close()


@pytest.mark.parametrize("draft_tokens", [4, 15])
def test_drafts_of_a_hybrid_change_no_state_that_counts(draft_tokens: int, tmp_path: Path) -> None:
    """Drafted by itself without some blocks, and by a second model that keeps states of its own."""
    folder = small_checkpoint(tmp_path / "hybrid", "qwen3_5")
    skipped = frozenset({"layers.1.attention", "layers.2.mlp"})
    engine, second = (opened(folder, "int4", "bf16") for _ in range(2))
    wishes = [drawn(30, 110), drawn(140, 90)]
    expected = said(engine, *wishes)
    prefix = PrefixCache(bytes(32), second.residency.kv_pages, snapshot_ram_bytes=1 << 26)
    own = ModelDrafter("model", lambda: second.runner.without(skipped), second.residency.new_kv, prefix=prefix)
    for drafter in (SkipDrafter(lambda: engine.runner, lambda: skipped), own, own):
        engine.speculation = Speculation(engine.residency, None, [drafter], draft_tokens, FixedCount)
        heard = answers(engine, wishes)
        assert [Said.of(events) for events in heard] == expected
        assert any(stats(events).accepted for events in heard)
    assert prefix.counts.pool == 2 and not second.residency.kv_pages.sequences
    engine.close()
    second.close()


def test_a_model_of_several_states_a_token_leaves_no_layer_out(tmp_path: Path) -> None:
    engine = opened(small_checkpoint(tmp_path / "altup", "gemma3n"), "int4", "bf16")
    expected = said(engine, drawn(30, 20))
    drafter = SkipDrafter(lambda: engine.runner, lambda: frozenset({"layers.0.attention"}))
    assert not drafter.is_ready
    engine.speculation = Speculation(engine.residency, None, [drafter], 4, FixedCount)
    (heard,) = answers(engine, [drawn(30, 20)])
    assert [Said.of(heard)] == expected and not stats(heard).accepted
    engine.close()


def test_a_hybrid_that_drafts_finds_again_what_it_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "why_left_out", lambda *_: "")  # one as large as its model would not pay
    folder = small_checkpoint(tmp_path / "hybrid", "qwen3_5")
    config = EngineConfig(device="cpu", weights="int4", speculate=f"model:{folder}")
    engine, prompt = Engine.load(folder, config), drawn(140, 40)
    (drafter,) = engine.speculation._drafters
    assert isinstance(drafter, ModelDrafter) and drafter._prefix is not None
    engine.speculation = Speculation(engine.residency, None, [drafter], 4, FixedCount)
    for _ in range(2):
        said(engine, prompt)
    assert drafter._prefix.counts.pool == 2
    engine.close()
