"""What the README shows a newcomer runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.hub.names import TINY_DIRECTORY
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    not (TINY_DIRECTORY / "model.safetensors").exists(), reason="the built-in model is not in this tree"
)


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def run(*command: str, stdin: str = "", cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_the_python_example_prints_a_tale(tmp_path: Path) -> None:
    (example,) = code_blocks("python")
    result = run(sys.executable, "-c", example, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout) > 100


EXAMPLES = [
    line.split("  #")[0].split("| jq")[0].strip()
    for block in code_blocks("")
    for line in block.splitlines()
    if line.startswith("localllm run") and "tiny" not in line and "qwen" not in line and "./" not in line
]


@pytest.mark.parametrize("line", EXAMPLES)
def test_a_command_that_needs_no_download_answers(line: str) -> None:
    if " -c " in line:  # goes on with what the README ran before
        run(sys.executable, "-m", *shlex.split(EXAMPLES[0]))
    result = run(sys.executable, "-m", *shlex.split(line))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()


def test_the_readme_has_commands_to_run() -> None:
    assert len(EXAMPLES) >= 2


def test_every_file_that_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert [link for link in links if not (REPOSITORY / link).exists()] == []
