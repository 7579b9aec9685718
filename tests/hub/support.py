"""What the tests of the hub share: models to fetch, and what a good end looks like."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.hub import HubSettings, RetryPolicy, removal
from localllm.hub.repo_cache import RepoCache
from tests.fake_hub import COMMIT, FakeHub, sha256

REPOSITORY = Path(__file__).parent.parent.parent
REPO = "maker/model"
PIECE = 256 << 10
LEAST = ("config.json", "tokenizer.json", "model.safetensors")  # that a listing must have
QUICK = RetryPolicy(attempts=4, listing_attempts=3, base_s=0.01, longest_s=0.02, connect_s=2, stall_s=0.4)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
UNWANTED = ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "modeling.py", "a.gguf")


def small_files() -> dict[str, bytes]:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 512}
    return {
        "config.json": json.dumps(config).encode(),
        "generation_config.json": b'{"temperature": 0.5}',
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b"{}",
        "README.md": b"# A model\n",
    }


def single_model(size_bytes: int) -> dict[str, bytes]:
    weights = random.Random(7).randbytes(size_bytes)
    return {**dict.fromkeys(UNWANTED, b"no"), **small_files(), "model.safetensors": weights}


def sharded_model(size_bytes: int) -> dict[str, bytes]:
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}}
    weights = {name: random.Random(name).randbytes(size_bytes) for name in SHARDS}
    files = {**small_files(), "model.safetensors.index.json": json.dumps(index).encode(), **weights}
    return {**dict.fromkeys(UNWANTED, b"no"), **files, "model.safetensors": b"a second copy"}


def assert_whole(directory: Path, files: dict[str, bytes]) -> None:
    """Every file that a pull wants is there, byte for byte, and no other."""
    unwanted = {*UNWANTED, *(["model.safetensors"] if SHARDS[0] in files else [])}
    held = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert held == {name: data for name, data in files.items() if name not in unwanted}


def remove(name: str, **more: Any) -> int:
    return removal(name, **more).delete()


def leftovers(hub: HubSettings) -> list[str]:
    return [path.name for path in hub.cache_dir.rglob("*") if path.name.endswith((".incomplete", ".tmp"))]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def use(hub: HubSettings, monkeypatch: pytest.MonkeyPatch) -> HubSettings:
    """Have everything that looks for a model look there, and nowhere else."""
    for variable in ("HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.setenv(variable, str(hub.cache_dir.parent / "no-home"))
    monkeypatch.setattr(HubSettings, "from_environment", lambda offline=False: replace(hub, offline=offline))
    return hub


PULL_SCRIPT = f"from localllm.hub import pull; print(pull({REPO!r}).directory)"


def partial_path(hub: HubSettings, fake: FakeHub) -> Path:
    digest = sha256(fake.repositories[REPO]["model.safetensors"])
    return RepoCache(hub.cache_dir, REPO).blobs / f"{digest}.localllm.incomplete"


def start_pull(hub: HubSettings) -> subprocess.Popen[bytes]:
    places = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_CACHE": str(hub.cache_dir), "HF_ENDPOINT": hub.endpoint}
    command = [sys.executable, "-c", PULL_SCRIPT]
    return subprocess.Popen(command, env={**os.environ, **places}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def make_folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def other_tools_snapshot(hub: HubSettings, *absent: str) -> Path:
    """maker/sharded as another tool lays it out, without a list of ours and without the files in `absent`."""
    cache = RepoCache(hub.cache_dir, "maker/sharded")
    snapshot = cache.snapshot(COMMIT)
    snapshot.mkdir(parents=True)
    cache.blobs.mkdir()
    for name, data in sharded_model(1000).items():
        if name not in absent and name not in UNWANTED and name != "model.safetensors":
            (cache.blobs / sha256(data)).write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/{sha256(data)}")
    (cache.folder / "refs").mkdir()
    (cache.folder / "refs" / "main").write_text(COMMIT)
    return snapshot
