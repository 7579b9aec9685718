"""Ollama's Modelfile, and the parameters in it, in the terms of presets; and a preset as a Modelfile.

What a preset has no place for is refused with the reason. Knows no models: FROM is a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.config import accepted, nearest_key, shown_setting
from localllm.errors import UsageError
from localllm.settings import SETTINGS

# Ollama's name of a setting.
PARAMETERS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "seed", "stop")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
    "num_ctx": "ctx",
}
_LOADING = "how a model is computed is planned when it is loaded; `localllm preset save` has settings for it"
_NO_MIROSTAT = "mirostat is not built in; temperature, top_p and min_p are"
_NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("num_gpu", "main_gpu", "num_batch", "num_thread", "low_vram", "use_mmap", "use_mlock"), _LOADING),
    **dict.fromkeys(("numa", "f16_kv", "logits_all", "vocab_only", "embedding_only", "draft_num_predict"), _LOADING),
    **dict.fromkeys(("mirostat", "mirostat_tau", "mirostat_eta"), _NO_MIROSTAT),
    "tfs_z": "tail-free sampling is not built in; min_p is",
    "penalize_newline": "a penalty makes no exception for newlines",
    "num_keep": "the context does not shift, so no part needs to be kept",
}
# Why an instruction is refused.
NO_TEMPLATE = "the model's own chat template is used, and templates of Ollama's form are not read"
NO_MESSAGES = "a preset has no messages but the system message; put examples into that"
_REFUSED: Mapping[str, str] = {
    "template": NO_TEMPLATE,
    "draft": "a preset names a drafter with the setting `speculate`: `localllm preset save`",
    "renderer": NO_TEMPLATE,
    "parser": "answers are parsed as the model's chat template asks for it",
}
_IDLE = ("license", "requires")  # which change no answer
_INSTRUCTIONS = ("from", "adapter", "parameter", "system", "message", *_REFUSED, *_IDLE)
_QUOTES = '"""', '"'


@dataclass
class Modelfile:
    """base: what FROM names, a path or a name, as the values of `adapter` are. system_by: the instruction that gives
    the system message. idle: instructions that change no answer."""

    base: str = ""
    system_by: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)


def parse_modelfile(text: str, name: str) -> Modelfile:
    """name: the file's, for errors. Raises UsageError naming the line of what is wrong, or cannot be honoured, and
    SettingsError for a value that is out of range."""
    found, parameters = Modelfile(), list[tuple[str, str, str]]()
    for number, instruction, rest in _instructions(text, name):
        where, shown = f"{name}:{number}", instruction.upper()
        if instruction in _REFUSED:
            raise UsageError(f"{shown} cannot be honoured in {where}", why=_REFUSED[instruction], fix="delete it there")
        if instruction in _IDLE:
            found.idle.append(shown)
        elif instruction == "parameter":
            key, value = _divided(rest)
            parameters.append((key, value, where))
        elif instruction == "message":
            role, content = _divided(rest)
            if role != "system":
                raise UsageError(
                    f"MESSAGE {role} cannot be honoured in {where}", why=NO_MESSAGES, fix="delete it there"
                )
            _set_system(found, instruction, content, where)
        elif instruction == "adapter":
            found.values["adapter"] = (*found.values.get("adapter", ()), _unquoted(rest))
        elif instruction == "system":
            _set_system(found, instruction, _unquoted(rest), where)
        elif found.base:
            raise UsageError(
                f"there is a second FROM in {where}", why="a preset is of one model", fix="delete it there"
            )
        else:
            found.base = _unquoted(rest)
    if not found.base:
        raise UsageError(f"{name} has no FROM", why="it says which model the preset is of", fix="add a line FROM MODEL")
    found.values |= parameter_settings(parameters)
    return found


def _set_system(found: Modelfile, instruction: str, text: str, where: str) -> None:
    """Set the system message; of several SYSTEM the last counts, as in Ollama."""
    if found.system_by not in ("", instruction):
        why = f"a preset has one, and {found.system_by.upper()} above sets it"
        raise UsageError(f"there is a second system message in {where}", why=why, fix="delete one of them")
    found.system_by, found.values["system"] = instruction, text


def parameter_settings(parameters: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
    """Return the settings of (Ollama's name, value, where it stands). A value is as JSON or as a Modelfile has it; of
    `stop` each is one more text, or a list of them. None: as the model has it, against what a preset beneath says.

    Raises UsageError for a name without effect here, SettingsError for a value out of range.
    """
    found: dict[str, Any] = {}
    for name, value, where in parameters:
        if name in _NO_EFFECT:
            raise UsageError(f"{name} has no effect, in {where}", why=_NO_EFFECT[name], fix="delete it there")
        if name not in PARAMETERS:
            why, fix = f"known are {', '.join(PARAMETERS)}", "delete it there"
            if nearest := nearest_key(name, PARAMETERS):
                why, fix = f"the nearest is {nearest}; {why}", f"write {nearest} there"
            raise UsageError(f"unknown parameter {name[:80]!r} in {where}", why=why, fix=fix)
        key = PARAMETERS[name]
        if key == "stop":
            texts = value if isinstance(value, list) else [] if value is None else [value]
            found[key] = (*found.get(key, ()), *accepted(key, texts, where))
            continue
        given = _number(key, value) if isinstance(value, str) else value
        is_usual = name in ("num_predict", "seed") and given in (-1, -2)
        found[key] = None if is_usual else accepted(key, given, where)
    return found


def modelfile_of(base: str, values: Mapping[str, Any]) -> str:
    """Return a Modelfile of these settings; those without a name of Ollama's are in comments."""
    names = {key: name for name, key in PARAMETERS.items()}
    lines = [f"FROM {base}"]
    for key, value in values.items():
        if key == "system":
            lines.append(f"SYSTEM {_quoted(value)}")
        elif key == "adapter":
            lines += [f"ADAPTER {_quoted(text)}" for text in value]
        elif key == "stop":
            lines += [f"PARAMETER stop {_quoted(text)}" for text in value]
        elif key in names:
            lines.append(f"PARAMETER {names[key]} {value}")
        elif key != "model":
            lines.append(f"# {key} = {shown_setting(value)}")
    return "\n".join(lines) + "\n"


def _instructions(text: str, name: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction in lower case, the rest, quotes included)."""
    lines = list(enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), start=1))[::-1]
    while lines:
        number, line = lines.pop()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, rest = _split(line)
        instruction = word.lower()
        if instruction not in _INSTRUCTIONS:
            why, fix = "a text of several lines stands in three double quotes", "delete it there"
            if nearest := nearest_key(instruction, _INSTRUCTIONS).upper():
                why, fix = f"the nearest is {nearest}; {why}", f"write {nearest} there"
            raise UsageError(f"unknown instruction {word[:80]!r} in {name}:{number}", why=why, fix=fix)
        front = ""
        if instruction in ("parameter", "message"):
            word, rest = _split(rest)
            front = f"{word} "
        while _is_open(rest):
            if not lines:
                why = f"they begin in {name}:{number}"
                raise UsageError(f"quotes are not closed in {name}", why=why, fix="close them")
            rest += f"\n{lines.pop()[1]}"
        if not rest.strip():
            why = "nothing stands behind it"
            raise UsageError(f"{instruction.upper()} is empty in {name}:{number}", why=why, fix="delete it there")
        yield number, instruction, f"{front}{rest}"


def _split(line: str) -> tuple[str, str]:
    word, *rest = line.split(maxsplit=1) or [""]
    return word, rest[0] if rest else ""


def _divided(rest: str) -> tuple[str, str]:
    word, _, text = rest.partition(" ")
    return word, _unquoted(text)


def _is_open(text: str) -> bool:
    """Return whether a value goes on in the next line: Ollama closes quotes only at the end of one."""
    text = text.strip()
    mark = next((mark for mark in _QUOTES if text.startswith(mark)), None)
    return mark is not None and (len(text) < 2 * len(mark) or not text.endswith(mark))


def _unquoted(text: str) -> str:
    text = text.strip()
    mark = next((mark for mark in _QUOTES if text.startswith(mark)), "")
    return text[len(mark) : len(text) - len(mark)]


def _quoted(text: str) -> str:
    is_plain = text == text.strip() and "\n" not in text and not text.startswith('"')
    return text if is_plain else f'"""{text}"""'


def _number(key: str, text: str) -> object:
    kind = {"integer": int, "number": float}[SETTINGS[key].accepts.kind]
    try:
        return kind(text)
    except ValueError:
        return text
