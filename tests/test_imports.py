"""What a start of the program does not load: the libraries that take a second each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
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


def test_a_list_of_what_can_be_had_needs_no_torch(tmp_path: Path, known_machine: Callable[[Path], None]) -> None:
    known_machine(tmp_path / "cache")
    loaded = loaded_by("sys.argv = ['localllm', 'list', '--all']; from localllm.cli import main; main()", tmp_path)
    assert "localllm" in loaded and not loaded & (HEAVY - {"llvmlite"})  # which knows the processor's name


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
        "localllm.text.stop_strings",
        "localllm.cache.page_folder",
    ],
)
def test_a_module_of_the_front_loads_nothing_heavy(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import {module}", tmp_path)
    assert not loaded & HEAVY
    assert "huggingface_hub" not in loaded


@pytest.mark.parametrize(
    "module",
    ["localllm.text.tokenizer", "localllm.text.chat_template", "localllm.text.detokenizer"],
)
def test_text_needs_no_torch(module: str, tmp_path: Path) -> None:
    assert not loaded_by(f"import {module}", tmp_path) & (HEAVY - {"tokenizers", "numpy"})


def test_what_few_requests_ask_for_is_loaded_when_one_does(tmp_path: Path) -> None:
    """Beam search, a context that grows, bf16 in 12 bits: each is a file that the engine does without."""
    optional = ("engine.beam_search", "engine.context_growth", "quant.bf12", "kernels.bf12", "kernels.cpu_bf12")
    names = {f"localllm.{name}" for name in optional}
    code = f"import sys, localllm.engine.engine; assert not {names} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=True)


LOAD = """
import json, sys
import localllm.runtime.preloaded
before = set(sys.modules)
from localllm.config import load_settings
from localllm.engine.loader import Watcher
from localllm.runtime.engine_loader import Opening, open_engine
from localllm.runtime.engine_process import _foreseen
from localllm.runtime.selection import selected
chosen = selected(load_settings(), "tiny")
_foreseen(chosen, Opening(keeps_pages=True), lambda _text: None)
open_engine(chosen, Opening(keeps_pages=True), Watcher(), lambda _text: None)
print(json.dumps(sorted(name.partition(".")[0] for name in sys.modules.keys() - before)))
"""


def test_an_engines_process_has_all_that_a_load_needs_when_it_is_forked(
    tmp_path: Path, known_machine: Callable[[Path], None]
) -> None:
    """What is missing then, each engine would import anew: 30 ms of a start that takes 100."""
    known_machine(tmp_path / "cache")
    command = [sys.executable, "-c", LOAD]
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert not set(json.loads(ended.stdout.splitlines()[-1])) & {*HEAVY, "localllm", "huggingface_hub", "jinja2"}


def test_pages_on_the_disk_need_no_torch(tmp_path: Path) -> None:
    assert not loaded_by("import localllm.cache.disk", tmp_path) & (HEAVY - {"numpy"})


@pytest.mark.parametrize("line", [["tokenize", "tiny", "a fox"], ["run", "tiny", "--show-prompt", "-p", "a fox"]])
def test_showing_tokens_or_a_prompt_needs_no_torch(line: list[str], tmp_path: Path) -> None:
    loaded = loaded_by(f"sys.argv = ['localllm', *{line}]; from localllm.cli import main; main()", tmp_path)
    assert "tokenizers" in loaded
    assert "torch" not in loaded


def test_a_plan_of_rates_that_are_known_needs_no_torch(tmp_path: Path) -> None:
    """Neither do advice, a model that must be packed, and one whose files are not here."""
    code = """
    from localllm.offload.planner.profile import FormatRates, Profile, keep, machine_key
    keep(Profile(machine_key(), 40.0, 1.5, dict.fromkeys(("bf16", "int4-g64"), FormatRates(30.0, 900.0))))
    for arguments in (["tiny"], ["mistral-7b", "--ram", "2GiB"]):
        sys.argv = ["localllm", "plan", *arguments, "--device", "cpu"]
        from localllm.cli import main
        try: main()
        except SystemExit as ended: assert not ended.code, ended.code"""
    assert "torch" not in loaded_by(code, tmp_path)


@pytest.mark.slow
def test_what_a_plan_has_to_measure_is_measured_without_torch_in_its_process(tmp_path: Path) -> None:
    code = """
    sys.argv = ["localllm", "plan", "mistral-7b", "--ram", "2GiB", "--device", "cpu"]
    from localllm.cli import main
    try: main()
    except SystemExit as ended: assert not ended.code, ended.code
    from localllm.offload.planner.profile import kept_profile
    assert kept_profile().rates("int4-g64") is not None"""
    assert "torch" not in loaded_by(code, tmp_path)


def test_completion_offers_the_registrys_names_and_loads_nothing_heavy(tmp_path: Path) -> None:
    variables = {"_LOCALLLM_COMPLETE": "complete_bash", "COMP_WORDS": "localllm run mistr", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['localllm']; from localllm.cli import main; main()"
    child = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code],
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {row.rpartition("|")[2].strip().partition(".")[0] for row in child.stderr.splitlines()}
    assert "mistral-7b" in child.stdout.split()
    assert "localllm" in loaded and not loaded & HEAVY


@pytest.mark.parametrize("module", ["localllm.tui.app", "localllm.cli.screen", "localllm.chat.session"])
def test_a_screen_is_drawn_before_torch_is_loaded(module: str, tmp_path: Path) -> None:
    loaded = loaded_by(f"import {module}", tmp_path)
    assert not loaded & (HEAVY - {"textual"})


def test_the_server_answers_before_torch_is_loaded(tmp_path: Path) -> None:
    loaded = loaded_by("import localllm.server.app, localllm.server.http_server", tmp_path)
    assert not loaded & {"torch", "numpy", "llvmlite", "transformers", "textual"}


_ASKED = """
import json, os, signal, sys, threading, time, urllib.error, urllib.request
from localllm.server import app, http_server

def status(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{ports[0]}{path}", data, {"content-type": "application/json"})
    try:
        return urllib.request.urlopen(asked).read() and 200
    except urllib.error.HTTPError as error:
        return error.code

def ask():
    while status("/health") != 200:
        time.sleep(0.05)
    codes = {each.path: status(each.path.replace("{model:path}", "tiny"))
             for each in app.ENDPOINTS if each.method == "GET" and each.path != "/metrics"}
    codes |= {path: status(path, body) for path, body in json.loads(os.environ["POSTED"]).items()}
    print(json.dumps([codes, "torch" in sys.modules]), flush=True)
    os.kill(os.getpid(), signal.SIGINT)

def bound_and_asked(host, port):
    sock = bound(host, port)
    ports.append(sock.getsockname()[1])
    threading.Thread(target=ask, daemon=True).start()
    return sock

ports, bound, http_server.bound = [], http_server.bound, bound_and_asked
sys.argv = ["localllm", "serve", "--port", "0"]
from localllm.cli import main
main()
"""
_MESSAGES = [{"role": "user", "content": "A tale."}]
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_POSTED: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 2, "tools": [_TOOL], "logprobs": True},
    "/v1/completions": {"prompt": "Once", "max_tokens": 2, "stream": True},
    "/v1/responses": {"input": "A tale.", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "Once"},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 2, "model": "tiny"},
    "/v1/messages/count_tokens": {"messages": _MESSAGES, "model": "tiny"},
    "/api/chat": {"model": "tiny", "messages": _MESSAGES, "options": {"num_predict": 2}, "format": "json"},
    "/api/generate": {"model": "tiny", "prompt": "Once", "options": {"num_predict": 2}},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"content": "Once"},
    "/apply-template": {"messages": _MESSAGES},
}


def test_a_server_that_is_asked_everything_loads_no_torch_itself(
    tmp_path: Path, known_machine: Callable[[Path], None]
) -> None:
    known_machine(tmp_path / "cache")
    environ = environment(tmp_path, POSTED=json.dumps(_POSTED))
    child = subprocess.run([sys.executable, "-c", _ASKED], env=environ, capture_output=True, text=True, check=True)
    codes, has_torch = json.loads(child.stdout.splitlines()[-1])
    assert set(codes.values()) == {200}, codes
    assert not has_torch


def test_the_version_is_told_by_a_few_modules(tmp_path: Path) -> None:
    """A command is imported when it is called."""
    code = "import sys; sys.argv = ['localllm', '--version']; from localllm.cli import main; main()"
    line = [sys.executable, "-X", "importtime", "-c", code]
    child = subprocess.run(line, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert sum(row.rpartition("|")[2].strip().startswith("localllm") for row in child.stderr.splitlines()) <= 30


def test_a_model_runs_where_triton_is_not_installed(tmp_path: Path) -> None:
    """Torch's builds for the CPU do not bring it."""
    line = ["run", "tiny", "-p", "A fox", "--max-tokens", "4", "--device", "cpu", "--private"]
    code = f"sys.modules['triton'] = None; sys.argv = ['localllm', *{line}]; from localllm.cli import main; main()"
    report = f"import os, sys; os._exit = sys.exit; {code}"
    child = subprocess.run(
        [sys.executable, "-c", report], env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert (child.returncode, bool(child.stdout.strip())) == (0, True), child.stderr
