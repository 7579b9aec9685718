"""A misbehaving hub, and an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.hub import HubSettings, pull
from tests.fake_hub import FakeHub, serve
from tests.hub.support import PIECE, QUICK, REPO, sharded_model, single_model, use


@pytest.fixture(scope="module")
def servers() -> Iterator[FakeHub]:
    from huggingface_hub import close_session

    with serve() as fake:
        yield fake
    close_session()


@pytest.fixture
def fake(servers: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    servers.reset({REPO: single_model(3 * PIECE), "maker/sharded": sharded_model(PIECE // 2)})
    return servers


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return use(HubSettings(tmp_path / "cache", fake.endpoint, retry=QUICK), monkeypatch)


@pytest.fixture
def fetch(hub: HubSettings) -> Callable[..., Path]:
    def fetch(name: str = REPO) -> Path:
        return pull(name).directory

    return fetch
