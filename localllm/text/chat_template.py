"""Turn chat messages into the text, or the ids, that a model was trained on.

A special token is one that the template itself writes; the same text inside messages, tools or variables stays ordinary
text, so nobody can forge a role. template_sandbox.py runs the template, template_marks.py finds the special tokens that
it wrote. Knows nothing about sampling or models.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError

from localllm.errors import MODEL, CheckpointError, Fix, TemplateError, TokenizerError, UsageError
from localllm.hub.gguf_files import place_of
from localllm.models.strict_json import JsonLimits, parse_json
from localllm.text.template_marks import SpecialMarks, WrittenText
from localllm.text.template_sandbox import (
    TIME_LIMIT_S,
    Budget,
    LimitError,
    RefusalError,
    TemplateEnvironment,
)
from localllm.text.tokenizer import Tokenizer, valid_unicode
from localllm.text.tokenizer_files import SPECIAL_ROLES, TokenizerFiles, special_roles

_MESSAGES_LIMITS = JsonLimits(containers=300_000, elements=2_000_000)  # braces and commas in the texts count as well
_ADDITIONAL = "additional_chat_templates"
_MOST_ADDITIONAL = 16
_MAX_DEPTH = 100  # of lists and mappings within one another
MAX_SOURCE_CHARS = 64 << 10  # twice the longest in use; bounds the time that compiling takes

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatInput:
    """The input of a chat template.

    add_generation_prompt: the text ends where the assistant begins to speak; None if a file did not say: then plain
    rendering leaves it out, as transformers does, and a prompt for generation has it.
    variables: anything else a template may read (enable_thinking, documents, bos_token, ...).
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opens_turn(self) -> bool:
        """A prompt for generation ends where the assistant begins to speak."""
        return self.add_generation_prompt is not False

    def __post_init__(self) -> None:
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in self.variables:
                raise UsageError(f"the template variable {name!r} is taken", why="it is an argument of its own")


class ChatTemplate:
    """The chat template of one model, compiled once. Safe to use from several threads, one rendering at a time."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
        now: Callable[[], datetime] = datetime.now,
        marks: SpecialMarks | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        """Compile a template. Raises TemplateError for a broken one.

        source: one template, or several by name ("default", "tool_use").
        special_tokens: bos_token and the like.
        origin: the file to name in errors.
        now: the clock of `strftime_now`.
        marks: write these in place of the special tokens that the template itself writes.
        time_limit_s: processor time of one rendering.
        """
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        mark = marks.mark if marks else str
        self.special_tokens = {role: mark(text) for role, text in (special_tokens or {}).items()}
        self._origin = origin
        self._now = now
        self._time_limit_s = time_limit_s
        self._marked: tuple[SpecialMarks, ChatTemplate] | None = None
        self._lock = threading.Lock()  # the environment has one budget
        self._environment = TemplateEnvironment(now, mark)
        self._compiled = {name: self._compile(text) for name, text in self.sources.items()}

    @classmethod
    def load_or_why_not(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | TemplateError:
        """Return the error of `load`, for a model that can go on without a template as one that continues text."""
        try:
            return cls.load(directory, tokenizer)
        except TemplateError as error:
            return error

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """The template of a model folder; without a tokenizer, its special tokens are those of tokenizer_config.json.

        Raises TemplateError if it has none, or a broken or hostile one.
        """
        files = TokenizerFiles(directory)
        found = ((name, read(files, name)) for name, read in _SOURCES.items() if files.has(name))
        name, source = next(((name, source) for name, source in found if source), (_ADDITIONAL, {}))
        more = _additional(files)
        if source or more:
            sources = {"default": source} if isinstance(source, str) else source
            special_tokens = tokenizer.special_tokens if tokenizer else special_roles(files.config())
            return cls({**sources, **more}, special_tokens=special_tokens, origin=str(directory / name))
        raise _without_template(place_of(directory), directory)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as transformers' apply_chat_template(tokenize=False) would give it.

        Raises TemplateError if the template refuses the messages, fails, or takes too much time or memory;
        UsageError for a variable that would replace one of the template's functions.
        """
        taken = sorted(set(variables) & set(self._environment.globals))
        if taken:
            raise UsageError(f"the template variable {taken[0]!r} is taken", why="it is a function of every template")
        values = {**self.special_tokens, "documents": None, **variables, "messages": list(messages)}
        values |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        plain = plain_data(values)
        with self._lock:
            template = self._choose(tools)
            try:
                return self._run(template, plain)
            except TemplateError as error:
                joined = _with_joined_text(plain["messages"])
                if joined is None or isinstance(error.__cause__, (LimitError, MemoryError, SecurityError)):
                    raise
            return self._run(template, {**plain, "messages": joined})

    def render_chat(self, chat: ChatInput) -> str:
        """`render` of everything in `chat`."""
        return self.render(
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=bool(chat.add_generation_prompt),
            **chat.variables,
        )

    def asks_for(self, variable: str) -> bool:
        """Tell if the template reads a variable beside the messages."""
        return variable in self._variables

    @cached_property
    def _variables(self) -> AbstractSet[str]:
        trees = (self._environment.parse(source) for source in self.sources.values())
        return frozenset[str]().union(*map(jinja2.meta.find_undeclared_variables, trees))

    def with_marks(self, specials: Collection[str], taken: AbstractSet[str]) -> tuple[SpecialMarks, ChatTemplate]:
        """Return this template, writing marks in place of `specials`. taken: characters that no mark may be."""
        known = self._marked
        if known is None or known[0].specials != frozenset(specials) or known[0].clash_with(taken):
            own = (*self.sources.values(), *self.special_tokens.values())
            marks = SpecialMarks(specials, set(taken).union(*own))
            options: dict[str, Any] = {"special_tokens": self.special_tokens, "origin": self._origin, "now": self._now}
            known = self._marked = marks, ChatTemplate(self.sources, marks=marks, **options)
        return known

    def _choose(self, tools: object) -> jinja2.Template:
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise TemplateError(
                f"{self._origin} has no default chat template", why=f"only: {', '.join(sorted(self._compiled))}"
            )
        return self._compiled[name]

    def _compile(self, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise self._error("is too long", f"{len(source)} characters; at most {MAX_SOURCE_CHARS}")
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise self._error("is broken", f"line {error.lineno}: {error.message}") from error
        except (ValueError, SyntaxError, RecursionError, MemoryError, jinja2.TemplateError) as error:
            raise self._error("cannot be compiled", f"{type(error).__name__}: {str(error)[:200]}") from error

    def _run(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        budget = self._environment.budget = Budget(self._time_limit_s)
        try:
            budget.weigh(values)
            text = self._environment.concat(template.root_render_func(template.new_context(values)))
            return valid_unicode(text)
        except RefusalError as error:
            raise self._error("refuses these messages", str(error)) from error
        except (LimitError, MemoryError, RecursionError) as error:
            raise self._error(f"takes too much{_line(template, error)}", str(error) or "out of memory") from error
        except SecurityError as error:
            raise self._error(f"does what no template may{_line(template, error)}", str(error)) from error
        except Exception as error:  # a stranger's program: whatever it raises is its failure, not ours
            why = f"{type(error).__name__}: {str(error)[:500]}"
            raise self._error(f"fails{_line(template, error)}", why) from error
        finally:
            self._environment.budget = Budget()  # lets go of the values of this rendering

    def _error(self, what: str, why: str) -> TemplateError:
        return TemplateError(
            f"{self._origin} {what}", why=why, fix=Fix.command("run", MODEL, "--raw", "--prompt", "TEXT")
        )


def encode_chat(template: ChatTemplate, tokenizer: Tokenizer, chat: ChatInput) -> list[int]:
    """Return the prompt ids of `chat`: special tokens only where the template writes them, and one BOS at most."""
    messages, tools, variables = plain_data([list(chat.messages), chat.tools, chat.variables])
    taken = frozenset(json.dumps([messages, tools, variables], ensure_ascii=False))
    marks, marked = template.with_marks(tokenizer.special_texts, taken)
    for message, given in zip(messages, chat.messages, strict=True):
        if isinstance(text := given.get("content"), WrittenText):
            message["content"] = marks.marked(text)
    roles = {name: marks.mark(variables[name]) for name in SPECIAL_ROLES if isinstance(variables.get(name), str)}
    text = marked.render(messages, tools=tools, add_generation_prompt=chat.opens_turn, **{**variables, **roles})
    ids = tokenizer.with_bos(tokenizer.encode_pieces(marks.pieces(text)))
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def end_of_turn_id(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the token that the template writes behind each answer, the last one or not; None where it writes none."""
    user, answer = {"role": "user", "content": "A question."}, "An answer that nobody gives."
    turn = [user, {"role": "assistant", "content": answer}]
    try:
        texts = [template.render(turn + more, add_generation_prompt=False) for more in ([], [user])]
    except TemplateError:
        return None
    ends = {tokenizer.leading_token(text.rpartition(answer)[2].lstrip()) if answer in text else None for text in texts}
    return ends.pop() if len(ends) == 1 else None


def parse_messages_file(text: str) -> ChatInput:
    """Read a JSON array of messages, or an object {messages, tools, add_generation_prompt, ...} of template variables.

    Raises UsageError for what is malformed.
    """
    try:
        data = parse_json(valid_unicode(text).encode(), "the messages file", _MESSAGES_LIMITS)
    except CheckpointError as error:
        raise UsageError(error.what, why=error.why) from error
    return as_chat_input(data)


def as_chat_input(data: object) -> ChatInput:
    """Read JSON that is parsed already, as `parse_messages_file` does; an object loses its keys. Raises UsageError."""
    if isinstance(data, list):
        return ChatInput(messages=_messages(data))
    if not isinstance(data, dict):
        raise UsageError(
            "the messages file holds no messages", why=f"a {_kind(data)}, not an array of messages or an object"
        )
    if "messages" not in data:
        why = f"its keys: {', '.join(map(repr, data))[:200]}"
        fix = "a single message goes into an array: [{...}]" if "role" in data else ""
        fix = "localllm sessions import FILE, which is for exported chats" if "sessions" in data else fix
        raise UsageError("the messages file has no messages", why=why, fix=fix)
    generation = data.pop("add_generation_prompt", None)
    if generation is not None and not isinstance(generation, bool):
        raise UsageError("add_generation_prompt is not a boolean", why=f"it is a {_kind(generation)}")
    messages, tools = _messages(data.pop("messages")), data.pop("tools", None)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UsageError("the tools are not an array of objects", why=f"they are a {_kind(tools)}")
    return ChatInput(messages, tools, generation, data)


def plain_data(value: Any, depth: int = 0) -> Any:
    """Copy JSON-like data to plain types: objects have methods that a sandbox does not know.

    Raises TemplateError where it is nested too deeply, UsageError for what is not a JSON value.
    """
    if depth > _MAX_DEPTH:
        raise TemplateError("the messages are nested too deeply", why=f"more than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return valid_unicode(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, depth + 1) for item in value]
    raise UsageError("a template variable is not a JSON value", why=f"a {type(value).__name__}")


def _with_joined_text(messages: list[Message]) -> list[Message] | None:
    """Join lists of text parts to one text each, for a template that knows no parts; None: nothing to join."""
    joined = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list):
            texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
            if not all(isinstance(text, str) for text in texts):
                return None  # an image, say
            message = {**message, "content": "\n".join(texts)}
        joined.append(message)
    return joined if joined != messages else None


def _line(template: jinja2.Template, error: BaseException) -> str:
    """Return " in line N", the line of the template that was being run, where it is known."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__jinja_template__") is template:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return "" if line is None else f" in line {line}"


def _messages(data: Any) -> list[Message]:
    if not isinstance(data, list):
        raise UsageError("the messages are not an array", why=f"they are a {_kind(data)}", fix="put them into [...]")
    if not data:
        raise UsageError("there are no messages", why="the array is empty")
    for index, message in enumerate(data):
        name = f"message {index + 1} of {len(data)}"
        if not isinstance(message, dict):
            raise UsageError(f"{name} is not an object", why=f"it is a {_kind(message)}")
        if not isinstance(message.get("role"), str):
            raise UsageError(f"{name} has no role", why='every message says who speaks: {"role": "user", ...}')
        if "content" not in message and not message.get("tool_calls"):
            raise UsageError(
                f"{name} has no content", why='every message has a text: {"role": "user", "content": "..."}'
            )
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(isinstance(part, str | dict) for part in parts):
            raise UsageError(f"the content of {name} is neither text nor a list of parts", why=f"a {_kind(content)}")
    return data


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _from_jinja(files: TokenizerFiles, name: str) -> str:
    try:
        return files.text(name, 4 * MAX_SOURCE_CHARS)
    except TokenizerError as error:
        raise TemplateError(error.what, why=error.why, fix=error.fixes) from error


def _without_template(place: Path, directory: Path) -> TemplateError:
    """place: what a user knows the model by: its folder, or its GGUF file."""
    raw = Fix.command("run", MODEL, "--raw", "--prompt", "Once upon a time")
    what = f"{place} has no chat template"
    is_file = place != directory
    if is_file and place.name.startswith("sha256"):  # as Ollama calls its files
        why = "Ollama does not take it from the file; where the model has one, its GGUF file on the hub has it too"
    else:
        where = "it" if is_file else ", ".join(_SOURCES)
        why = f"none in {where}: this is a model that continues text, not one to chat with"
    return TemplateError(what, why=why, fix=raw)


def _additional(files: TokenizerFiles) -> dict[str, str]:
    """Read templates for a purpose, which their files are named after ("tool_use"), beside the usual one."""
    try:
        names = sorted(path.name for path in (files.directory / _ADDITIONAL).iterdir() if path.suffix == ".jinja")
    except OSError:
        return {}
    if len(names) > _MOST_ADDITIONAL:
        why = f"{len(names)} of them; at most {_MOST_ADDITIONAL} are read"
        raise TemplateError(f"{files.directory / _ADDITIONAL} has too many templates", why=why)
    return {name.removesuffix(".jinja"): _from_jinja(files, f"{_ADDITIONAL}/{name}") for name in names}


def _from_json(files: TokenizerFiles, name: str) -> str | dict[str, str]:
    template = files.json(name).get("chat_template")
    match template:
        case None | str():
            return template or ""
        case [*entries] if all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            for entry in entries
        ):
            return {entry["name"]: entry["template"] for entry in entries}
    raise TemplateError(
        f"the chat_template in {files.directory / name} is malformed",
        why=f"a {_kind(template)}; it must be a string or a list of {{name, template}}",
        fix=Fix.command("run", MODEL, "--raw", "--prompt", "TEXT"),
    )


_SOURCES: dict[str, Callable[[TokenizerFiles, str], str | dict[str, str]]] = {
    "chat_template.jinja": _from_jinja,
    "tokenizer_config.json": _from_json,
    "chat_template.json": _from_json,
}
