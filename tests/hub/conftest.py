"""A misbehaving hub, an empty cache, and the shipped registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.hub import HubSettings, pull
from localllm.registry import Registry, load_registry
from tests.fake_hub import FakeHub
from tests.hub.support import PIECE, QUICK, REPO, sharded_model, single_model


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return load_registry(tmp_path / "no-models.toml")


@pytest.fixture
def fake(fake: FakeHub) -> FakeHub:
    fake.reset({REPO: single_model(3 * PIECE), "maker/sharded": sharded_model(PIECE // 2)})
    return fake


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path) -> HubSettings:
    return HubSettings(tmp_path / "cache", fake.endpoint, token="hf_secret", retry=QUICK)


@pytest.fixture
def fetch(hub: HubSettings, registry: Registry) -> Callable[..., Path]:
    def fetch(name: str = REPO) -> Path:
        return pull(name, registry=registry, hub=hub).directory

    return fetch
