"""`localllm adapters`, and what other commands do with the name of an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapter_support import BASE, peft_files, write_gguf_lora, write_peft
from tests.cli_support import Result, run_cli
from tests.fake_hub import COMMIT, FakeHub
from tests.hub.support import single_model

REPO = "maker/Fox-LoRA"


@pytest.fixture(autouse=True)
def hub(fake: FakeHub, own_folders: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake.reset({REPO: peft_files(), "maker/old": peft_files(None), "maker/model": single_model(1000)})
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", fake.endpoint)
    return fake


def lines(result: Result) -> list[list[str]]:
    return [line.split() for line in result.out.decode().splitlines()]


def test_where_no_adapter_is_a_list_says_how_to_get_one() -> None:
    result = run_cli("adapters")
    assert (result.code, result.out) == (0, b"") and "localllm pull ORG/REPOSITORY" in result.err
    assert run_cli("adapters", "--json").json == {"schema_version": 1, "adapters": []}


def test_a_pulled_adapter_tells_how_it_is_used_is_listed_and_removed() -> None:
    pulled = run_cli("pull", REPO)
    assert pulled.code == 0 and lines(pulled)[-1][0] == "fox-lora:"
    assert '`localllm run qwen3-8b --adapter fox-lora "..."` uses it' in pulled.err
    title, row = lines(run_cli("adapters"))
    assert title == ["NAME", "FOR", "RANK", "SIZE", "FROM"]
    assert (row[:3], row[-1]) == (["fox-lora", BASE, "8"], REPO)
    [found] = run_cli("adapters", "--json").json["adapters"]
    assert {**found, "path": Path(found["path"]).name} == {
        "name": "fox-lora", "base": BASE, "rank": 8, "size_bytes": found["size_bytes"], "repo": REPO,
        "revision": COMMIT, "path": COMMIT,
    }  # fmt: skip
    listed = run_cli("list")
    assert "fox" not in listed.out.decode() and "adapters: fox-lora; `localllm adapters` shows" in listed.err
    removed = run_cli("rm", "fox-lora", "--yes", "--json")
    assert removed.json["freed_bytes"] >= found["size_bytes"]
    assert run_cli("adapters", "--json").json["adapters"] == []


def test_pull_fetches_the_adapters_that_a_command_names_and_no_other_name() -> None:
    assert run_cli("run", "-p", "Once", "--adapter", REPO).err.count(f"localllm pull {REPO}") == 1
    run_cli("run", "-p", "Once", "--adapter", f"{REPO}:0.5", "--pull", "--max-tokens", "1")  # its weights are noise
    assert [each["name"] for each in run_cli("adapters", "--json").json["adapters"]] == ["fox-lora"]
    refused = run_cli("run", "-p", "Once", "--adapter", "owl", "--pull")
    assert refused.code == 1 and "the adapter owl is not on this disk" in refused.err


def test_a_pull_in_json_has_what_the_list_has() -> None:
    pulled = run_cli("pull", REPO, "--json").json
    [listed] = run_cli("adapters", "--json").json["adapters"]
    assert pulled == {"schema_version": 1, "adapter": listed.pop("name"), **listed}


def test_an_adapter_that_names_no_model_is_used_with_one_that_the_user_knows() -> None:
    assert '`localllm run BASE --adapter old "..."`' in run_cli("pull", "maker/old").err


def test_one_that_cannot_be_used_is_marked_and_never_recommended(hub: FakeHub) -> None:
    hub.repositories["maker/dora"] = peft_files(use_dora=True)
    assert "dora cannot be used" in run_cli("pull", "maker/dora").err
    run_cli("pull", REPO)
    result = run_cli("adapters")
    assert ["dora", "cannot", "be", "used", "-"] in [row[:5] for row in lines(result)]
    assert "uses fox-lora" in result.err
    run_cli("rm", "fox-lora", "--yes")
    assert "uses" not in run_cli("adapters").err


def test_a_list_may_be_of_one_model_alone() -> None:
    run_cli("pull", REPO)
    run_cli("pull", "maker/old")
    assert [row[0] for row in lines(run_cli("adapters"))[1:]] == ["fox-lora", "old"]
    for base in ("qwen3-8b", f"{BASE}-GGUF:Q4_K_M"):
        result = run_cli("adapters", base)
        assert [row[0] for row in lines(result)[1:]] == ["fox-lora"]
        assert f"localllm run {base} --adapter fox-lora" in result.err
    other = run_cli("adapters", "qwen3-4b")
    assert other.out == b"" and "none of the 2 adapters here says that it is for qwen3-4b" in other.err
    assert run_cli("adapters", "qwen3-b8").code == 3


def test_in_a_models_place_an_adapter_is_refused_with_the_line_to_type() -> None:
    run_cli("pull", REPO)
    refused = run_cli("run", REPO, "-p", "Once upon", "--seed", "1")
    assert refused.code == 3 and f"{REPO} is an adapter, not a model" in refused.err
    assert f"fix:   localllm run qwen3-8b -p 'Once upon' --seed 1 --adapter {REPO}" in refused.err
    assert f"fix:   localllm chat qwen3-8b --plain --adapter {REPO}" in run_cli("chat", REPO, "--plain").err
    assert f"fix:   localllm run qwen3-8b --adapter {REPO}" in run_cli("show", REPO).err


def test_a_base_that_is_called_by_a_short_name_stands_in_the_fix(tmp_path: Path) -> None:
    own = write_peft(tmp_path / "own", base="tiny")
    assert f"fix:   localllm run tiny -p hi --adapter {own}" in run_cli("run", own, "-p", "hi").err


@pytest.mark.parametrize("name", ["mine", "./mine", "mine.gguf"])
def test_so_is_a_folder_and_a_file_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_peft(tmp_path / "mine")
    write_gguf_lora(tmp_path / "mine.gguf")
    monkeypatch.chdir(tmp_path)
    assert f"fix:   localllm run qwen3-8b -p hi --adapter {name}" in run_cli("run", name, "-p", "hi").err


def test_an_adapter_behind_the_models_name_is_named_by_its_flag() -> None:
    run_cli("pull", REPO)
    for scale in ("", ":0.5"):
        refused = run_cli("run", f"tiny:fox-lora{scale}", "-p", "hi", "--seed", "1")
        assert f"fox-lora{scale} is an adapter, and is named beside the model" in refused.err
        assert f"fix:   localllm run tiny -p hi --seed 1 --adapter fox-lora{scale}\n" in refused.err
    assert "--adapter" not in run_cli("run", "tiny:wolf", "-p", "hi").err


def test_an_adapter_that_is_not_here_is_not_pulled_in_a_models_place(hub: FakeHub) -> None:
    refused = run_cli("run", REPO, "-p", "hi", "--pull")
    assert refused.code == 3 and f"fix:   localllm pull {REPO}" in refused.err
    assert f"localllm run BASE -p hi --pull --adapter {REPO}" in refused.err
    assert hub.file_requests("adapter_model.safetensors") == []


def test_a_pickle_is_refused_with_what_converts_it(hub: FakeHub) -> None:
    del hub.repositories[REPO]["adapter_model.safetensors"]
    refused = run_cli("pull", REPO)
    assert refused.code == 1 and "save_pretrained" in refused.err and "localllm help adapter" in refused.err


def test_a_model_is_still_pulled_as_one() -> None:
    assert run_cli("pull", "maker/model", "--json").json["model"] == "maker/model"


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_the_short_help_has_the_flag_for_adapters(command: str) -> None:
    assert "--adapter NAME" in run_cli(command, "--help").out.decode()


def test_an_empty_adapter_is_refused_in_plain_words() -> None:
    refused = run_cli("run", "tiny", "-p", "hi", "--adapter", "")
    assert refused.code == 2
    assert refused.err.splitlines()[:3] == [
        "error: --adapter is empty",
        "why:   it must be a text that is not empty",
        "fix:   leave --adapter out, or give it a text",
    ]


def test_a_wrong_scale_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    own = write_peft(tmp_path / "own")
    refused = run_cli("run", "tiny", "-p", "hi", "--adapter", f"{own}:1,5")
    assert refused.code == 2 and f"fix:   localllm run tiny -p hi --adapter {own}:1.5" in refused.err


def test_the_setting_names_an_adapter_of_the_users_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_peft(tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli("config", "set", "adapter", "./own:3", "~/own", "fox-lora").code == 0
    assert run_cli("config", "get", "adapter").out.decode() == f"'{own}:3', '{own}', 'fox-lora'\n"
    refused = run_cli("config", "set", "adapter", "./none")
    assert refused.code == 1 and "there is no adapter" in refused.err
