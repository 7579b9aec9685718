"""The registry: what models.toml may say, whose word counts, and that the shipped one is sound."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from localllm.config import load_settings
from localllm.errors import CheckpointError, SettingsError
from localllm.registry import (
    FAMILIES,
    REPO_ID,
    REVISION,
    Registry,
    load_registry,
    shipped_registry,
    with_model_defaults,
)

NEW = '[[model]]\nname = "mine"\nrepo = "me/mine"\n'


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    return tmp_path / "models.toml"


def load(user_file: Path, text: str) -> Registry:
    user_file.write_text(text)
    return load_registry(user_file)


def refusal(user_file: Path, text: str) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(user_file, text)
    return caught.value


SHIPPED = load_registry(Path("/nowhere/models.toml")).entries


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_a_shipped_model_says_all_that_is_needed(entry):
    assert entry.licence != "unknown"
    assert entry.context and entry.context >= 1024
    if entry.name == "tiny":
        assert entry.repo is None
    else:
        assert entry.repo and REPO_ID.fullmatch(entry.repo)
        assert REVISION.fullmatch(entry.revision)
        assert entry.parameters and 0.1 < entry.parameters < 130
        assert entry.aliases


# What a client of Ollama asks for by a bare name and by a tag.
OF_OLLAMA = {
    "qwen3.5": "qwen3.5-9b", "qwen3.5:latest": "qwen3.5-9b", "qwen3.5:35b": "qwen3.5-35b-a3b",
    "qwen3.8:27b": "qwen3.8-27b", "qwen3": "qwen3-8b", "qwen3:30b": "qwen3-30b-a3b", "qwen3-coder": "qwen3-coder-30b",
    "qwen3-vl": "qwen3-vl-8b", "qwen2.5vl": "qwen2.5-vl-7b", "qwen2.5-coder:32b": "qwen2.5-coder-32b",
    "gemma4": "gemma-4-e4b", "gemma4:26b": "gemma-4-26b-a4b", "gemma4:12b": "gemma-4-12b", "gemma3": "gemma-3-4b",
    "gemma3:27b": "gemma-3-27b", "gemma3n": "gemma-3n-e4b", "gpt-oss": "gpt-oss-20b", "gpt-oss:120b": "gpt-oss-120b",
    "llama3.1": "llama-3.1-8b", "llama3.2": "llama-3.2-3b", "LLAMA3.2:1B": "llama-3.2-1b", "llama3.3": "llama-3.3-70b",
    "deepseek-r1": "deepseek-r1-8b", "deepseek-r1:1.5b": "deepseek-r1-qwen-1.5b",
    "deepseek-r1:14b": "deepseek-r1-qwen-14b", "ministral-3": "ministral-3-8b", "ministral-3:14b": "ministral-3-14b",
    "mistral-small3.2": "mistral-small-3.2-24b", "devstral-small-2": "devstral-small-2-24b", "mistral": "mistral-7b",
    "phi4": "phi-4", "phi4-mini": "phi-4-mini", "smollm2": "smollm2-1.7b", "olmo-3": "olmo-3-7b",
    "granite3.3": "granite-3.3-8b", "glm4": "glm-4-9b-chat", "mixtral": "mixtral-8x7b",
}  # fmt: skip


@pytest.mark.parametrize(("asked", "meant"), OF_OLLAMA.items(), ids=list(OF_OLLAMA))
def test_a_name_of_ollama_means_the_size_that_it_means_there(user_file, asked, meant):
    entry = load_registry(user_file).find(asked)
    assert entry is not None and entry.name == meant


def test_no_short_name_or_alias_of_the_shipped_registry_stands_for_two_models():
    names = [name.casefold() for entry in SHIPPED for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    repos = [entry.repo for entry in SHIPPED]
    assert len(repos) == len(set(repos))


def test_the_shipped_registry_is_found_beside_the_package_or_in_it():
    assert shipped_registry().name == "models.toml"
    assert shipped_registry().is_file()


@pytest.mark.parametrize("file", sorted(set(FAMILIES.values())))
def test_each_family_of_the_registry_is_a_file_that_reads_a_config(file):
    assert callable(importlib.import_module(f"localllm.models.families.{file}").parse)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "LLAMA-3.1-8B", "llama3.1", "Llama3.1:8B"])
def test_a_model_is_found_by_name_and_alias_in_any_case(user_file, name):
    entry = load_registry(user_file).find(name)
    assert entry is not None
    assert entry.repo == "meta-llama/Llama-3.1-8B-Instruct"
    assert entry.gated


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mistrall-7b", "mistral-7b"),
        ("qwen3-8", "qwen3-8b"),
        ("gemma2-8b", "gemma-2-9b"),
        ("tinylama", "tinyllama-1.1b"),
        ("qwen3.5:9", "qwen3.5-9b"),
        ("gemma-4", "gemma-4-e4b"),
        ("lama3", "llama-3.2-3b"),
        ("gptoss", "gpt-oss-20b"),
        ("llama3.1:8b-instruct-q4_0", "llama-3.1-8b"),
    ],
)
def test_a_misspelled_name_has_a_nearest(user_file, typed, meant):
    registry = load_registry(user_file)
    assert registry.find(typed) is None
    assert meant in registry.nearest(typed)


def test_a_name_like_no_other_has_no_nearest(user_file):
    assert load_registry(user_file).nearest("zzzzzz") == ()


def test_a_users_model_is_added(user_file):
    entry = load(user_file, NEW + 'aliases = ["m"]\nrevision = "v1.0"\ngated = true\nstop = ["###"]\n').find("M")
    assert entry is not None
    assert (entry.name, entry.repo, entry.revision, entry.gated, entry.stop) == (
        "mine",
        "me/mine",
        "v1.0",
        True,
        ("###",),
    )


def test_a_users_entry_overrides_single_keys_of_a_shipped_one(user_file):
    text = '[[model]]\nname = "QWEN3-8B"\nrevision = "abc123"\nsampling = { temperature = 0.1 }\n'
    entry = load(user_file, text).find("qwen3")
    assert entry is not None
    assert (entry.repo, entry.revision) == ("Qwen/Qwen3-8B", "abc123")
    assert entry.sampling == {"temperature": 0.1, "top_k": 20, "top_p": 0.95}
    assert entry.origins["temperature"].where == str(user_file)
    assert entry.origins["top_k"].where == str(shipped_registry())


def test_a_users_alias_beats_a_shipped_one(user_file):
    entry = load(user_file, NEW + 'aliases = ["mistral"]\n').find("mistral")
    assert entry is not None
    assert entry.name == "mine"


@pytest.mark.parametrize(
    ("text", "line", "nearest"),
    [
        (NEW + "gatted = true\n", 4, "gated"),
        (NEW + "\n[model.sampling]\ntemprature = 1\n", 6, "temperature"),
        (NEW + NEW.replace("mine", "other") + "lisence = 'x'\n", 7, "licence"),
        ("# mine\n[[models]]\nname = 'x'\n", 2, "model"),
    ],
)
def test_an_unknown_key_names_file_line_and_the_nearest(user_file, text, line, nearest):
    error = refusal(user_file, text)
    assert f"{user_file}:{line}" in error.what
    assert nearest in error.why
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        "repo = 'no-slash'",
        "repo = '../x/y'",
        "repo = 'a/b/c'",
        "repo = 'a/..'",
        "repo = 'a/b%2fc'",
        "repo = 'a--b/c'",
        "revision = '../../x'",
        "revision = '/x'",
        "revision = 'a b'",
        "gated = 'yes'",
        "context = 0",
        "context = '8k'",
        "parameters = -1",
        "aliases = 'x'",
        "aliases = ['']",
        "sampling = 1",
        "sampling = { temperature = 'hot' }",
        "sampling = { top_p = 2 }",
        "name = ''",
    ],
)
def test_a_wrong_value_names_its_line(user_file, line):
    lines = [given for given in NEW.strip().split("\n") if given.split(" = ")[0] != line.split(" = ")[0]]
    error = refusal(user_file, "\n".join([*lines, line]) + "\n")
    assert f"{user_file}:{len(lines) + 1}" in error.what
    assert line.split(" = ")[0] in error.what or "temperature" in error.what or "top_p" in error.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[model]]\nrepo = 'a/b'\n", "no name"),
        ("[[model]]\nname = 'x'\n", "no repo"),
        ("[[model]]\nname = 'tiny'\nrepo = 'a/b'\n", "'tiny' has a repository"),
        (NEW + NEW, "'mine' names two models"),
        (NEW + NEW.replace("mine", "other") + "aliases = ['MINE']\n", "'mine' names two models"),
        ("model = 1\n", "not a list"),
        ("[model]\nname = 'x'\n", "not a list"),
        ("[[model]\n", "not TOML"),
    ],
)
def test_an_entry_that_makes_no_sense_is_one_clear_error(user_file, text, says):
    assert says in refusal(user_file, text).what


# Sampling defaults: flag, variable, config.toml, user models.toml, shipped models.toml, generation_config.json


def resolve(user_file: Path, generation: dict[str, object], flags: dict[str, object], text: str = "") -> object:
    entry = load(user_file, text).find("qwen3-8b")
    resolved = load_settings(flags, environ={}, config_file=user_file.parent / "config.toml")
    return with_model_defaults(resolved, entry, generation, "gen.json")


def test_each_source_of_a_sampling_default_gives_way_to_the_one_above(user_file):
    (user_file.parent / "config.toml").write_text("top_p = 0.5\n")
    text = '[[model]]\nname = "qwen3-8b"\nsampling = { top_p = 0.4, min_p = 0.1 }\nstop = ["END"]\n'
    generation = {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2, "typical_p": None, "do_sample": True}
    resolved = resolve(user_file, generation, {"temperature": 0.0}, text)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.temperature, origins["temperature"].kind) == (0.0, "flag")
    assert (settings.top_p, origins["top_p"].kind) == (0.5, "file")
    assert (settings.min_p, origins["min_p"].where) == (0.1, str(user_file))
    assert (settings.top_k, origins["top_k"].where) == (20, str(shipped_registry()))
    assert (settings.repetition_penalty, origins["repetition_penalty"].where) == (1.2, "gen.json")
    assert settings.typical_p is None
    assert settings.stop == ("END",)


def test_a_model_without_an_entry_takes_the_checkpoints_own_values():
    resolved = with_model_defaults(load_settings(environ={}, config_file=Path("/no")), None, {"top_k": 40}, "gen.json")
    assert (resolved.settings.top_k, resolved.origins["top_k"].kind) == (40, "checkpoint")


@pytest.mark.parametrize("value", ["0.7", -1, 1e9, True, [1], {"a": 1}])
def test_a_checkpoint_with_a_senseless_value_is_named(value):
    resolved = load_settings(environ={}, config_file=Path("/no"))
    with pytest.raises(CheckpointError, match=r"temperature.*gen\.json") as caught:
        with_model_defaults(resolved, None, {"temperature": value}, "gen.json")
    assert "--temperature" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("llama3", "llama-3.2-1b"),  # the smallest
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("qwen2.5:14b", "qwen2.5-7b"),
        ("gemma3:270m", "gemma-3-1b"),
        ("devstral", "devstral-small-2-24b"),
    ],
)
def test_of_a_family_the_model_of_the_nearest_size_is_named_first(name: str, nearest: str) -> None:
    assert load_registry(Path("/nowhere/models.toml")).nearest(name)[0] == nearest


@pytest.mark.parametrize("name", ["Hi", "hi", "Hey", "yes", "Hello"])
def test_a_short_word_suggests_no_model(name: str) -> None:
    assert load_registry().nearest(name) == ()
