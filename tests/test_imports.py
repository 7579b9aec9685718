"""What a start of the program does not load: the libraries that take a second each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_support import environment

HEAVY = {"torch", "transformers", "textual", "triton", "bitsandbytes", "llvmlite", "numpy", "tokenizers", "pydantic"}


def loaded_by(code: str, home: Path, **variables: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after `code`, however it ends."""
    report = f"""
import json, sys
try:
    {code}
except SystemExit:
    pass
sys.stderr.write("\\n" + json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
    child = subprocess.run(
        [sys.executable, "-c", report], env=environment(home, **variables), capture_output=True, text=True, check=True
    )
    return set(json.loads(child.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "line",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["list"],
        ["list", "--all"],
        ["config", "show"],
        ["cache"],
        ["sessions", "list"],
        ["connect"],
        ["connect", "aider", "--url", "http://127.0.0.1:9"],
        ["show", "tiny"],
        ["chat", "no-such-model", "-s", "be brief"],
    ],
    ids=" ".join,
)
def test_a_quick_command_loads_nothing_heavy(line: list[str], tmp_path: Path) -> None:
    loaded = loaded_by(f"sys.argv = ['localllm', *{line}]; from localllm.cli import main; main()", tmp_path)
    assert "localllm" in loaded
    assert not loaded & HEAVY
    assert "rich" not in loaded


def test_completion_of_a_models_name_loads_nothing_heavy(tmp_path: Path) -> None:
    variables = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run mistr", "COMP_CWORD": "2"}
    loaded = loaded_by("sys.argv = ['localllm']; from localllm.cli import main; main()", tmp_path, **variables)
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "module",
    [
        "localllm",
        "localllm.cli",
        "localllm.cli.app",
        "localllm.hub",
        "localllm.history",
        "localllm.server",
        "localllm.registry",
        "localllm.config",
        "localllm.toml_file",
        "localllm.errors",
        "localllm.engine.request",
        "localllm.engine.events",
        "localllm.engine.stopping",
        "localllm.cache.page_folder",
    ],
)
def test_a_module_of_the_front_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import {module}", tmp_path)
    assert not loaded & HEAVY
    assert "huggingface_hub" not in loaded


@pytest.mark.parametrize(
    "module",
    ["localllm.engine.tokenizer", "localllm.engine.chat_template", "localllm.engine.detokenizer"],
)
def test_text_needs_no_torch(module: str, tmp_path: Path) -> None:
    assert not loaded_by(f"import {module}", tmp_path) & (HEAVY - {"tokenizers", "numpy"})


def test_pages_on_the_disk_need_no_torch(tmp_path: Path) -> None:
    assert not loaded_by("import localllm.cache.disk", tmp_path) & (HEAVY - {"numpy"})


@pytest.mark.parametrize("line", [["tokenize", "tiny", "a fox"], ["run", "tiny", "--show-prompt", "-p", "a fox"]])
def test_showing_tokens_or_a_prompt_needs_no_torch(line: list[str], tmp_path: Path) -> None:
    loaded = loaded_by(f"sys.argv = ['localllm', *{line}]; from localllm.cli import main; main()", tmp_path)
    assert "tokenizers" in loaded
    assert "torch" not in loaded


def test_completion_offers_the_registrys_names(tmp_path: Path) -> None:
    variables = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run mistr", "COMP_CWORD": "2"}
    child = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['localllm']; from localllm.cli import main; main()"],
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "mistral-7b" in child.stdout.split()


@pytest.mark.parametrize("module", ["localllm.tui.app", "localllm.cli.screen", "localllm.frontend.talk"])
def test_a_screen_is_drawn_before_torch_is_loaded(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import {module}", tmp_path)
    assert not loaded & (HEAVY - {"textual"})


def test_the_server_answers_before_torch_is_loaded(tmp_path: Path) -> None:
    loaded = loaded_by("import localllm.server.app, localllm.server.listening", tmp_path)
    assert not loaded & {"torch", "numpy", "llvmlite", "transformers", "textual"}
