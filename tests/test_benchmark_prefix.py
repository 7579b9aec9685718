"""`python -m benchmarks.prefix` measures what it says, on a model of seven million parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import prefix


def test_what_is_reused_is_reused_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["prefix", "--model", "tiny", "--rounds", "1", "--save", str(tmp_path), "--shared-tokens", "256"]
    monkeypatch.setattr(sys, "argv", arguments)
    prefix.main()
    result = json.loads((tmp_path / "prefix-tiny.json").read_text("utf-8"))["reuse"]
    assert result["edited_cached_tokens"]["median"] == 256
    assert result["next_turn_cached_tokens"]["median"] == result["restarted_cached_tokens"]["median"] == 320
    assert result["load_gbs"]["median"] > 0 and result["disk_gbs"]["median"] > 0
