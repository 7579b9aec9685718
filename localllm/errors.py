"""Every error that a user may meet. One handler per front end turns them into an exit code, a notice or an HTTP status.

An error says what happened, why (with numbers), what to do (a command to paste), and names the page that says more:
`localllm help CODE` prints that section of docs/using/errors.md.
"""

from __future__ import annotations

import shlex
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

MODEL = "MODEL"  # a word of a fix; a front end that knows the model puts its name there


@dataclass(frozen=True)
class Fix:
    """One way to mend an error. Front ends match on `kind`; `str(fix)` reads well in each of them.

    kind: "flag", to be added to the command that failed; "without", to be left out of it; "again", what stands before
        and behind it; "model", a word of it and the model to name instead; "adapter", a word of it, the model to name
        instead, and the adapter to name by --adapter; "word", a word of it and another to type instead; "command", of
        localllm; "refetch", its files are to be fetched anew; "advice", any other text.
    words: as a shell takes them, or of advice the one text.
    """

    kind: Literal["flag", "without", "again", "model", "adapter", "word", "command", "refetch", "advice"]
    words: tuple[str, ...]

    @classmethod
    def flag(cls, *words: object) -> Fix:
        """Return the fix that types a command again with these flags: `Fix.flag("--ctx", 512, "--kv", "int4")`."""
        return cls("flag", tuple(map(str, words)))

    @classmethod
    def without(cls, *flags: str) -> Fix:
        return cls("without", flags)

    @classmethod
    def command(cls, *words: object) -> Fix:
        """Return the fix that runs `localllm WORDS`; a word MODEL stands for the model's name."""
        return cls("command", ("localllm", *map(str, words)))

    @classmethod
    def again(cls, before: str = "", behind: str = "") -> Fix:
        return cls("again", (before, behind))

    @classmethod
    def model(cls, word: str, instead: str) -> Fix:
        """Return the fix that types a command again with another model for this word."""
        return cls("model", (word, instead))

    @classmethod
    def adapter(cls, word: str, base: str, adapter: str) -> Fix:
        """Return the fix that types a command again with a model for this word, and an adapter for that model."""
        return cls("adapter", (word, base, adapter))

    @classmethod
    def word(cls, word: str, instead: str) -> Fix:
        """Return the fix that types a command again with another word for this one: a file, a flag, a name."""
        return cls("word", (word, instead))

    @classmethod
    def advice(cls, text: str) -> Fix:
        return cls("advice", (text,))

    def with_model(self, *names: str) -> Fix:
        """Return the fix with the model's name in it, or other words that stand for a model."""
        return replace(self, words=tuple(each for word in self.words for each in (names if word == MODEL else (word,))))

    def runs(self, command: str) -> bool:
        return self.kind == "command" and self.words[1] == command

    def __str__(self) -> str:
        match self.kind:
            case "without":
                return f"leave {' and '.join(self.words)} out"
            case "refetch":
                name = shlex.quote(self.words[0])
                return f"localllm rm {name} && localllm pull {name}"
            case "again":
                return "this command".join(self.words)
            case "model":
                return str(Fix.command("run", self.words[1]))
            case "adapter":
                return str(Fix.command("run", self.words[1], "--adapter", self.words[2]))
            case "word":
                return f"{self.words[1]} in place of {self.words[0]}"
            case "advice":
                return self.words[0]
        return shlex.join(self.words)


FETCH_ANEW = Fix("refetch", (MODEL,))
Fixes: TypeAlias = "str | Fix | Iterable[str | Fix]"


def as_fixes(fixes: Fixes) -> tuple[Fix, ...]:
    """Return the alternatives; a text is advice, an empty one none."""
    found = (fixes,) if isinstance(fixes, str | Fix) else fixes
    return tuple(fix if isinstance(fix, Fix) else Fix.advice(fix) for fix in found if fix)


def either(fixes: Iterable[Fix]) -> str:
    """Return the alternatives as one text: "a, b, or c"."""
    *others, last = [str(fix) for fix in fixes] or [""]
    return f"{', '.join(others)}, or {last}" if others else last


def show(value: object) -> str:
    """Return at most 60 printable characters of an untrusted value, for the text of an error."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict | array):
        return f"{'an' if isinstance(value, array) else 'a'} {type(value).__name__} of {len(value)}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class LocalLLMError(Exception):
    """Something a user can understand and mend.

    what: one sentence.
    why: the numbers or the limit behind it.
    fix: what helps, or several alternatives.
    """

    exit_code = 1
    code = "failure"

    def __init__(self, what: str, *, why: str = "", fix: Fixes = ()) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fixes = as_fixes(fix)

    @property
    def fix(self) -> str:
        return either(self.fixes)

    @fix.setter
    def fix(self, fixes: Fixes) -> None:
        self.fixes = as_fixes(fixes)

    @property
    def more(self) -> str:
        return f"localllm help {self.code}"


class UsageError(LocalLLMError):
    """A flag, a setting or an argument that cannot be honoured."""

    exit_code = 2
    code = "usage"


class SettingsError(UsageError):
    """config.toml, models.toml or a LOCALLLM_* variable says something unknown."""

    code = "settings"


class GrammarError(UsageError):
    """The form of an answer (a JSON Schema, a grammar, a regular expression) cannot be honoured."""

    code = "grammar"


class ModelNotFoundError(LocalLLMError):
    """The name is unknown, or its files are not on this disk and may not be fetched."""

    exit_code = 3
    code = "model-not-found"


class DoesNotFitError(LocalLLMError):
    """The plan needs more memory or disk than there is."""

    exit_code = 4
    code = "does-not-fit"


class ContextOverflowError(LocalLLMError):
    """The prompt does not fit into the context; nothing was cut. num_tokens, ctx: of the prompt and of the context,
    where they were counted."""

    exit_code = 5
    code = "context-overflow"
    num_tokens: int | None = None
    ctx: int | None = None


class DownloadError(LocalLLMError):
    """A file could not be fetched, or what came was not what was promised."""

    exit_code = 6
    code = "download"


class AccessError(DownloadError):
    """The hub wants a token, or the licence to be accepted."""

    code = "access"


class SchemaError(LocalLLMError):
    """The answer does not meet the schema that was asked for."""

    exit_code = 7
    code = "schema"


class CheckpointError(LocalLLMError):
    """A model file is missing, cut, misshapen or hostile."""

    code = "checkpoint"


class ModelChangedError(CheckpointError):
    """The files of a model are being written anew, or have been since it was loaded."""


class UnsupportedModelError(LocalLLMError):
    """A well-formed model that this version cannot run."""

    code = "unsupported-model"


class AdapterError(LocalLLMError):
    """An adapter cannot be read, or does not belong to the model that it is to change."""

    code = "adapter"


class TokenizerError(LocalLLMError):
    """The tokenizer's files are absent or broken."""

    code = "tokenizer"


class TemplateError(LocalLLMError):
    """The chat template is absent, broken, hostile, or refused the messages."""

    code = "template"


class NonFiniteError(LocalLLMError):
    """A NaN or an infinity came out of a block; no token was made from it."""

    code = "non-finite"


class HistoryError(LocalLLMError):
    """The history of chats cannot be opened, read or written, or has no such chat."""

    code = "history"


class EngineClosedError(LocalLLMError):
    """The engine takes nothing on any more."""


class EngineGoneError(LocalLLMError):
    """The process of the engine has ended in the middle of its work."""

    code = "engine-gone"


class CardFaultError(LocalLLMError):
    """A GPU ended in a fault, after which this process computes nothing there any more; another one may."""

    code = "card-fault"


class BusyError(LocalLLMError):
    """This machine has too much else to do: it would go at another time. reason: as servers tell it to clients."""

    def __init__(self, what: str, *, why: str = "", fix: Fixes = (), reason: str = "overloaded") -> None:
        super().__init__(what, why=why, fix=fix)
        self.reason = reason


class ModelUnusableError(LocalLLMError):
    """A model that was asked for cannot be loaded. code: of the error that keeps it from that."""

    def __init__(self, what: str, *, why: str = "", fix: Fixes = (), code: str = LocalLLMError.code) -> None:
        super().__init__(what, why=why, fix=fix)
        self.code = code


class EngineStuckError(EngineGoneError):
    """The process of the engine is there, and does not move on or does not answer."""


class UnwrittenError(LocalLLMError):
    """Standard output took no more of an answer."""


class BugError(LocalLLMError):
    """An exception that nobody foresaw."""

    code = "bug"
