"""What `localllm connect` prints, put to use: by the programs where they are there, by their requests where not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from localllm.cli.options import complete_connections
from localllm.hub.names import TINY_DIRECTORY
from localllm.runtime.client_configs import CONNECTIONS, YOUR_KEY, Target, ask_models, names
from tests.cli_support import run_cli, write_checkpoint
from tests.patience import PATIENCE_S
from tests.server.claims import environments
from tests.server.support import Json, Patch, Running, running
from tests.server.test_other_clients import installed, interpreter
from tests.server.tools_support import ANTHROPIC_TOOLS, OPENAI_TOOLS

KEY = "a-key-of-20-characters"
NOBODY = "http://127.0.0.1:9"
TALE = {"role": "user", "content": "A tale about an owl, please."}
WIDE = 131072  # a byte is a token of the checkpoints, and Claude Code begins with 85,000
ROOMY = 32768
TRICKY = """fo"x$model's"""


def parts(name: str, *flags: str) -> list[str]:
    """The texts that are printed for a program."""
    result = run_cli("connect", name, "--json", *flags)
    assert result.code == 0, result.err
    return [part["text"] for part in result.json["parts"]]


def variables(text: str) -> dict[str, str]:
    """What a shell would have in its environment."""
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("export ")]
    return dict(word.split("=", 1) for line in lines for word in line[1:])


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """It says no more than it takes to see that it answers."""
    with running(max_tokens=8) as server:
        yield server


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with running(key=KEY, max_tokens=8) as server:
        yield server


def test_the_list_names_every_program_and_how_it_was_tested() -> None:
    result = run_cli("connect")
    assert result.code == 0 and result.out.decode().splitlines()[1].startswith("aider")
    rows = run_cli("connect", "--json").json["connections"]
    assert [row["name"] for row in rows] == names() and all(row["tested"] for row in rows)


@pytest.mark.parametrize("name", names())
def test_settings_are_for_the_model_that_is_served(server: Running, name: str) -> None:
    result = run_cli("connect", name, "--url", server.url)
    printed = result.out.decode()
    assert result.code == 0 and "$" not in printed and server.url in printed
    assert "tiny" in printed or name == "open-webui"
    assert f"a server answers at {server.url}, with tiny" in result.err


@pytest.mark.parametrize("name", names())
def test_without_a_server_the_settings_are_those_that_one_will_have(name: str) -> None:
    result = run_cli("connect", name, "--url", NOBODY + "/v1/")
    assert result.code == 0 and YOUR_KEY not in result.out.decode()
    assert f"no server answers at {NOBODY} yet: localllm serve tiny" in result.err
    is_told = "tokens of context tiny has is not known here: 8192 stands for it" in result.err
    assert is_told == (b"8192" in result.out or ": 8192," in result.err)


@pytest.mark.parametrize("connection", CONNECTIONS, ids=lambda each: each.name)
def test_no_name_of_a_model_breaks_out_of_what_is_printed(connection: Any) -> None:
    for part in connection.filled(Target(NOBODY, TRICKY)):
        assert parsed(part.language, part.text) is not None


def parsed(language: str, text: str) -> Any:
    """Raises for what the language does not take."""
    match language:
        case "json":
            return json.loads(text)
        case "yaml":
            return yaml.safe_load(text)
        case "toml":
            return tomllib.loads(text)
        case "python":
            return compile(text, "<printed>", "exec")
        case "javascript" if shutil.which("node") is None:
            return text
        case "javascript":
            command = ["node", "--input-type=module", "--check"]
        case _:
            command = ["sh", "-n"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    return shlex.split(text, comments=True) if language == "sh" else text


@pytest.mark.parametrize("connection", CONNECTIONS, ids=lambda each: each.name)
def test_what_is_printed_can_go_into_its_file_as_it_is(connection: Any) -> None:
    """The first file, or where there is none, what the terminal is given; all else is told beside it."""
    result = run_cli("connect", connection.name, "--url", NOBODY)
    printed = result.out.decode()
    filled = connection.filled(Target(NOBODY, "tiny"))
    whole = next((part for part in filled if part.language != "sh"), filled[0])
    assert parsed(whole.language, printed) is not None and printed == whole.text + "\n"
    for part in filled:
        assert f"# {part.where}\n" in result.err and (part is whole or f"{part.text}\n" in result.err)


def test_a_key_is_asked_for_where_the_server_wants_one_and_never_printed(locked: Running, monkeypatch: Patch) -> None:
    result = run_cli("connect", "openai", "--url", locked.url)
    assert YOUR_KEY in result.out.decode() and "wants its API key" in result.err
    monkeypatch.setenv("LOCALLLM_API_KEY", KEY)
    result = run_cli("connect", "openai", "--url", locked.url)
    assert YOUR_KEY in result.out.decode() and KEY not in result.out.decode() + result.err
    assert "a server answers" in result.err


def test_what_a_program_needs_and_the_model_has_not_is_told(server: Running) -> None:
    result = run_cli("connect", "claude-code", "--url", server.url, "--model", "tinny")
    assert "the model 'tinny' is not served there" in result.err
    assert "wants 32768 tokens of context; there are 1024" in run_cli("connect", "claude-code", "--url", server.url).err


def test_a_program_is_found_by_a_word_of_its_title() -> None:
    assert run_cli("connect", "vscode").out == run_cli("connect", "continue").out != b""
    assert run_cli("connect", "code").code == 2  # of several


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("aidr", "localllm connect aider"),
        ("aider --url ftp://box", "--url http://127.0.0.1:8420"),
        ("aider --url http://", "--url http://127.0.0.1:8420"),
        ("aider --url http://box:port", "--url http://127.0.0.1:8420"),
        ("aider --url http://me:secret@box", "--url http://127.0.0.1:8420"),
        ("aider --url http://box/api", "--url http://box"),
        ("aider --model ''", "--model tiny"),
        ("--url http://box", "localllm connect"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_helps(line: str, fix: str) -> None:
    result = run_cli("connect", *shlex.split(line))
    assert result.code == 2 and fix in result.err and result.out == b""


def test_the_shell_completes_names() -> None:
    assert complete_connections("CL") == ["claude-code"] and complete_connections("") == names()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"data": 1}', b'{"data": [{"id": 1}]}', b"<html>"])
def test_what_is_no_server_of_models_is_not_taken_for_one(data: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        assert ask_models(f"http://127.0.0.1:{other.server_port}", None).state == "other"


@pytest.mark.parametrize("name", ["openai", "anthropic", "ollama"])
def test_the_libraries_tell_a_tale_by_what_is_printed(locked: Running, name: str) -> None:
    printed = parts(name, "--url", locked.url, "--model", "tiny")[-1]
    assert len(run_python(printed.replace(YOUR_KEY, KEY))) > 10


def run_python(text: str) -> str:
    told = io.StringIO()
    scope: Json = {}
    with contextlib.redirect_stdout(told):
        exec(compile(text, "<printed>", "exec"), scope)
    client = scope["client"]
    getattr(client, "close", getattr(client, "_client", client).close)()
    return told.getvalue()


def require_tale(command: list[str], home: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0 and len(ended.stdout) > 10, ended.stderr


@pytest.mark.slow
def test_langchain_tells_a_tale_by_what_is_printed(server: Running, tmp_path: Path) -> None:
    printed = parts("langchain", "--url", server.url)[-1]
    require_tale([interpreter(installed("langchain-openai")), "-c", printed], tmp_path)


def test_the_ai_sdk_tells_a_tale_by_what_is_printed(server: Running, tmp_path: Path) -> None:
    place = installed("ai-sdk")
    tale = tmp_path / "tale.mjs"
    tale.write_text(parts("ai-sdk", "--url", server.url)[-1])
    (tmp_path / "node_modules").symlink_to(place / "node_modules")
    require_tale(["node", "--preserve-symlinks", str(tale)], tmp_path)


def streamed(url: str, key: str, body: Json) -> list[Any]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx2.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as reply:
        assert reply.status_code == 200, reply.read()
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_what_zed_asks_is_answered(server: Running) -> None:
    settings, export = parts("zed", "--url", server.url)
    provider = json.loads(settings)["language_models"]["openai_compatible"]["local-llm"]
    assert json.loads(settings)["agent"]["default_model"] == {"provider": "local-llm", "model": "tiny"}
    [model] = provider["available_models"]
    assert model["max_tokens"] == 1024
    assert (model["capabilities"]["images"], model["capabilities"]["tools"]) == (False, True)
    messages = [{"role": "system", "content": "You tell tales."}, TALE]
    body = {"model": model["name"], "messages": messages, "temperature": 1.0, "tools": OPENAI_TOOLS}
    body |= {"tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}}
    key = variables(export)["LOCAL_LLM_API_KEY"]
    *said, usage = streamed(f"{provider['api_url']}/chat/completions", key, body)
    assert said[-1]["choices"][0]["finish_reason"] == "length" and usage["usage"]["total_tokens"] > 0


def test_what_open_webui_asks_is_answered(server: Running) -> None:
    [text] = parts("open-webui", "--url", server.url)
    environ = variables(text)
    url, key = environ["OPENAI_API_BASE_URL"], environ["OPENAI_API_KEY"]
    models = httpx2.get(f"{url}/models", headers={"authorization": f"Bearer {key}"}).json()["data"]
    assert models[0]["id"] == "tiny"
    said = streamed(f"{url}/chat/completions", key, {"model": "tiny", "messages": [TALE], "stream": True})
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    title = {"model": "tiny", "messages": [TALE], "stream": False, "max_completion_tokens": 50}
    assert httpx2.post(f"{url}/chat/completions", json=title, timeout=PATIENCE_S).status_code == 200


def test_what_aider_asks_is_answered(server: Running) -> None:
    text, metadata, _ = parts("aider", "--url", server.url)
    settings = yaml.safe_load(text)
    assert json.loads(metadata)[settings["model"]]["max_input_tokens"] == 1024
    provider, _, model = settings["model"].partition("/")
    body = {"model": model, "messages": [TALE], "stream": True, "temperature": 0}
    said = streamed(f"{settings['openai-api-base']}/chat/completions", settings["openai-api-key"], body)
    assert provider == "openai" and said[-1]["choices"][0]["finish_reason"] == "length"


def test_what_continue_asks_is_answered(server: Running) -> None:
    [text] = parts("continue", "--url", server.url)
    settings = yaml.safe_load(text)
    assert {"name", "version", "schema", "models"} == settings.keys() and settings["schema"] == "v1"
    [model] = settings["models"]
    assert model["provider"] == "openai" and set(model["roles"]) <= {"chat", "edit", "apply", "autocomplete"}
    assert model["defaultCompletionOptions"]["contextLength"] == 1024 and model["capabilities"] == ["tool_use"]
    body = {"model": model["model"], "messages": [TALE], "stream": True, "stream_options": {"include_usage": True}}
    body["tools"] = OPENAI_TOOLS
    assert streamed(f"{model['apiBase']}/chat/completions", model["apiKey"], body)[-1]["usage"]["completion_tokens"] > 0


def test_what_claude_code_asks_is_answered(server: Running) -> None:
    """As version 2.1.197 does, with tools and a system prompt for which the built-in model has room."""
    settings, _ = parts("claude-code", "--url", server.url)
    environ = json.loads(settings)["env"]
    body = {
        "model": environ["ANTHROPIC_MODEL"],
        "messages": [{"role": "user", "content": [text_block("<system-reminder>\n"), text_block(TALE["content"])]}],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0df; cc_entrypoint=sdk-cli;"},
            text_block("You tell tales."),
        ],
        "metadata": {"user_id": '{"device_id":"0"}'},
        "max_tokens": 64,
        "thinking": {"type": "adaptive"},
        "tools": [{**tool, "eager_input_streaming": True} for tool in ANTHROPIC_TOOLS],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    assert httpx2.head(environ["ANTHROPIC_BASE_URL"]).status_code == 200
    url = f"{environ['ANTHROPIC_BASE_URL']}/v1/messages?beta=true"
    said = streamed(url, environ["ANTHROPIC_AUTH_TOKEN"], body)
    assert said[-1]["type"] == "message_stop"


def text_block(text: str) -> Json:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


ASK = "What is the owl of owl.txt called?"
KNOWN = "She is called Minerva."


def run_agent(name: str, words: Sequence[str], server: Running, owl: Path, **more: str) -> str:
    """What the program prints, in the folder of the file and with the settings that are printed for it. owl: is to be
    found in it. more: of its environment. Skips where it is not installed."""
    program, *arguments = words
    has_own = name in [path.stem for path in environments()]
    found = shutil.which(program, path=str(installed(name) / "node_modules" / ".bin") if has_own else None)
    if found is None:
        pytest.skip(f"{program} is not on the PATH")
    home = owl.parent.parent
    for part in run_cli("connect", name, "--url", server.url, "--json").json["parts"]:
        if part["where"].startswith("~/"):
            file = home / part["where"].removeprefix("~/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(part["text"])
    # They reach for nothing but the server, and write nothing but into their own home.
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), **QUIET, **more}
    how: Json = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "stdin": subprocess.DEVNULL}
    ended = subprocess.run([found, *arguments], env=environ, cwd=owl.parent, **how)
    assert ended.returncode == 0, (ended.stdout, ended.stderr, server.log)
    return ended.stdout


QUIET = {"CONTINUE_TELEMETRY_ENABLED": "0", "PI_OFFLINE": "1"}
QUIET |= {f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")}


@pytest.fixture
def owl(tmp_path: Path) -> Path:
    """A file in a project."""
    file = tmp_path / "project" / "owl.txt"
    file.parent.mkdir()
    file.write_text("The owl is called Minerva.\n")
    return file


def require_result_went_back(server: Running) -> None:
    """Whether the model was asked again after its call."""
    answered = [entry for entry in server.log if entry.startswith("POST") and " 200 " in entry]
    assert len(answered) >= 2, server.log


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The built-in model with more context than it has learned, as agents begin with some thousand tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY_DIRECTORY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": ROOMY}))
    with running(folder, ctx=ROOMY) as server:
        yield server


@pytest.mark.supports("@openai/codex", "/v1/responses", "answer, streamed")
@pytest.mark.supports("@openai/codex", "/v1/responses", "tools: optional calls")
@pytest.mark.supports("@openai/codex", "/v1/responses", "tools: call, streamed", "tools: result sent back")
def test_codex_runs_a_command_that_the_model_calls(roomy: Running, calls: Callable[..., None], owl: Path) -> None:
    """With less to begin with than it has by itself."""
    calls({"exec_command": {"cmd": "cat owl.txt"}}, KNOWN)
    instructions = owl.with_name("instructions.md")
    instructions.write_text("You help.")
    less = [f"model_instructions_file={json.dumps(str(instructions))}", "skills.bundled.enabled=false"]
    off = ["multi_agent", "goals", "plugins"]
    flags = [*(word for each in less for word in ("-c", each)), *(word for each in off for word in ("--disable", each))]
    said = run_agent("codex", [*CODEX, *flags, ASK], roomy, owl)
    assert said.strip() == KNOWN
    require_result_went_back(roomy)


CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
AIDER = ["aider", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable"]
OPENCODE = ["opencode", "run", "--title", "An owl"]


@pytest.mark.slow
@pytest.mark.supports("opencode-ai", "/v1/chat/completions", "answer, streamed")
@pytest.mark.supports("opencode-ai", "/v1/chat/completions", "tools: optional calls")
@pytest.mark.supports("opencode-ai", "/v1/chat/completions", "tools: call, streamed", "tools: result sent back")
def test_opencode_runs_a_tool_that_the_model_calls(roomy: Running, calls: Callable[..., None], owl: Path) -> None:
    """With less to begin with than it has by itself."""
    calls({"read": {"filePath": str(owl)}}, KNOWN)
    less = {"tools": {"*": False, "read": True}, "agent": {"build": {"prompt": "You help."}}}
    said = run_agent("opencode", [*OPENCODE, ASK], roomy, owl, OPENCODE_CONFIG_CONTENT=json.dumps(less))
    assert KNOWN in said
    require_result_went_back(roomy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("claude-code", {"Read": "file_path"}, ["claude", "-p", ASK]),
        ("continue", {"Read": "filepath"}, ["cn", "--config", "{home}/.continue/config.yaml", "-p", ASK]),
        ("codex", {"exec_command": "cmd"}, [*CODEX, ASK]),
        ("opencode", {"read": "filePath"}, ["opencode", "run", ASK]),
        ("pi", {"read": "path"}, ["pi", "--provider", "localllm", "--model", "wide", "-p", ASK]),
        ("aider", {}, [*AIDER, "--message", ASK]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_program_itself_is_answered(
    calls: Callable[..., None], name: str, call: dict[str, str], words: list[str], owl: Path
) -> None:
    """With its own tools, one of which the model calls."""
    home = owl.parent.parent
    given = f"cat {owl}" if name == "codex" else str(owl)
    calls({tool: {parameter: given} for tool, parameter in call.items()}, KNOWN)
    with running(write_checkpoint(home / "wide", layers=1, context=WIDE), ctx=WIDE) as server:
        said = run_agent(name, [word.format(home=home) for word in words], server, owl)
        assert "Minerva" in said, (said, server.log)
        if call:
            require_result_went_back(server)
