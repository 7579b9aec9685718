"""What the README shows a newcomer runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.hub.names import TINY_DIRECTORY
from tests.cli_support import REPOSITORY, Result, environment, run_cli
from tests.patience import PATIENCE_S

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


EXAMPLES = [
    line.split("  #")[0].split("| jq")[0].strip()
    for block in code_blocks("")
    for line in block.splitlines()
    if line.startswith("localllm run") and "tiny" not in line and "qwen" not in line and "./" not in line
]


def run(line: str) -> Result:
    return run_cli(*shlex.split(line)[1:])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Where the README's first command was run, with which others go on, and what came of it."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALLLM_HOME", str(home))
        return home, run(EXAMPLES[0])


@pytest.mark.parametrize("line", EXAMPLES)
def test_a_command_that_needs_no_download_answers(
    line: str, first: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, result = first
    monkeypatch.setenv("LOCALLLM_HOME", str(home))
    if line != EXAMPLES[0]:
        result = run(line)
    assert (result.code, result.err) == (0, "")
    assert result.out.strip()


def test_the_readme_has_commands_to_run() -> None:
    assert len(EXAMPLES) >= 2


def test_every_file_that_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_every_source_file_that_a_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"[\w/]+\.py\b", (REPOSITORY / page).read_text(encoding="utf-8"))) - {"cli/NAME.py"}
    folders = [REPOSITORY, REPOSITORY / "localllm"]
    sources = {str(path.relative_to(folder)) for folder in folders for path in folder.glob("[!.]*/**/*.py")}
    assert [name for name in named if not any(f"/{source}".endswith(f"/{name}") for source in sources)] == []
