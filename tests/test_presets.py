"""Presets on the command line: saved, edited by hand, named where a model is, and in a chat."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from localllm.config import load_settings
from localllm.history import History, history_file
from localllm.runtime.presets import PRESET_SETTINGS, choose, find_preset, save_preset
from localllm.settings import SETTINGS
from tests.cli_support import Result, run_cli, write_checkpoint
from tests.server.test_adapters import write_adapter

SYSTEM = "You tell tales of plumbers."
TYPED = ("--system", SYSTEM, "--temperature", "0.7", "--top-k", "20", "--seed", "5", "--max-tokens", "12")
VALUES = {"system": SYSTEM, "temperature": 0.7, "top_k": 20, "seed": 5, "max_tokens": 12}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("LOCALLLM_") and name != "LOCALLLM_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(home: Path) -> Path:
    return home / "config" / "presets"


@pytest.fixture
def mario(folder: Path) -> Path:
    assert run_cli("preset", "save", "mario", *TYPED).code == 0
    return folder / "mario.toml"


def values_of(name: str) -> dict[str, Any]:
    found = find_preset(name)
    assert found is not None
    return dict(found.values)


def refused(*arguments: str, code: int = 2) -> str:
    result = run_cli(*arguments)
    assert result.code == code, result.err
    return "\n".join(result.error_lines)


# Saved


def test_settings_that_contradict_each_other_are_not_saved(folder: Path) -> None:
    said = refused("preset", "save", "long", "--attend", "top:8", "--kv-evict", "sinks:64")
    assert "cannot go together" in said and not folder.exists()


def test_a_preset_is_a_file_of_what_was_typed(mario: Path) -> None:
    assert tomllib.loads(mario.read_text()) == {"model": "tiny", **VALUES}
    assert mario.stat().st_mode & 0o077 == 0 and [each.name for each in mario.parent.iterdir()] == ["mario.toml"]


def test_every_setting_comes_back_as_it_was_saved(folder: Path) -> None:
    values = {
        "model": "tiny", "ctx": 64, "ram": 8 * 10**9, "vram": 3 << 30, "device": "cpu", "dtype": "fp32",
        "weights": "int8", "kv": "bf16", "kv_offload": "keep:512", "attend": "top:3",
        "kv_evict": "off", "reuse": "chunks", "speculate": "off", "draft_tokens": 0, "cache_disk": 0,
        "adapter": ("fox:0.5", "/a b/owl"), "adapter_memory": 5 << 20,
        "threads": 2, "max_tokens": 9,
        "temperature": 1e-05, "top_k": 3, "top_p": 0.1, "min_p": 0.05, "typical_p": 0.5, "repetition_penalty": 1.1,
        "frequency_penalty": -0.5, "presence_penalty": 0.5, "repeat_last_n": -1, "seed": 2**63 - 1,
        "stop": ("a\nb", '"quoted" \\ ', "\x7f", "ü€😀", "\t"), "overflow": "evict", "think": "off",
        "system": 'Two lines:\n"""three quotes""" and \\n, \x7f, \r, 😀.\n',
    }  # fmt: skip
    assert set(values) == set(PRESET_SETTINGS)
    save_preset("all", values, replaces=False)
    assert values_of("all") == values


def test_a_preset_is_replaced_only_where_that_is_typed(mario: Path) -> None:
    assert "--replace" in refused("preset", "save", "Mario", "--top-p", "0.5")
    assert run_cli("preset", "save", "Mario", "--top-p", "0.5", "--replace").code == 0
    assert mario.read_text() == 'model = "tiny"\ntop_p = 0.5\n' and list(mario.parent.iterdir()) == [mario]


def test_a_preset_of_a_preset_takes_its_settings_over(mario: Path) -> None:
    run_cli("preset", "save", "luigi", "--model", "mario", "--top-k", "3", "--ctx", "128")
    assert values_of("luigi") == {"model": "tiny", **VALUES, "top_k": 3, "ctx": 128}


def test_the_system_message_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("One.\nTwo.\n")
    assert run_cli("preset", "save", "two", "--system", f"@{tmp_path / 'system.txt'}").code == 0
    assert values_of("two")["system"] == "One.\nTwo."


def test_a_folder_is_found_from_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert run_cli("preset", "save", "here", "--model", "mine", "--max-tokens", "2").code == 0
    monkeypatch.chdir("/")
    assert values_of("here")["model"] == str(tmp_path / "mine")
    assert run_cli("run", "here", "-p", "the fox").code == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tiny", "may not hide a model"),
        ("TINY", "may not hide a model"),
        ("qwen3-8b", "may not hide a model"),
        ("../up", "letters, digits"),
        ("a/b", "letters, digits"),
        (".hidden", "letters, digits"),
        ("", "letters, digits"),
        ("a b", "letters, digits"),
        ("x" * 65, "letters, digits"),
        ("x.gguf", "taken for a file"),
        ("mario:v2", "letters, digits"),
    ],
)
def test_a_name_that_is_a_path_or_a_model_s_is_refused(name: str, why: str, folder: Path) -> None:
    assert why in refused("preset", "save", name, "--top-k", "1")
    assert not folder.exists()


def test_a_preset_of_a_model_that_nobody_knows_is_refused(folder: Path) -> None:
    assert "no-such-model" in refused("preset", "save", "mine", "--model", "no-such-model", code=3)
    assert "--temperature is 999" in refused("preset", "save", "mine", "--temperature", "999")
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_told(home: Path) -> None:
    (home / "config").write_text("a file")
    assert "cannot be written" in refused("preset", "save", "mine")


# Listed, shown, deleted


def test_presets_are_listed_shown_and_deleted(mario: Path, folder: Path) -> None:
    assert "mario" in run_cli("preset", "list").out.decode()
    listed = run_cli("preset", "list", "--json").json["presets"]
    assert listed == [{"name": "mario", "file": str(mario), "model": "tiny", "settings": VALUES}]
    assert run_cli("preset", "show", "MARIO", "--json").json["settings"] == VALUES
    assert SYSTEM in run_cli("preset", "show", "mario").out.decode()
    assert "nobody can be asked" in refused("preset", "rm", "mario")
    assert run_cli("preset", "rm", "mario", "--yes").code == 0 and not mario.exists()
    for verb in ("show", "rm"):
        assert "there is no preset 'mario'" in refused("preset", verb, "mario", code=3)
    assert "saves one" in run_cli("preset", "list").err


def test_a_broken_file_is_named_with_its_line_and_can_be_deleted(mario: Path) -> None:
    (broken := mario.with_stem("broken")).write_text('model = "tiny"\ntemprature = 1\n')
    listed = run_cli("preset", "list")
    assert "mario" in listed.out.decode() and f"{broken}:2" in listed.err
    for line in (("preset", "show", "broken"), ("run", "broken", "-p", "x"), ("chat", "broken", "--plain")):
        assert f"unknown key 'temprature' in {broken}:2" in refused(*line)
    assert run_cli("preset", "rm", "broken", "--yes").code == 0 and not broken.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("top_k = 1", "names no model"),
        ('model = "tiny"\ntop_p = 2', "top_p is 2 in"),
        ('model = "tiny"\ntheme = "dark"', "unknown key 'theme'"),
        ("model = ", "is not TOML"),
    ],
)
def test_a_file_that_was_edited_is_checked_as_settings_are(folder: Path, text: str, what: str) -> None:
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(text)
    assert what in refused("run", "mine", "-p", "x")


def test_a_file_with_a_model_s_name_hides_no_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "tiny.toml").write_text('model = "tiny"\ntop_k = 1\n')
    assert "may not hide a model" in refused("run", "tiny", "-p", "x")


# Named in the place of a model


def run(*arguments: str) -> Result:
    result = run_cli("run", *arguments, "-p", "A tale, please.", "--json")
    assert result.code == 0, result.err
    return result


def answered(result: Result) -> tuple[Any, ...]:
    return tuple(result.json[name] for name in ("text", "usage"))


def test_a_preset_says_what_the_same_settings_say_when_typed(mario: Path) -> None:
    by_hand, by_name = run("tiny", *TYPED), run("mario")
    assert by_name.json["text"] == by_hand.json["text"] != ""
    assert by_name.json["usage"]["prompt_tokens"] == by_hand.json["usage"]["prompt_tokens"]
    shown = [run_cli("run", *line, "-p", "A tale.", "--show-prompt").out for line in (("tiny", *TYPED[:2]), ("mario",))]
    assert shown[0] == shown[1] and SYSTEM.encode() in shown[0]


@pytest.mark.usefixtures("mario")
def test_a_flag_beats_a_preset_which_beats_a_variable_and_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "config" / "config.toml").write_text("top_k = 1\nmin_p = 0.1\n")
    monkeypatch.setenv("LOCALLLM_TEMPERATURE", "2")
    resolved, preset = choose(load_settings({"seed": 8}), "mario")
    assert preset is not None and preset.name == "mario"
    wanted = {"temperature": 0.7, "top_k": 20, "min_p": 0.1, "seed": 8, "max_tokens": 12, "model": "tiny"}
    assert {name: getattr(resolved.settings, name) for name in wanted} == wanted
    kinds = {name: resolved.origins[name].kind for name in ("temperature", "top_k", "min_p", "seed")}
    assert kinds == {"temperature": "preset", "top_k": "preset", "min_p": "file", "seed": "flag"}


@pytest.mark.usefixtures("mario")
def test_the_setting_model_may_name_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = run("mario")
    monkeypatch.setenv("LOCALLLM_MODEL", "mario")
    assert run().json["text"] == by_name.json["text"]


def test_an_error_about_a_preset_s_setting_names_its_line(mario: Path) -> None:
    mario.write_text('model = "tiny"\nctx = 100000\n')
    told = refused("run", "mario", "-p", "x")
    assert f"the setting ctx is from {mario}:2" in told and f"write `ctx = 1024` into {mario}:2" in told
    mario.write_text('# mine\nmodel = "maker/absent"\n')
    assert f"the setting `model` in {mario}:2 names it" in refused("run", "mario", "-p", "x", code=3)


@pytest.mark.usefixtures("mario")
def test_other_commands_work_with_the_preset_s_model(mario: Path) -> None:
    mario.write_text('model = "tiny"\nctx = 128\n')
    assert run_cli("plan", "mario", "--json").json["ctx"] == 128
    run_cli("rm", "tiny", "--packed", "--yes")  # what other tests have packed
    for line in (("tokenize", "{}", "a fox"), ("rm", "{}", "--packed", "--yes")):
        by_name, by_hand = (run_cli(*(word.format(name) for word in line)) for name in ("mario", "tiny"))
        assert (by_name.code, by_name.out) == (by_hand.code, by_hand.out)
    shown = run_cli("show", "mario", "--json").json
    assert shown.pop("preset") == "mario" and shown == run_cli("show", "tiny", "--json").json
    assert run_cli("show", "mario").out.startswith(b"preset            mario, whose")
    assert "localllm preset rm mario" in refused("rm", "mario", "--yes")
    assert "localllm run mario x" in refused("run", "mari", "x", code=3)


@pytest.mark.usefixtures("mario")
def test_a_job_has_the_preset_s_system_message(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"A tale, please."\n')
    job = run_cli("run", "mario", "--batch", tmp_path / "prompts.jsonl")
    assert json.loads(job.out)["text"] == run("mario").json["text"]


# Chats


def chat(*arguments: str, lines: str) -> Result:
    return run_cli("chat", "--plain", *arguments, stdin=lines.encode())


def test_a_chat_goes_on_when_its_preset_is_gone(mario: Path) -> None:
    assert chat("mario", lines="A tale, please.\n").code == 0
    mario.unlink()
    again = chat("--resume", "--max-tokens", "3", lines="/system\nMore, please.\n")
    assert again.code == 0 and f"system message: {SYSTEM}" in again.err
    with History.peek(history_file()) as history:
        assert [session.model for session, _ in history.sessions()] == ["tiny"]


def test_a_chat_is_saved_as_a_preset(folder: Path) -> None:
    lines = "/set top_k 3\n/system Be brief.\n/preset save brief\n/preset save brief\n/preset\n"
    told = chat("--temperature", "0.5", lines=lines)
    assert f"wrote {folder / 'brief.toml'}" in told.err and told.err.count("error:") == 2
    assert values_of("brief") == {"model": "tiny", "system": "Be brief.", "temperature": 0.5, "top_k": 3}


# Ollama's create


def test_create_makes_a_preset_of_a_modelfile_over_one_of_that_name(mario: Path, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM tiny\nLICENSE MIT\nSYSTEM Be brief.\nPARAMETER num_predict 5\n")
    made = run_cli("create", "mario", "-f", tmp_path / "Modelfile")
    assert made.code == 0 and str(mario) in made.out.decode() and "LICENSE" in made.err
    assert values_of("mario") == {"model": "tiny", "system": "Be brief.", "max_tokens": 5}
    assert run_cli("create", "owl", "-f", "-", stdin=b"FROM mario:latest\nPARAMETER top_k 1\n").code == 0
    assert values_of("owl") == {"model": "tiny", "system": "Be brief.", "max_tokens": 5, "top_k": 1}


def test_paths_in_a_modelfile_begin_at_its_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "mine")
    (tmp_path / "Modelfile").write_text("FROM ./mine\n")
    assert run_cli("create", "here", "-f", tmp_path / "Modelfile").code == 0
    assert values_of("here")["model"] == str(tmp_path / "mine")
    write_adapter(tmp_path / "lora", 1)
    (tmp_path / "Modelfile").write_text("FROM tiny\nADAPTER ./lora\nADAPTER other-lora\n")
    assert run_cli("create", "adapted", "-f", tmp_path / "Modelfile").code == 0
    assert values_of("adapted")["adapter"] == (str(tmp_path / "lora"), "other-lora")


def test_a_modelfile_that_cannot_be_honoured_writes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_text("FROM tiny\nTEMPLATE none\n")
    assert f"{tmp_path / 'Modelfile'}:2" in refused("create", "mine", "-f", str(tmp_path / "Modelfile"))
    (tmp_path / "Modelfile").write_text("FROM tiny\nADAPTER ./lora\n")
    assert str(tmp_path / "lora") in refused("create", "mine", "-f", str(tmp_path / "Modelfile"), code=1)
    lines = ["SYSTEM Be brief.\n", "MESSAGE system Be long.\n"]
    for order in (lines, lines[::-1]):
        (tmp_path / "Modelfile").write_text("FROM tiny\n" + "".join(order))
        assert "a second system message" in refused("create", "mine", "-f", str(tmp_path / "Modelfile"))
    (tmp_path / "Modelfile").write_text("FROM no-such-model\n")
    refused("create", "mine", "-f", str(tmp_path / "Modelfile"), code=3)
    refused("create", "mine", "-f", str(tmp_path / "absent"))
    assert not folder.exists()


def test_a_preset_has_every_setting_that_shapes_answers() -> None:
    assert set(SETTINGS) - set(PRESET_SETTINGS) == {"offline", "private", "show_thoughts", "theme", "keys"}


def test_a_model_chosen_in_a_chat_has_nothing_of_the_preset_before_it() -> None:
    run_cli("preset", "save", "story", "-s", "You tell tales.", "--temperature", "0", "--max-tokens", "2")
    run_cli("chat", "story", "--plain", stdin=b"/model tiny\n/preset save later\n/bye\n")
    assert run_cli("preset", "show", "later", "--json").json["settings"] == {}


def test_messages_of_a_file_get_the_system_message_of_the_preset_where_they_have_none(tmp_path: Path) -> None:
    run_cli("preset", "save", "story", "-s", "You tell tales.")
    asked = [{"role": "user", "content": "A fox"}]
    for messages, system in (
        (asked, "You tell tales."),
        ([{"role": "system", "content": "Be brief."}, *asked], "Be brief."),
    ):
        (tmp_path / "m.json").write_text(json.dumps(messages))
        shown = run_cli("run", "story", "--messages", tmp_path / "m.json", "--show-prompt").out.decode()
        assert shown.count("system\n") == 1 and f"system\n{system}" in shown
    assert "system message is left out" in run_cli("run", "story", "--raw", "-p", "x", "--show-prompt").err


def test_no_alias_takes_the_name_of_a_preset() -> None:
    run_cli("preset", "save", "story", "-s", "You tell tales.")
    refused = run_cli("serve", "tiny", "--alias", "story")
    assert (refused.code, "--alias story is the name of a preset" in refused.err) == (2, True)


def test_list_names_the_presets_and_create_says_what_it_replaces(tmp_path: Path) -> None:
    assert "presets" not in run_cli("list").err
    (tmp_path / "Modelfile").write_text("FROM tiny\nSYSTEM You tell tales.\n")
    made = [run_cli("create", "story", "-f", tmp_path / "Modelfile") for _ in range(2)]
    assert ["in place of the preset story" in each.err for each in made] == [False, True]
    assert "presets: story" in run_cli("list").err


def test_a_preset_for_the_cpu_is_left_aside_where_a_card_is_named() -> None:
    run_cli("preset", "save", "story", "--device", "cpu")
    assert "device = cpu" in run_cli("plan", "story", "--gpu", "4090").err
    assert "device = cpu" not in run_cli("plan", "story", "--gpu", "none").err
