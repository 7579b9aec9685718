"""An error about a setting names who set it, and its fix is for that place."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.cli_support import Result, ask, run_cli, write_checkpoint

QUICK = {"plan": (), "bench": ("--prompt-tokens", "8")}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("LOCALLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def store(home: Path, line: str) -> Path:
    path = home / "config" / "config.toml"
    path.parent.mkdir()
    path.write_text(f"# mine\n{line}\n")
    return path


def lines(result: Result) -> str:
    return "\n".join(result.error_lines)


def test_a_variable_is_named_and_mended_where_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RAM", "900000GiB")
    result = ask(model)
    assert result.code == 2
    what, why, fix, _ = result.error_lines
    assert what == "error: LOCALLLM_RAM=900000.00GiB is more than this machine has"
    assert why.endswith("; the setting ram is from LOCALLLM_RAM")
    name, _, amount = fix.removeprefix("fix:   export ").partition("=")
    monkeypatch.setenv(name, amount)
    assert ask(model).code == 0
    assert "--ram" not in lines(result)


def test_a_line_of_the_file_is_named_with_what_to_write_there(home: Path, model: Path) -> None:
    path = store(home, 'ram = "900000GiB"')
    result = ask(model)
    assert result.code == 2
    assert result.error_lines[0] == "error: ram = 900000.00GiB is more than this machine has"
    assert result.error_lines[1].endswith(f"; the setting ram is from {path}:2")
    written, place = result.error_lines[2].removeprefix("fix:   write `").split("` into ")
    assert place == f"{path}:2"
    path.write_text(written)
    assert ask(model).code == 0
    assert "--ram" not in lines(result)


def test_what_was_typed_is_told_as_a_flag_beside_a_stored_value(home: Path, model: Path) -> None:
    store(home, 'ram = "1GiB"')
    result = ask(model, "--ram", "900000GiB")
    assert result.error_lines[0] == "error: --ram 900000.00GiB is more than this machine has"
    assert "config.toml" not in lines(result)


@pytest.mark.parametrize("command", ["run", "plan", "bench"])
def test_a_device_from_a_variable_is_mended_there(model: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("LOCALLLM_DEVICE", "cuda")
    result = ask(model) if command == "run" else run_cli(command, model, *QUICK[command])
    assert result.error_lines[2] == "fix:   export LOCALLLM_DEVICE=cpu"


def test_a_stored_context_that_is_too_small_is_mended_where_it_stands(home: Path, model: Path) -> None:
    path = store(home, "ctx = 4")
    result = run_cli("run", model, "-p", "the fox and the lantern once upon a time")
    assert result.code == 5 and f"the setting ctx is from {path}:2" in result.error_lines[1]
    assert result.error_lines[2] == f"fix:   write `ctx = 512` into {path}:2"


def test_a_stored_cap_on_the_gpu_is_left_aside_with_one_note_where_there_is_none(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = store(home, 'vram = "2GiB"')
    for result in (ask(model), run_cli("plan", model), run_cli("plan", model, "--device", "cpu", "--json")):
        assert (result.code, bool(result.out)) == (0, True)
        note = f"the setting vram from {path}:2 is left aside: no GPU is used; --ram limits the memory of a CPU"
        assert result.err.splitlines().count(note) == 1


def test_a_cap_on_the_gpu_that_was_typed_is_refused_where_there_is_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("LOCALLLM_RAM", "8GiB")
    result = ask(model, "--vram", "2GiB")
    assert "LOCALLLM_RAM" not in result.err and result.code == 2
    fix = result.error_lines[2].removeprefix("fix:   localllm ")
    assert "--vram" not in fix and run_cli(*shlex.split(fix)).code == 0
    device = ask(model, "--vram", "2GiB", "--device", "cuda").error_lines[2]
    assert "--vram" not in device and device.endswith("--device cpu")


@pytest.mark.parametrize(("setting", "amount"), [("ctx", "8k"), ("threads", "0"), ("temperature", "hot")])
def test_a_stored_number_that_is_none_names_its_place(
    home: Path, model: Path, setting: str, amount: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"LOCALLLM_{setting.upper()}"
    monkeypatch.setenv(variable, amount)
    result = ask(model)
    assert result.code == 2 and variable in result.error_lines[0]
    assert result.error_lines[2] == f"fix:   unset {variable}"
