"""Where a user has no folder for settings, chats and caches: what cannot be there is absent, and all else goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm.config import user_directories
from tests.cli_support import Result, run_cli

_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")


@pytest.fixture(params=["a device", "a file", "none", "XDG folders that are files"])
def no_home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that no folder is."""
    (tmp_path / "file").write_text("")
    for name in ("LOCALLLM_HOME", "LOCALLLM_CACHE", *_FOLDERS):
        monkeypatch.delenv(name, raising=False)
    home = "/dev/null" if request.param == "a device" else str(tmp_path / "file")
    if request.param == "none":  # of a user without a name
        home = "~"
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
        monkeypatch.chdir(tmp_path)
    elif request.param == "XDG folders that are files":
        for name in _FOLDERS:
            monkeypatch.setenv(name, home)
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", f"{home}/hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", f"{home}/token")


@pytest.mark.usefixtures("no_home")
def test_what_needs_no_folder_works(tmp_path: Path) -> None:
    for line in (
        "--version",
        "--help",
        "list",
        "list --all",
        "config show",
        "sessions list",
        "cache info",
        "ps",
        "connect",
    ):
        result = run_cli(*line.split())
        assert (result.code, result.error_lines) == (0, []), f"{line}: {result.err}"
    answer = run_cli("run", "tiny", "-p", "Hi.", "--max-tokens", "2")
    assert answer.code == 0 and answer.out and "this chat continues, but is not saved" in answer.err
    assert run_cli("run", "tiny", "-p", "Hi.", "--max-tokens", "2", "--private").err == ""
    chat = run_cli("chat", "tiny", "--plain", "--max-tokens", "2", stdin=b"Hi.\n")
    assert chat.code == 0 and chat.out
    assert run_cli("plan", "tiny").code == 0
    doctor = run_cli("doctor", "--json").json["checks"]
    assert not any("could not be examined" in check["detail"] for check in doctor)
    told = {check["name"]: check for check in doctor}
    assert "Not a directory" in told["packed"]["detail"] and told["packed"]["status"] == "fail", told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.usefixtures("no_home")
def test_what_has_to_be_written_is_refused_in_words(tmp_path: Path) -> None:
    refused = {
        "run -c -p Hi": "no chat is saved yet",
        "serve tiny --host 0.0.0.0 --port 0": "the key cannot be kept",
        "pull Qwen/nothing --offline": "is not on this disk",
        "quantize tiny --weights int8": "cannot be written",
    }
    for line, words in refused.items():
        result = run_cli(*line.split())
        assert result.code != 0 and words in result.err and "bug" not in result.err, result.err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    job = run_cli("run", "tiny", "--batch", tmp_path / "prompts.jsonl", "--max-tokens", "2")
    assert "bug" not in job.err and (job.code == 0 or len(job.error_lines) == 4), job.err


def test_a_user_without_a_home_has_no_folder_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for folder in (*vars(user_directories({})).values(), user_directories({"LOCALLLM_HOME": "~/llm"}).data):
        assert folder.is_absolute() and not folder.exists()


def locked_out(*arguments: str | Path, home: Path) -> Result:
    """As a user who may not enter that home: root may, as long as it has all its powers."""
    command: Sequence[str | Path] = [sys.executable, "-m", "localllm", *arguments]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root enters any folder, and there is no setpriv here")
        powers = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}", *command]
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "XDG_", "HF_"))}
    done = subprocess.run(command, capture_output=True, env={**hidden, "HOME": str(home)}, stdin=subprocess.DEVNULL)
    return Result(done.returncode, done.stdout, done.stderr.decode())


def test_a_home_that_may_not_be_entered_is_none(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    try:
        answer = locked_out("run", "tiny", "-p", "Hi.", "--max-tokens", "2", "--json", home=locked / "home")
        assert answer.code == 0 and json.loads(answer.out)["text"], answer.err
        for line in ("list", "ps", "cache info", "config show", "rm qwen3-1.7b"):
            result = locked_out(*line.split(), home=locked / "home")
            assert result.code == (3 if line.startswith("rm") else 0) and "bug" not in result.err, result.err
    finally:
        locked.chmod(0o700)
