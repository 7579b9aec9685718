"""The settings by which other programs talk to a server of ours: one row each, filled in for an address.

Every row says how far it was tested; tests run what is printed (docs/connect.md has the versions). Knows no server and
asks none: `runtime/server_probe.py` does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Template
from types import MappingProxyType
from typing import Literal

PLACEHOLDER_KEY = "localllm"  # clients want one; a server without a key does not look at it
YOUR_KEY = "YOUR_API_KEY"
USUAL_CTX = 8192  # where it is not known
_ANSWER = 4  # of so many parts of the context one is for the answer, where a program divides it

Language = Literal["yaml", "json", "toml", "sh", "python", "javascript"]


@dataclass(frozen=True)
class Target:
    """The server: its address without a path, the model by the name it is asked for, the context in tokens, whether
    it takes tools, and what is to be sent as its key."""

    url: str
    model: str
    ctx: int = USUAL_CTX
    has_tools: bool = True
    key: str = PLACEHOLDER_KEY


@dataclass(frozen=True)
class Part:
    """A text and where it goes. template: `$name` stands for a value of the target, as the language writes one."""

    where: str
    language: Language
    template: str


@dataclass(frozen=True)
class Filled:
    """A part of which nothing is left to be filled in."""

    where: str
    language: Language
    text: str


@dataclass(frozen=True)
class ClientConfig:
    """A program. speaks: whose dialect. tested: with what, and how. is_agent: it works through tools, and begins with
    many thousand tokens. least_ctx: tokens below which it does nothing useful. note: what else there is to do."""

    name: str
    title: str
    speaks: Literal["OpenAI", "Anthropic", "Ollama"]
    tested: str
    parts: tuple[Part, ...]
    is_agent: bool = False
    least_ctx: int = 0
    note: str = ""

    def filled(self, target: Target) -> tuple[Filled, ...]:
        """Its parts, for this server."""
        return tuple(_filled(part, target) for part in self.parts)


def _filled(part: Part, target: Target) -> Filled:
    values = {
        "url": target.url,
        "v1": f"{target.url}/v1",
        "model": target.model,
        "openai_model": f"openai/{target.model}",
        "own_model": f"localllm/{target.model}",
        "key": target.key,
        "bearer": f"Bearer {target.key}",
    }
    tool_use = "[tool_use]" if target.has_tools else "[]"
    sizes = {"ctx": str(target.ctx), "answer": str(max(1, target.ctx // _ANSWER))}
    bare = {**sizes, "has_tools": json.dumps(target.has_tools), "tool_use": tool_use}
    quoted = {name: _QUOTES[part.language](value) for name, value in values.items()}
    return Filled(part.where, part.language, Template(part.template).substitute(quoted, **bare).strip("\n"))


def _toml(text: str) -> str:
    """A basic string, which knows no surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


_QUOTES: Mapping[Language, Callable[[str], str]] = MappingProxyType(
    {
        "yaml": json.dumps,
        "json": json.dumps,
        "toml": _toml,
        "python": json.dumps,
        "javascript": json.dumps,
        "sh": shlex.quote,
    }
)

_ASK = "A tale about an owl, please."

CONNECTIONS: tuple[ClientConfig, ...] = (
    ClientConfig(
        "aider",
        "aider, pair programming in the terminal",
        "OpenAI",
        "run with aider 0.86.2",
        (
            Part(
                "~/.aider.conf.yml",
                "yaml",
                """
model: $openai_model
openai-api-base: $v1
openai-api-key: $key
show-model-warnings: false
""",
            ),
            Part(
                "~/.aider.model.metadata.json",
                "json",
                """
{
  $openai_model: {
    "litellm_provider": "openai",
    "mode": "chat",
    "max_input_tokens": $ctx,
    "max_output_tokens": $ctx,
    "input_cost_per_token": 0,
    "output_cost_per_token": 0
  }
}
""",
            ),
            Part("the terminal", "sh", "aider"),
        ),
        least_ctx=8192,
    ),
    ClientConfig(
        "continue",
        "Continue, for VS Code, JetBrains and the terminal",
        "OpenAI",
        "run with Continue's CLI 1.5.47, which reads the same file as its extensions",
        (
            Part(
                "~/.continue/config.yaml",
                "yaml",
                """
name: localllm
version: 1.0.0
schema: v1
models:
  - name: $model
    provider: openai
    model: $model
    apiBase: $v1
    apiKey: $key
    roles: [chat, edit, apply]
    capabilities: $tool_use
    defaultCompletionOptions:
      contextLength: $ctx
""",
            ),
        ),
        is_agent=True,
        least_ctx=8192,
    ),
    ClientConfig(
        "zed",
        "Zed, the editor",
        "OpenAI",
        "as Zed documents it (2026-09); the requests that it makes are replayed",
        (
            Part(
                "~/.config/zed/settings.json",
                "json",
                """
{
  "language_models": {
    "openai_compatible": {
      "local-llm": {
        "api_url": $v1,
        "available_models": [
          {
            "name": $model,
            "display_name": $model,
            "max_tokens": $ctx,
            "capabilities": {
              "tools": $has_tools,
              "images": false,
              "parallel_tool_calls": false,
              "prompt_cache_key": false
            }
          }
        ]
      }
    }
  },
  "agent": {
    "default_model": { "provider": "local-llm", "model": $model }
  }
}
""",
            ),
            Part("the environment that Zed is started in", "sh", "export LOCAL_LLM_API_KEY=$key"),
        ),
        is_agent=True,
        least_ctx=8192,
        note=r"on Windows the file is %APPDATA%\Zed\settings.json; keys that stand there already are merged with these",
    ),
    ClientConfig(
        "open-webui",
        "Open WebUI, chats in the browser",
        "OpenAI",
        "as Open WebUI documents it (0.6); the requests that it makes are replayed",
        (
            Part(
                "the terminal",
                "sh",
                """
export OPENAI_API_BASE_URL=$v1
export OPENAI_API_KEY=$key
export ENABLE_OLLAMA_API=false
open-webui serve
""",
            ),
        ),
        note="it reads these at its first start and keeps them; later its admin settings, Connections, have them. From "
        "a container the address is http://host.docker.internal:PORT/v1, and the server needs --host 0.0.0.0",
    ),
    ClientConfig(
        "claude-code",
        "Claude Code, the coding agent",
        "Anthropic",
        "run with Claude Code 2.1.197 and 2.1.331",
        (
            Part(
                "~/.claude/settings.json",
                "json",
                """
{
  "env": {
    "ANTHROPIC_BASE_URL": $url,
    "ANTHROPIC_AUTH_TOKEN": $key,
    "ANTHROPIC_MODEL": $model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": $model,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"
  }
}
""",
            ),
            Part("the terminal", "sh", "claude"),
        ),
        is_agent=True,
        least_ctx=32768,
        note="a login or ANTHROPIC_API_KEY of yours is not used while these stand there",
    ),
    ClientConfig(
        "codex",
        "Codex, OpenAI's coding agent",
        "OpenAI",
        "run with Codex CLI 0.169",
        (
            Part(
                "~/.codex/config.toml",
                "toml",
                """
model = $model
model_provider = "localllm"
model_context_window = $ctx
web_search = "disabled"

[model_providers.localllm]
name = "localllm"
base_url = $v1
wire_api = "responses"
http_headers = { Authorization = $bearer }

[analytics]
enabled = false
""",
            ),
            Part("the terminal", "sh", "codex"),
        ),
        is_agent=True,
        least_ctx=32768,
        note="tables that stand in the file already are kept: the first four lines belong above them",
    ),
    ClientConfig(
        "opencode",
        "OpenCode, the coding agent",
        "OpenAI",
        "run with OpenCode 1.18",
        (
            Part(
                "~/.config/opencode/opencode.json",
                "json",
                """
{
  "provider": {
    "localllm": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "localllm",
      "options": { "baseURL": $v1, "apiKey": $key },
      "models": {
        $model: {
          "tool_call": $has_tools,
          "limit": { "context": $ctx, "output": $answer }
        }
      }
    }
  },
  "model": $own_model,
  "small_model": $own_model
}
""",
            ),
            Part("the terminal", "sh", "opencode"),
        ),
        is_agent=True,
        least_ctx=32768,
        note="it keeps room for an answer free of a conversation, here a quarter of the context",
    ),
    ClientConfig(
        "pi",
        "pi, the coding agent",
        "OpenAI",
        "run with pi 0.73 and 0.74",
        (
            Part(
                "~/.pi/agent/models.json",
                "json",
                """
{
  "providers": {
    "localllm": {
      "baseUrl": $v1,
      "api": "openai-completions",
      "apiKey": $key,
      "models": [
        { "id": $model, "contextWindow": $ctx, "maxTokens": $answer }
      ]
    }
  }
}
""",
            ),
            Part("the terminal", "sh", "pi --provider localllm --model $model"),
        ),
        is_agent=True,
        least_ctx=8192,
    ),
    ClientConfig(
        "ai-sdk",
        "the AI SDK, the library for JavaScript",
        "OpenAI",
        "run with ai 7.0 and @ai-sdk/openai-compatible 3.0",
        (
            Part("the terminal", "sh", "npm install ai @ai-sdk/openai-compatible"),
            Part(
                "JavaScript (.mjs)",
                "javascript",
                f"""
import {{ createOpenAICompatible }} from "@ai-sdk/openai-compatible";
import {{ generateText }} from "ai";

const localllm = createOpenAICompatible({{
  name: "localllm",
  baseURL: $v1,
  apiKey: $key,
  supportsStructuredOutputs: true,
}});
const {{ text }} = await generateText({{
  model: localllm($model),
  prompt: "{_ASK}",
}});
console.log(text);
""",
            ),
        ),
        note="with @ai-sdk/anthropic the baseURL is the same",
    ),
    ClientConfig(
        "langchain",
        "LangChain, the library",
        "OpenAI",
        "run with langchain-openai 1.7",
        (
            Part("the terminal", "sh", "pip install langchain-openai"),
            Part(
                "Python",
                "python",
                f"""
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=$v1, api_key=$key, model=$model)
print(model.invoke("{_ASK}").text)
""",
            ),
        ),
    ),
    ClientConfig(
        "openai",
        "OpenAI's library",
        "OpenAI",
        "run with openai 3.54",
        (
            Part("the terminal", "sh", "pip install openai"),
            Part(
                "Python",
                "python",
                f"""
from openai import OpenAI

client = OpenAI(base_url=$v1, api_key=$key)
reply = client.chat.completions.create(
    model=$model,
    messages=[{{"role": "user", "content": "{_ASK}"}}],
)
print(reply.choices[0].message.content)
""",
            ),
        ),
    ),
    ClientConfig(
        "anthropic",
        "Anthropic's library",
        "Anthropic",
        "run with anthropic 2.12",
        (
            Part("the terminal", "sh", "pip install anthropic"),
            Part(
                "Python",
                "python",
                f"""
from anthropic import Anthropic

client = Anthropic(base_url=$url, api_key=$key)
reply = client.messages.create(
    model=$model,
    max_tokens=256,
    messages=[{{"role": "user", "content": "{_ASK}"}}],
)
print(reply.content[0].text)
""",
            ),
        ),
    ),
    ClientConfig(
        "ollama",
        "Ollama's library, and programs that speak to Ollama",
        "Ollama",
        "run with ollama 0.6.3",
        (
            Part("the terminal", "sh", "pip install ollama"),
            Part(
                "Python",
                "python",
                f"""
from ollama import Client

client = Client(host=$url, headers={{"Authorization": $bearer}})
reply = client.chat(
    model=$model,
    messages=[{{"role": "user", "content": "{_ASK}"}}],
)
print(reply.message.content)
""",
            ),
        ),
        note="programs with no setting for the address look at port 11434: localllm serve --also-ollama-port",
    ),
)


def names() -> list[str]:
    """Return the programs' names."""
    return [each.name for each in CONNECTIONS]
