"""The thoughts of a model before its answer: requested, separated from the answer, and allowed before a grammar.

Knows the marks of thoughts, and which variables chat templates have for them. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from localllm.chat import harmony
from localllm.errors import Fix, TemplateError, UsageError
from localllm.settings import THOUGHT_LEVELS

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.grammar.grammar import Grammar
    from localllm.text.tokenizer import Tokenizer

_ENDING_IDS = 12  # of a prompt, in which a template opens a thought
THOUGHT_MARKS = {
    "<think>": "</think>", "<thinking>": "</thinking>", "<reasoning>": "</reasoning>", "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>", "<mm:think>": "</mm:think>", "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>", "<|inner_prefix|>": "<|inner_suffix|>", "◁think▷": "◁/think▷",
    "<|thought_start|>": "<|thought_end|>",
}  # fmt: skip
_RESPONSE, _RESPONDED = "<response>", "</response>"  # around what Granite says behind a thought
OPENS, CLOSES = next(iter(THOUGHT_MARKS.items()))
ALL_MARKS = tuple(mark for pair in THOUGHT_MARKS.items() for mark in pair)
# What templates call a switch, with its values for on and off; levels; and a number of tokens.
SWITCHES: Mapping[str, tuple[object, object]] = {
    "enable_thinking": (True, False), "thinking": (True, False), "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
}  # fmt: skip
_LEVELS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_LEVELS = ("none", "no_think")  # which turn thinking off
_BUDGET, _BUDGETS = "thinking_budget", {"low": 512, "medium": 4096, "high": 16384}


@dataclass(frozen=True)
class Thinking:
    """The thoughts that the answer to one prompt may have.

    splits: there may be thoughts to separate.
    is_thinking: the answer begins in a thought, which the template has opened.
    may_come: a thought may still be opened.
    is_harmony: the answer has the format of harmony, and begins in the header of a message.
    is_final: a harmony answer begins in the message that is shown.
    shown_ids: special tokens that separate thoughts.
    marks: of thoughts, as a `Grammar` has them.
    """

    splits: bool = False
    is_thinking: bool = False
    may_come: bool = False
    is_harmony: bool = False
    is_final: bool = False
    shown_ids: frozenset[int] = frozenset()
    marks: tuple[tuple[str, str], ...] = ()

    def splitter(self) -> Splitter | harmony.HarmonySplitter | None:
        """Return a splitter for one answer; None where there are no thoughts."""
        if self.is_harmony:
            return harmony.HarmonySplitter(is_thinking=self.is_thinking if self.is_thinking or self.is_final else None)
        return Splitter(is_thinking=self.is_thinking) if self.splits else None

    def grammar(self, form: Grammar | None) -> Grammar | None:
        """Return the grammar with the thoughts that may stand before it."""
        if form is None or self.is_harmony or not (self.is_thinking or self.may_come):
            return form
        return replace(form, thoughts=self.marks, is_thinking=self.is_thinking)


NO_THOUGHTS = Thinking()


def thinking_of(
    template: ChatTemplate | None, tokenizer: Tokenizer, prompt_ids: Sequence[int], said: str = ""
) -> Thinking:
    """Return the thoughts that the answer to a prompt may have. template: None for a raw prompt, which has none. said:
    the beginning of an answer that is continued, behind the prompt."""
    if template is None:
        return NO_THOUGHTS
    if harmony.is_harmony(template):
        is_thinking = bool(said) and told_apart(said)[2]
        is_final = not is_thinking and (bool(said) or _ending(tokenizer, prompt_ids).endswith(harmony.FINAL))
        shown = special_among(tokenizer, harmony.MARKS)
        return Thinking(True, is_thinking, is_harmony=True, is_final=is_final, shown_ids=shown)
    is_thinking = begins_in_thought(tokenizer, prompt_ids)
    splits = is_thinking or splits_off_thoughts(template, tokenizer)
    may_come = splits and not has_thought(tokenizer, prompt_ids)
    shown = special_among(tokenizer, ALL_MARKS) if splits else frozenset()
    marks = marks_in_grammar(tokenizer) if splits else ()
    return Thinking(splits=splits, is_thinking=is_thinking, may_come=may_come, shown_ids=shown, marks=marks)


def answer_ids(template: ChatTemplate, tokenizer: Tokenizer, said: str = "", *, is_final: bool) -> list[int]:
    """Return the ids of an answer's beginning that stand behind its prompt. said: the beginning, as it is saved.
    is_final: no thought comes before the answer, which harmony has a mark for."""
    if not harmony.is_harmony(template):
        return tokenizer.encode(said) if said else []

    def marks(text: str) -> list[int]:
        return tokenizer.encode(text, special=True)

    if not said:
        return marks(harmony.FINAL) if is_final else []
    thought, answer, is_open = told_apart(said)
    if not (thought or is_open):
        return [*marks(harmony.FINAL), *tokenizer.encode(answer)]
    ids = [*marks(harmony.ANALYSIS), *tokenizer.encode(thought if is_open else thought.removesuffix("\n"))]
    return ids if is_open else [*ids, *marks(harmony.BEHIND_THOUGHT), *tokenizer.encode(answer)]


def special_among(tokenizer: Tokenizer, marks: Iterable[str]) -> frozenset[int]:
    """Return the special tokens with which marks begin, which an answer's text omits unless they are asked for."""
    return frozenset(found[0] for mark in marks if (found := _special_token(tokenizer, mark)) is not None)


def marks_in_grammar(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Return the marks of thoughts as a `Grammar` has them: special tokens by their numbers."""

    def numbered(mark: str) -> str:
        found = _special_token(tokenizer, mark)
        return mark if found is None else f"<[{found[0]}]>{found[1]}"

    return tuple((numbered(opened), numbered(close)) for opened, close in THOUGHT_MARKS.items())


def _special_token(tokenizer: Tokenizer, mark: str) -> tuple[int, str] | None:
    """Return the special token that a mark is, or begins with, and the rest of it; None where there is none."""
    for text in (mark, f"{mark.partition('>')[0]}>"):
        index = tokenizer.token_id(text)
        if index is not None and index in tokenizer.special_ids:
            return index, mark.removeprefix(text)
    return None


def splits_off_thoughts(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    """Return whether the model may think: its template says so, or marks of thoughts are tokens of their own."""
    pairs = THOUGHT_MARKS.items()
    has_tokens = any(None not in (tokenizer.token_id(opened), tokenizer.token_id(close)) for opened, close in pairs)
    return has_tokens or any(map(may_think, template.sources.values()))


def has_levels(template: ChatTemplate) -> bool:
    """Return whether a template has levels of thinking."""
    return any(map(template.asks_for, (*_LEVELS, _BUDGET)))


def effort_variables(template: ChatTemplate, effort: str) -> dict[str, Any]:
    """Return the template's variables for this much thinking: "on", "off", or a level. Raises UsageError where the
    model has no such choice."""
    switch = next(filter(template.asks_for, SWITCHES), None)
    if effort in ("on", "off"):
        return _switched(template, switch, is_on=effort == "on")
    level = next(filter(template.asks_for, _LEVELS), None)
    if level is not None:
        _require_level(template, level, effort)
        return {level: effort}
    if template.asks_for(_BUDGET) and effort in _BUDGETS:
        return {_BUDGET: _BUDGETS[effort]}
    why = f"its chat template knows no levels{'' if switch is None else ', only on and off'}"
    raise UsageError(f"thinking cannot be {effort}", why=why)


def _switched(template: ChatTemplate, switch: str | None, *, is_on: bool) -> dict[str, Any]:
    """Return the variables that turn thinking on or off. Raises UsageError where there are none, and it is not so."""
    if switch is not None:
        on, off = SWITCHES[switch]
        return {switch: on if is_on else off}
    if not is_on and template.asks_for(_BUDGET):
        return {_BUDGET: 0}
    sources = "".join(template.sources.values())
    level = next(filter(template.asks_for, _LEVELS), None)
    none = next((word for word in _NO_LEVELS if f"'{word}'" in sources or f'"{word}"' in sources), None)
    if not is_on and level is not None and none is not None:
        return {level: none}
    is_harmony = harmony.is_harmony(template)  # which `answer_ids` keeps from thinking
    thinks = is_harmony or any(map(may_think, template.sources.values()))
    if is_harmony or is_on == thinks:
        return {}
    why = f"as its chat template has it, this model {'always thinks' if thinks else 'does not think'}"
    raise UsageError(f"thinking cannot be {'on' if is_on else 'off'}", why=why)


def _require_level(template: ChatTemplate, variable: str, level: str) -> None:
    """Raises UsageError for a level that the template refuses, as its rendering of a question shows."""
    question = [{"role": "user", "content": "?"}]
    with suppress(TemplateError):
        template.render(question)
        variables: dict[str, Any] = {variable: level}
        try:
            template.render(question, **variables)
        except TemplateError as error:
            raise UsageError(f"thinking cannot be {level}", why=error.why) from None


@dataclass(frozen=True)
class Effort:
    """The amount of thinking, by the setting `think`. variables: for the template. note: a notice about a setting
    that this model has no use for; "" for none."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    is_typed: bool = False
    is_off: bool = False
    note: str = ""

    def told(self, chat: ChatInput) -> ChatInput:
        """Add the effort's variables to the template's input: a file's own come before a setting, a typed choice
        before both."""
        own, given = self.variables, chat.variables
        return replace(chat, variables={**given, **own} if self.is_typed else {**own, **given}) if own else chat


AS_IT_DOES = Effort()


def effort_of(resolved: ResolvedSettings, template: ChatTemplate, switch: str = "") -> Effort:
    """Return the effort for this template. A setting that the model cannot have is a note: settings are for all
    models. switch: "--think" or "/think", whose typed value is an error there. Raises UsageError."""
    wanted = resolved.settings.think
    if wanted is None:
        return AS_IT_DOES
    origin = resolved.origins["think"]
    is_typed = origin.kind == "flag"
    try:
        return Effort(effort_variables(template, wanted), is_typed, is_off=wanted == "off")
    except UsageError as error:
        if not (is_typed and switch):
            where = "/think" if origin.where == "/set" else origin.where
            return Effort(note=f"think = {wanted} ({where}) changes nothing: {error.why}")
        mended = "on" if wanted in THOUGHT_LEVELS and "on and off" in error.why else None
        error.what = f"{switch} {wanted} is not possible with this model"
        if switch == "--think":
            error.fix = Fix.flag(switch, mended) if mended else Fix.without(switch)
        else:
            error.fix = f"{switch} {mended or '-'}"
        raise


def told_apart(text: str, *, is_thinking: bool = False) -> tuple[str, str, bool]:
    """Split a saved answer into (thought, answer, ends in the thought). is_thinking: it begins in a thought."""
    splitter = Splitter(is_thinking=is_thinking)
    parts = [*splitter.feed(text), *splitter.end()]
    thought, answer = ("".join(part for is_thought, part in parts if is_thought is which) for which in (True, False))
    return thought, answer, splitter.is_thinking


def kept_apart(text: str, *, is_thinking: bool = False) -> tuple[str, str]:
    """Split a saved answer into (thought, answer); one without a thought stays as it is."""
    has_thought = is_thinking or text.lstrip().startswith(tuple(THOUGHT_MARKS))
    return told_apart(text, is_thinking=is_thinking)[:2] if has_thought else ("", text)


def with_thought(thought: str, answer: str) -> str:
    """Return a thought and its answer as they are saved. answer: "" where it was cut in its thought."""
    pairs = THOUGHT_MARKS.items()
    opened, close = next((pair for pair in pairs if pair[1] not in thought), (OPENS, CLOSES))
    return f"{opened}\n{thought}" + (f"{close}\n\n{answer}" if answer else "")


def begins_in_thought(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return whether the answer to a prompt begins in a thought, as its template has opened one."""
    return bool(closing_mark(tokenizer, prompt_ids))


def closing_mark(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """Return the mark that closes the thought which a template has opened at the end of a prompt; "" where it has
    opened none."""
    ending = _ending(tokenizer, prompt_ids).rstrip()
    return next((close for opened, close in THOUGHT_MARKS.items() if ending.endswith(opened)), "")


def has_thought(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return whether a template has closed a thought, so that none comes."""
    return _ending(tokenizer, prompt_ids).rstrip().endswith(tuple(THOUGHT_MARKS.values()))


def _ending(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    return tokenizer.decode(list(prompt_ids[-_ENDING_IDS:]), skip_special=False)


def split(text: str, *, is_thinking: bool = False) -> tuple[str, str]:
    """Split an answer into (thought, answer), also where the opening mark stood in the prompt. is_thinking: it is known
    that it did, which an interrupted thought does not show."""
    at = {opened: text.find(close) for opened, close in THOUGHT_MARKS.items()}
    is_closed_only = any(index >= 0 and opened not in text[:index] for opened, index in at.items())
    return told_apart(text, is_thinking=is_thinking or is_closed_only)[:2]


def may_think(template: str) -> bool:
    """Return whether a chat template knows of thoughts."""
    return any(mark in template for mark in (*ALL_MARKS, "enable_thinking"))


class Splitter:
    """Separates thought and answer as the text comes; at most the length of a mark waits.

    A thought stands before everything else: an answer may speak of such marks.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        self._closing: str | None = None  # of the thought that is open; "": any
        self._is_settled = False  # the answer has begun
        self._has_thought = is_thinking
        self._behind = ""  # a mark behind the answer
        self._pending = ""
        self._is_at_start = True  # of a thought or the answer, where blank lines say nothing
        if is_thinking:
            self._closing = ""

    @property
    def is_thinking(self) -> bool:
        return self._closing is not None

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """Return the next pieces as (is it a thought, text)."""
        if self._is_settled and not self._pending and not self._behind:
            return [(False, text)] if text else []
        self._pending += text
        found: list[tuple[bool, str]] = []
        while self._pending and self._step(found):
            pass
        return found

    def end(self) -> list[tuple[bool, str]]:
        """Return the text that still waited."""
        rest, self._pending = self._pending if self._is_settled else self._pending.lstrip("\n"), ""
        if self._behind and rest.strip() == self._behind:
            rest = ""
        return [(self.is_thinking, rest)] if rest else []

    def _step(self, found: list[tuple[bool, str]]) -> bool:
        """Take as much as is certain off the pending text; False where more has to come."""
        if self._closing is not None:
            return self._think(found, tuple(THOUGHT_MARKS.values()) if not self._closing else (self._closing,))
        if self._is_settled:
            held = _held(self._pending, self._behind)
            said, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
            found += [(False, said)] if said else []
            return False
        text = self._pending.lstrip()
        for opened, close in THOUGHT_MARKS.items():
            if text.startswith(opened):
                self._closing, self._is_at_start, self._has_thought = close, True, True
                self._pending = text.removeprefix(opened)
                return True
        around = _RESPONSE if self._has_thought and not self._behind else ""
        if around and text.startswith(around):
            self._behind, self._pending = _RESPONDED, text.removeprefix(around)
            return True
        if text and not any(mark.startswith(text) for mark in (*THOUGHT_MARKS, around)):
            self._is_settled, self._pending = True, self._pending.lstrip("\n")
            return True
        return False

    def _think(self, found: list[tuple[bool, str]], closings: tuple[str, ...]) -> bool:
        text = self._pending.lstrip("\n") if self._is_at_start else self._pending
        at, close = min(((text.find(close), close) for close in closings if close in text), default=(-1, ""))
        if at >= 0:
            if text[:at]:
                found.append((True, text[:at]))
            self._pending, self._closing, self._is_at_start = text[at + len(close) :].lstrip("\n"), None, True
            return True
        held = max((n for close in closings for n in range(len(close)) if text.endswith(close[:n])), default=0)
        if text[: len(text) - held]:
            self._is_at_start = False
            found.append((True, text[: len(text) - held]))
        self._pending = text[len(text) - held :]
        return False


def _held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be, or begin, a mark with blanks behind it."""
    whole = len(text) - len(text.rstrip()) + len(mark)
    if mark and text.rstrip().endswith(mark):
        return whole
    return max((n for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
