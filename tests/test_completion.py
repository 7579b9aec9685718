"""Completion in a shell: what Tab makes of a line on a terminal, with names that have colons."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import shellingham

from localllm.cli.completion import SCRIPTS
from tests.cli_support import environment, run_cli
from tests.patience import PATIENCE_S

# How each is started without its user's files, and made ready for a script.
SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'"),
    "zsh": (["-f", "-i"], "autoload -Uz compinit; compinit -u -D"),
    "fish": (["--no-config", "-i"], "set fish_greeting"),
}
PROGRAM = f"""#!/bin/sh
if [ -n "$_LOCALLLM_COMPLETE" ]; then exec {sys.executable} -m localllm; fi
printf '<%s>' "$@"; echo .
"""


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    program = tmp_path / "bin" / "localllm"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "script").write_text(SCRIPTS[name])
    return name


def _take_terminal() -> None:
    """In the child: the terminal on stdin becomes its own."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def typed(shell: str, folder: Path, line: str) -> list[str]:
    """Return the words that the program gets when a line is typed with Tab at its end."""
    flags, ready = SHELLS[shell]
    ours, theirs = pty.openpty()
    search_path = f"{folder / 'bin'}:{os.environ['PATH']}"
    variables = environment(folder, PATH=search_path, HOME=str(folder), PS1="ready> ", TERM="dumb")
    process = subprocess.Popen(
        [shell, *flags],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        cwd=folder,
        preexec_fn=_take_terminal,
    )
    text, end = b"", time.monotonic() + PATIENCE_S
    try:
        os.write(ours, f"{ready}\nsource {folder / 'script'}; echo rea''dy\n".encode())
        sent = False
        while not (found := re.search(rb"((?:<[^<>\r\n]*>)+)\.\r", text)):
            assert time.monotonic() < end, text[-600:]
            if select.select([ours], [], [], 0.1)[0]:
                text += os.read(ours, 65536)
            if not sent and b"\nready\r" in text:
                os.write(ours, f"localllm {line}\t\n".encode())
                sent = True
        return re.findall(r"<([^<>]*)>", found[1].decode())
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("perpl", ["perplexity"]),
        ("run mistral-small3.2:", ["run", "mistral-small3.2:24b"]),
        ("run mistral-small3.2:2", ["run", "mistral-small3.2:24b"]),
        ("run -p 'a: b' --weights nf", ["run", "-p", "a: b", "--weights", "nf4"]),
        ("run --weights=nf", ["run", "--weights=nf4"]),
        ("run --speculate=ngr", ["run", "--speculate=ngram"]),
        ("config set private t", ["config", "set", "private", "true"]),
        ("config set kv k8", ["config", "set", "kv", "k8v4"]),
        ("config set model mistral-small3.2:", ["config", "set", "model", "mistral-small3.2:24b"]),
        ("download mistral-small3.2:", ["download", "mistral-small3.2:24b"]),
        ("run -m mistral-small3.2:", ["run", "-m", "mistral-small3.2:24b"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tab_completes_a_word(shell: str, tmp_path: Path, line: str, words: list[str]) -> None:
    assert typed(shell, tmp_path, line) == words


def test_tab_completes_a_file_where_no_word_is_known(shell: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    assert typed(shell, tmp_path, "run --batch promp") == ["run", "--batch", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("name", "script", "start"),
    [
        ("bash", ".bash_completions/localllm.sh", ".bashrc"),
        ("zsh", ".zfunc/_localllm", ".zshrc"),
        ("fish", ".config/fish/completions/localllm.fish", ""),
    ],
)
def test_the_script_is_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, start: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(shellingham, "detect_shell", lambda: (name, name))
    if start:
        (tmp_path / start).write_text("alias ll='ls -l'")
    first = run_cli("--install-completion")
    assert first.code == 0 and str(tmp_path / script).encode() in first.out
    assert (tmp_path / script).read_bytes() == run_cli("--show-completion").out
    if start:
        before = (tmp_path / start).read_text()
        assert before.startswith("alias ll='ls -l'\n") and len(before.splitlines()) == 2
        run_cli("--install-completion")
        assert (tmp_path / start).read_text() == before


def test_a_shell_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("tcsh", "tcsh"))
    result = run_cli("--install-completion")
    assert result.code == 2 and "it knows bash, zsh, fish, and this is tcsh" in result.err
