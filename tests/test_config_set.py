"""`config set`, `unset`, `get` and `path`: one line of config.toml changes, and the rest of the file stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.config import load_settings
from localllm.settings import SETTINGS
from tests.cli_support import Result, run_cli
from tests.test_config import VALUES

FILE = """# mine
ctx = 4096  # enough

# how it speaks
temperature = 0.5
stop = [
    "END",  # of a tale
]

# the keys
[keys]
"chat.stop" = "ctrl+x"  # as ever
app.help = "f2"
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    for name in SETTINGS:
        monkeypatch.delenv(f"LOCALLLM_{name.upper()}", raising=False)
    return tmp_path / "config" / "config.toml"


def config(*words: str) -> Result:
    return run_cli("config", *words)


def write(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)


def test_the_first_setting_makes_the_file(file: Path) -> None:
    result = config("set", "ctx", "4096")
    assert result.out == b"ctx = 4096 (before: not set)\n" and str(file) in result.err
    assert file.read_text() == "ctx = 4096\n"
    assert config("path").out.decode() == f"{file}\n"


@pytest.mark.parametrize(
    ("words", "line", "changed"),
    [
        (["ctx", "8192"], "ctx = 4096  # enough", "ctx = 8192  # enough"),
        (["TEMPERATURE", "0.7"], "temperature = 0.5", "temperature = 0.7"),
        (["keys.chat.stop", "f9"], '"chat.stop" = "ctrl+x"  # as ever', '"chat.stop" = "f9"  # as ever'),
        (["top-k", "40"], "]\n\n# the keys", "]\ntop_k = 40\n\n# the keys"),
    ],
    ids=str,
)
def test_one_line_changes_and_the_others_stay(file: Path, words: list[str], line: str, changed: str) -> None:
    write(file, FILE)
    assert config("set", *words).code == 0
    assert file.read_text() == FILE.replace(line, changed)
    load_settings()


def test_a_list_is_written_as_a_whole(file: Path) -> None:
    write(file, FILE)
    assert b"(before: 'END')" in config("set", "stop", "A", "a b").out
    assert load_settings().settings.stop == ("A", "a b")


def test_an_entry_that_is_written_without_quotes_is_there_once(file: Path) -> None:
    write(file, FILE)
    assert config("set", "keys.app.help", "f3").out == b"keys.app.help = f3 (before: f2)\n"
    assert load_settings().settings.keys == {"chat.stop": "ctrl+x", "app.help": "f3"}
    assert config("get", "keys.app.help").out == b"f3\n"


@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if row.accepts.kind != "table"])
def test_every_setting_can_be_set_read_and_unset(file: Path, name: str) -> None:
    accepts = SETTINGS[name].accepts
    known = {"model": "qwen3-8b", "theme": "light"}.get(name)
    value = known or (accepts.choices[-1] if accepts.choices else VALUES[accepts.kind])
    text = value[0] if isinstance(value, list) else json.dumps(value) if isinstance(value, bool) else str(value)
    assert config("set", name, text).code == 0
    assert load_settings().origins[name].kind == "file"
    assert config("get", name).out != b"-\n"
    assert config("unset", name).code == 0
    assert load_settings().origins[name].kind == "default" and file.read_text() == ""


def test_unset_deletes_what_is_no_setting_too(file: Path) -> None:
    write(file, "tempurature = 1\nctx = 1\n")
    assert config("show").code == 2
    assert config("unset", "tempurature").code == 0
    assert file.read_text() == "ctx = 1\n"
    assert config("unset", "ram").code == 0 and config("unset", "nonsense").code == 2


def test_the_last_entry_of_a_table_takes_the_table_with_it(file: Path) -> None:
    config("set", "keys.chat.stop", "ctrl+x")
    config("unset", "keys.chat.stop")
    assert file.read_text().strip() == ""


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["temperture", "0.5"], "localllm config set temperature 0.5"),
        (["ram", "8"], "localllm config set ram 8GiB"),
        (["kv", "int5"], "localllm config set kv int"),
        (["device", "gpu"], "localllm config set device cuda"),
        (["private", "perhaps"], "localllm config unset private"),
        (["system", "Be", "brief"], "localllm config set system 'Be brief'"),
        (["keys", "x"], "write keys.NAME"),
        (["ctx.x", "1"], "write ctx alone"),
    ],
    ids=str,
)
def test_what_is_refused_is_not_written(file: Path, words: list[str], fix: str) -> None:
    result = config("set", *words)
    assert result.code == 2 and f"fix:   {fix}" in result.err
    assert not file.exists()


def test_a_file_that_is_not_toml_stays_as_it_is(file: Path) -> None:
    write(file, "ctx = = 1\n")
    result = config("set", "ctx", "2")
    assert result.code == 2 and "is not TOML" in result.err
    assert file.read_text() == "ctx = = 1\n"


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("ctx = 1\n")
    file.parent.mkdir()
    file.symlink_to(real)
    config("set", "ctx", "2")
    assert file.is_symlink() and real.read_text() == "ctx = 2\n"


def test_a_variable_that_hides_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CTX", "5")
    result = config("set", "ctx", "7")
    assert result.code == 0 and "warning: LOCALLLM_CTX=5 in the environment overrides the file" in result.err
    assert config("get", "ctx").out == b"5\n"


def test_a_model_or_a_theme_that_there_is_not_is_not_written() -> None:
    model, theme = run_cli("config", "set", "model", "smolm2"), run_cli("config", "set", "theme", "lihgt")
    assert model.code == 3 and "fix:   localllm config set model smollm2-135m\n" in model.err
    assert theme.code == 2 and "fix:   localllm config set theme light\n" in theme.err
    assert run_cli("config", "get", "theme").out == b"auto\n"
