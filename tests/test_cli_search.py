"""`localllm search`: short names, and a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localllm.config import ResolvedSettings
from localllm.registry import BUILT_IN
from localllm.runtime.model_catalog import model_rows
from localllm.runtime.model_choice import best_of, model_choices
from tests.cli_support import run_cli
from tests.fake_hub import FakeHub, Fault, serve


def listed(repo: str, **facts: Any) -> dict[str, Any]:
    return {"id": repo, "downloads": 1200, "gated": False, "tags": ["safetensors", "license:mit"], **facts}


MODELS = [
    listed("maker/fox-8b", config={"model_type": "qwen3"}, safetensors={"total": 8_190_000_000}, downloads=3_400_000),
    listed("maker/fox-8b-gguf", gguf={"architecture": "llama", "total": 8_000_000_000}, tags=["gguf"]),
    listed("maker/fox-bloom", config={"model_type": "bloom"}, safetensors={"total": 1}, gated="manual"),
    listed("maker/fox-lora", tags=["safetensors", "base_model:adapter:maker/fox-8b"], config={"model_type": "qwen3"}),
    listed("maker/fox-pickle", tags=["base_model:adapter:maker/fox-8b"]),
    listed("maker/fox-pictures", tags=["diffusers"]),
    listed("maker/fox-old", config={"model_type": "llama"}, tags=["pytorch"]),
    {"id": "../../etc/fox", "downloads": "many"},
    {"id": "maker/fox-odd", "downloads": "many", "tags": "none", "config": [], "gguf": {"total": "x"}},
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve() as hub:
        hub.found = MODELS
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        yield hub


def test_a_search_tells_of_each_model_of_the_hub_whether_it_runs_here(hub: FakeHub) -> None:
    result = run_cli("search", "fox", "8b")
    title, first, second = (line.split() for line in result.out.decode().splitlines())
    assert title == ["ON", "THE", "HUB", "PARAMETERS", "PULLS", "LICENCE", "RUNS", "HERE"]
    assert first == ["maker/fox-8b", "8.19B", "3.4M", "mit", "qwen3"]
    assert second == ["maker/fox-8b-gguf", "8B", "1.2k", "GGUF"]
    assert "localllm pull ORG/REPOSITORY" in result.err
    why_not = {model["repo"]: model["why_not"] for model in run_cli("search", "fox", "--json").json["hub"]}
    assert why_not == {
        "maker/fox-8b": "",
        "maker/fox-8b-gguf": "",
        "maker/fox-bloom": "bloom is not supported",
        "maker/fox-lora": "",
        "maker/fox-pickle": "no safetensors",
        "maker/fox-pictures": "no language model",
        "maker/fox-old": "no safetensors",
        "maker/fox-odd": "",
    }


def test_of_an_adapter_a_search_tells_the_model_that_it_is_for(hub: FakeHub) -> None:
    result = run_cli("search", "fox", "lora")
    assert result.out.decode().splitlines()[1].split()[-2:] == ["with", "maker/fox-8b"]
    assert "localllm run MODEL --adapter ORG/REPOSITORY" in result.err
    [found] = run_cli("search", "fox", "lora", "--json").json["hub"]
    assert (found["adapter_of"], found["why_not"]) == ("maker/fox-8b", "")
    assert "--adapter" not in run_cli("search", "fox", "8b").err


def test_models_with_a_short_name_come_first_found_by_their_aliases_too(hub: FakeHub) -> None:
    result = run_cli("search", "qwen3:8B")
    assert (result.code, "qwen3-8b" in result.out.decode()) == (0, True)
    assert "the hub has no model with 'qwen3:8B' in its name" in result.err
    assert "qwen3-8b" in [row["name"] for row in run_cli("search", "Qwen/", "8b", "--json").json["known"]]


def test_offline_the_hub_is_not_asked_and_this_is_said(hub: FakeHub) -> None:
    result = run_cli("search", "gpt-oss", "--offline")
    assert (result.code, "gpt-oss-20b" in result.out.decode(), hub.requests) == (0, True, [])
    assert "the hub was not asked: offline (--offline)" in result.err
    assert run_cli("search", "gpt-oss", "--offline", "--json").json["hub"] is None


def test_a_hub_that_answers_something_else_is_an_error_with_the_command_to_try_again(hub: FakeHub) -> None:
    hub.listing_faults.extend([Fault("status", 418)])
    result = run_cli("search", "fox")
    assert result.code == 6 and "localllm search fox" in result.err and "localllm search fox --offline" in result.err
    hub.requires_token = "hf_right"
    refused = run_cli("search", "fox")
    assert (refused.code, "the hub refused the search" in refused.err) == (6, True) and "answered 401" in refused.err


def test_the_number_of_parameters_is_written_without_powers_of_ten(hub: FakeHub) -> None:
    hub.found = [
        listed("maker/fox-k2", config={"model_type": "qwen3"}, safetensors={"total": 1_030_000_000_000}),
        listed("maker/fox-nano", config={"model_type": "qwen3"}, safetensors={"total": 65_000}, gated=True, tags=[]),
    ]
    _, largest, smallest = (line.split() for line in run_cli("search", "fox").out.decode().splitlines())
    assert (largest[1], smallest[1]) == ("1030B", "0.065M")


def test_the_built_in_model_is_none_to_try_first() -> None:
    alone = [row for row in model_rows(has_available=True) if row.name == BUILT_IN]
    choices = model_choices(alone, ResolvedSettings(), lambda _: None)
    assert choices[0].is_comfortable and best_of(choices) is None
