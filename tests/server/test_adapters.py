"""Adapters in the server: MODEL:ADAPTER in each dialect, many at once, and what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.hub.names import TINY_DIRECTORY
from localllm.models.block_layouts import block_layouts
from localllm.models.families import load_config
from tests.cli_support import run_cli
from tests.server.support import Json, Running, running

STORY = "Once upon a time there was a fox who"
NAMES = ("tiny", "tiny:fox", "tiny:owl", "tiny:fox:0.5", "tiny:latest:owl")


def write_adapter(folder: Path, seed: int, **changed: Any) -> Path:
    """A random adapter of the built-in model that changes its words."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layout in block_layouts(load_config(TINY_DIRECTORY))[1:-1]:
        for matrix in layout.matrices:
            for name, rows in matrix.parts.items():
                a = torch.randn(4, matrix.in_features, generator=generator) * 0.5
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.08
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "all-linear"} | changed
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("adapters")
    given = [write_adapter(folder / name, seed) for seed, name in enumerate(("fox", "owl", "broken", "other"))]
    weights = given[2] / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, weights)
    thin = {name: values[:, :3].contiguous() for name, values in load_file(given[3] / weights.name).items()}
    save_file(thin, given[3] / weights.name)
    with running(adapters=given) as server:
        yield server, folder


def asked(name: str, **more: Any) -> Json:
    return {"model": name, "prompt": STORY, "temperature": 0, "max_tokens": 12, **more}


def test_each_name_answers_as_itself_alone_and_beside_others(adapted: tuple[Running, Path]) -> None:
    server, _ = adapted
    alone = [server.answer("/v1/completions", asked(name)) for name in NAMES]
    texts = [reply["choices"][0]["text"] for reply in alone]
    assert len(set(texts)) == 4 and texts[2] == texts[4]
    assert [reply["model"] for reply in alone] == list(NAMES)
    with ThreadPoolExecutor(len(NAMES)) as pool:
        together = list(pool.map(lambda name: server.answer("/v1/completions", asked(name)), NAMES * 2))
    assert [reply["choices"][0]["text"] for reply in together] == texts * 2


def test_each_dialect_takes_the_name(adapted: tuple[Running, Path]) -> None:
    server, _ = adapted
    messages = [{"role": "user", "content": STORY}]
    chat = {"messages": messages, "temperature": 0, "max_tokens": 8}
    options = {"options": {"temperature": 0, "num_predict": 8}, "stream": False}

    def said(name: str) -> list[str]:
        openai = server.answer("/v1/chat/completions", {"model": name, **chat})["choices"][0]["message"]["content"]
        anthropic = server.answer("/v1/messages", {"model": name, **chat})["content"][0]["text"]
        ollama = server.answer("/api/chat", {"model": name, "messages": messages, **options})["message"]["content"]
        raw = server.answer("/api/generate", {"model": name, "prompt": STORY, **options})["response"]
        return [openai, anthropic, ollama, raw]

    plain, fox = said("tiny"), said("tiny:fox")
    assert plain[0] == plain[1] == plain[2] and fox[0] == fox[1] == fox[2]
    assert all(own != other for own, other in zip(fox, plain, strict=True))
    vectors = [server.answer("/v1/embeddings", {"model": name, "input": STORY}) for name in ("tiny", "tiny:fox")]
    assert vectors[0]["data"][0]["embedding"] != vectors[1]["data"][0]["embedding"]


def test_the_list_of_models_has_them_and_each_is_shown(adapted: tuple[Running, Path]) -> None:
    server, _ = adapted
    rows = server.get("/v1/models").json()["data"]
    assert [(row["id"], row["parent"]) for row in rows[:3]] == [
        ("tiny", None),
        ("tiny:fox", "tiny"),
        ("tiny:owl", "tiny"),
    ]
    for name in ("tiny:fox", "tiny:fox:0.5"):
        own = server.get(f"/v1/models/{name}").json()
        assert (own["id"], own["parent"]) == (name, "tiny")


def test_ollamas_programs_list_and_show_them(adapted: tuple[Running, Path]) -> None:
    server, folder = adapted
    rows = {row["name"]: row for row in server.get("/api/tags").json()["models"]}
    assert rows["tiny:fox"]["details"]["parent_model"] == "tiny"
    assert len({rows[name]["digest"] for name in ("tiny:latest", "tiny:fox", "tiny:owl")}) == 3
    for name, told in (("tiny:fox", "fox"), ("tiny:latest:fox:0.5", "fox:0.5")):
        shown = server.answer("/api/show", {"model": name})
        assert shown["details"]["parent_model"] == "tiny" and f"ADAPTER {told}\n" in shown["modelfile"]
        assert str(folder) not in json.dumps(shown)
    assert server.post("/api/show", {"model": "tiny:wolf"}).status_code == 404


def test_pages_are_found_by_the_same_adapter_alone(adapted: tuple[Running, Path]) -> None:
    server, _ = adapted
    prompt = " ".join(["The owl saw a lantern."] * 30)

    def cached(name: str) -> int:
        usage = server.answer("/v1/completions", asked(name, prompt=prompt))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("tiny", "tiny:fox", "tiny:fox:0.5")] == [0, 0, 0]
    assert min(cached(name) for name in ("tiny", "tiny:fox", "tiny:fox:0.5")) >= 64


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("tiny:wolf", 404, "it has fox, owl, broken, other"),
        ("tiny:latest:foxx", 404, "ask for 'tiny:latest:fox'"),
        ("wolf:fox", 404, "wolf:fox"),
        ("tiny:fox:1e9", 404, "a scale is a number from -100 to 100"),
        ("tiny:fox:x", 404, "a scale is a number"),
        ("tiny" + ":" * 4090, 404, "no adapter"),
        ("tiny:fox:" * 100_000, 404, "tiny:fox:tiny"),
        ("tiny:../fox", 404, "fox"),
        ("tiny:broken", 400, "finite"),
        ("tiny:other", 400, "do not fit"),
    ],
)
def test_a_name_without_an_adapter_and_a_wrong_adapter_are_refused(
    adapted: tuple[Running, Path], name: str, status: int, told: str
) -> None:
    server, folder = adapted
    for stream in (False, True):
        reply = server.post("/v1/completions", asked(name, stream=stream))
        assert reply.status_code == status, reply.text
        assert told in reply.json()["error"]["message"]
        assert str(folder) not in reply.text, "where it is, is not told"


def test_a_wrong_adapter_ends_a_server_that_is_started_with_it(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fox", 1)
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    ended = run_cli("serve", "tiny", "--port", "0", "--adapter", folder)
    assert ended.code == 1 and "adapter_model.safetensors" in ended.err


def test_two_adapters_of_one_name_are_refused_at_the_start(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_adapter(tmp_path / folder / "fox", 1)
    named = ("--adapter", tmp_path / "one" / "fox", "--adapter", f"{tmp_path / 'two' / 'fox'}:2")
    ended = run_cli("serve", "tiny", "--port", "0", *named)
    assert ended.code == 2 and "two adapters are called fox" in ended.err and "two/fox:2" in ended.err


def test_files_that_change_give_the_new_adapter_and_files_that_are_gone_an_error(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "fox", 1)
    with running(adapters=[folder]) as server:
        before = server.answer("/v1/completions", asked("tiny:fox"))["choices"][0]["text"]
        new = write_adapter(tmp_path / "new", 2)
        (new / "adapter_model.safetensors").replace(folder / "adapter_model.safetensors")
        assert server.answer("/v1/completions", asked("tiny:fox"))["choices"][0]["text"] != before
        (folder / "adapter_model.safetensors").unlink()
        assert server.post("/v1/completions", asked("tiny:fox")).status_code == 400
        assert server.answer("/v1/completions", asked("tiny"))["choices"]
