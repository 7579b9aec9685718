"""The keys of config.toml: bad ones are refused by name, before anything is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.config import load_settings
from localllm.errors import SettingsError
from localllm.tui.key_scopes import checked_keys


def resolved(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "config.toml"
    path.write_text(f"max_tokens = 5\n[keys]\n# mine\n{text}\n", encoding="utf-8")
    return load_settings({}, environ={}, config_file=path)


@pytest.mark.parametrize(
    "text",
    [
        '"chat.regenerate" = "ctrl+y"',
        '"chat.regenerate" = "f5,ctrl+shift+f9"',
        '"app.plan" = "f8"',
        '"app.plan" = "alt+slash"',
        '"app.plan" = "ctrl+question_mark"',
        '"message.copy" = "x"',
        '"chats.rename" = "ctrl+e"',
        '"chat.stop" = "escape"',
        '"app.plan" = "f3"\n"app.models" = "f2"',
        'chat.regenerate = "ctrl+y"\napp.plan = "f8"',
    ],
)
def test_keys_that_can_be_pressed_are_taken(tmp_path: Path, text: str) -> None:
    assert checked_keys(resolved(tmp_path, text))


def test_a_table_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'app\.plan' holds nothing in .*config\.toml"):
        resolved(tmp_path, "app.plan = {}")


def test_keys_may_be_written_as_they_are_shown(tmp_path: Path) -> None:
    assert checked_keys(resolved(tmp_path, '"chat.code" = "F7, Ctrl+Shift+F9"')) == {"chat.code": "f7,ctrl+shift+f9"}


def test_a_name_that_is_there_with_quotes_and_without_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'app\.plan' is there twice in .*config\.toml"):
        resolved(tmp_path, '"app.plan" = "f8"\napp.plan = "f9"')


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ('"chat.regenrate" = "ctrl+y"', "unknown key 'chat.regenrate'", "'chat.regenerate'"),
        ('chat.regenrate = "ctrl+y"', "unknown key 'chat.regenrate'", "'chat.regenerate'"),
        ('"app.plan" = "ctrl+nonsense"', "'app.plan'", "no key 'nonsense'"),
        ('"app.plan" = "crtl+y"', "'app.plan'", "'crtl' is not one of ctrl"),
        ('"app.plan" = "f8,"', "'app.plan'", "empty"),
        ('"app.models" = "x"', "'app.models'", "written in messages"),
        ('"chat.stop" = "space"', "'chat.stop'", "written in messages"),
        ('"app.models" = "ctrl+a"', "'app.models'", "text field"),
        ('"app.models" = "ctrl+g"', "'composer.editor'", "$EDITOR"),
        ('"chat.code" = "f5"', "'chat.regenerate'", "regenerate the answer"),
        ('"app.plan" = "f12"\n"app.models" = "f12"', "'app.plan'", "app."),
    ],
)
def test_what_is_no_key_or_anothers_is_refused_with_its_line(tmp_path: Path, text: str, what: str, why: str) -> None:
    with pytest.raises(SettingsError) as error:
        checked_keys(resolved(tmp_path, text))
    assert what in error.value.what and why in error.value.why and "config.toml:4" in error.value.what


def test_a_variable_is_named_where_it_set_the_key() -> None:
    environ = {"LOCALLLM_KEYS": "app.plan=ctrl+nonsense"}
    with pytest.raises(SettingsError, match="LOCALLLM_KEYS"):
        checked_keys(load_settings({}, environ=environ, config_file=Path("/nowhere/config.toml")))
