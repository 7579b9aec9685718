"""What the README shows a newcomer runs."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.hub.names import TINY_DIRECTORY
from tests.cli_support import REPOSITORY, environment, start_cli
from tests.patience import PATIENCE_S, wait_for

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_prints_a_tale(tmp_path: Path, known_machine: Callable[[Path], None]) -> None:
    (example,) = code_blocks("python")
    known_machine(tmp_path / "cache")
    command = [sys.executable, "-c", example]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, env=environment(tmp_path)
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout) > 100


INSTALLS = ("pipx ", "uv ", "pip ", "make ")
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in code_blocks("sh")
    for line in block.splitlines()
    if not line.startswith(INSTALLS)
]
CHAT = b"Tell me a tale about a hen.\n/bye\n"  # what a person types there
PORT = "8420"


class Shell:
    """Runs commands as a newcomer types them, one after the other; a server stays until it is stopped."""

    def __init__(self, home: Path) -> None:
        self.environment = environment(home)
        self.home = home
        self.port = str(free_port())
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(line.replace(f":{PORT}", f":{self.port}"))
        if words[:2] == ["localllm", "serve"]:
            self.server = start_cli(self.home, *words[1:], "--port", self.port, stderr=subprocess.PIPE)
            wait_for(lambda: answers(f"http://127.0.0.1:{self.port}/health"))
            return subprocess.CompletedProcess(words, 0, "serving", "")
        command = [sys.executable, "-m", "localllm", *words[1:]] if words[0] == "localllm" else words
        said = CHAT if words[:2] == ["localllm", "chat"] else b""
        options: Any = {"input": said, "capture_output": True, "timeout": PATIENCE_S, "check": False}
        done = subprocess.run(command, env=self.environment, cwd=self.home, **options)
        return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_each_command_works_in_its_order(tmp_path: Path, known_machine: Callable[[Path], None]) -> None:
    known_machine(tmp_path / "cache")
    shell, said = Shell(tmp_path), {}
    with contextlib.closing(shell):
        for line in COMMANDS:
            done = shell.run(line)
            assert done.returncode == 0 or line == "localllm doctor", (line, done)  # which may find something here
            assert done.stdout.strip() or line == "localllm stop", (line, done)
            said[line] = done.stdout
        assert shell.server is not None and shell.server.wait(PATIENCE_S) == 0  # by `localllm stop`
    tale = said[COMMANDS[0]]
    assert "fox" in tale and "lantern" in tale and len(tale) > 300
    assert "hen" in said["localllm chat"]
    assert "tell-me" in said["localllm sessions list"] or "Tell me a tale" in said["localllm sessions list"]
    assert "0.7" in said["localllm config show --origin"]
    (request,) = (line for line in COMMANDS if line.startswith("curl"))
    assert "crow" in json.loads(said[request])["choices"][0]["message"]["content"]


def test_the_readme_is_short_and_its_commands_are_the_programs() -> None:
    assert len(README.splitlines()) <= 150
    assert {line.split()[0] for line in COMMANDS} == {"localllm", "curl"} and len(COMMANDS) >= 12


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_that_a_page_links_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    names = [str(page.relative_to(REPOSITORY / "docs")) for page in PAGES[1:] if page.name != "README.md"]
    assert [name for name in names if f"({name})" not in index] == []


@pytest.mark.parametrize("page", ["docs/internals/design.md", "CONTRIBUTING.md"])
def test_every_source_file_that_a_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"[\w/]+\.py\b", (REPOSITORY / page).read_text(encoding="utf-8"))) - {"cli/NAME.py"}
    folders = [REPOSITORY, REPOSITORY / "localllm"]
    sources = {str(path.relative_to(folder)) for folder in folders for path in folder.glob("[!.]*/**/*.py")}
    assert [name for name in named if not any(f"/{source}".endswith(f"/{name}") for source in sources)] == []
