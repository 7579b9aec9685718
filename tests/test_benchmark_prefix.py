"""`python -m benchmarks.prefix` measures what it says, on a model of seven million parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import prefix
from localllm.cache.kv_format import KV_FORMATS


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, dict[str, float]]:
    line = ["prefix", "--shape", "tiny", "--rounds", "1", "--save", str(folder), *arguments]
    monkeypatch.setattr(sys, "argv", line)
    prefix.main()
    part: dict[str, dict[str, float]] = json.loads((folder / "prefix.json").read_text("utf-8"))[arguments[1]]
    return part


def test_what_is_reused_is_reused_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, tmp_path, "--part", "reuse", "--shared-tokens", "256")
    assert result["edited_cached_tokens"]["median"] == 256
    assert result["next_turn_cached_tokens"]["median"] == result["restarted_cached_tokens"]["median"] == 320
    assert result["load_gbs"]["median"] > 0 and result["disk_gbs"]["median"] > 0


def test_every_format_is_decoded_at_every_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, tmp_path, "--part", "decode", "--depth", "20", "--depth", "200")
    for kv in KV_FORMATS:
        assert result[f"{kv} behind 20"]["median"] > 0 and result[f"{kv} behind 200"]["median"] > 0
        assert result[f"{kv} of bf16"]["min"] > 0
