"""A misbehaving hub, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.hub import HubSettings, pull
from tests.fake_hub import FakeHub
from tests.hub.support import PIECE, QUICK, REPO, sharded_model, single_model, use


@pytest.fixture
def fake(fake: FakeHub) -> FakeHub:
    fake.reset({REPO: single_model(3 * PIECE), "maker/sharded": sharded_model(PIECE // 2)})
    return fake


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return use(HubSettings(tmp_path / "cache", fake.endpoint, retry=QUICK), monkeypatch)


@pytest.fixture
def fetch(hub: HubSettings) -> Callable[..., Path]:
    def fetch(name: str = REPO) -> Path:
        return pull(name).directory

    return fetch
