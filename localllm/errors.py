"""Every error that a user may meet. One handler per front end turns them into an exit code, a notice or an HTTP status.

An error says what happened, why (with numbers), what to do (a command to paste), and names the page that says more:
`localllm help CODE` prints that section of docs/errors.md.
"""

from __future__ import annotations

FETCH_ANEW = "localllm rm MODEL && localllm pull MODEL"  # a front end that knows the model puts its name there


class LocalLLMError(Exception):
    """Something a user can understand and mend.

    what: one sentence. why: the numbers or the limit behind it. fix: a command or an action that helps.
    """

    exit_code = 1
    code = "failure"

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

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


class BusyError(LocalLLMError):
    """This machine has too much else to do: it would go at another time. reason: as servers tell it to clients."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", reason: str = "overloaded") -> None:
        super().__init__(what, why=why, fix=fix)
        self.reason = reason


class ModelUnusableError(LocalLLMError):
    """A model that was asked for cannot be loaded. code: of the error that keeps it from that."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", code: str = LocalLLMError.code) -> None:
        super().__init__(what, why=why, fix=fix)
        self.code = code


class EngineStuckError(EngineGoneError):
    """The process of the engine is there, and does not move on or does not answer."""


class UnwrittenError(LocalLLMError):
    """Standard output took no more of an answer."""


class BugError(LocalLLMError):
    """An exception that nobody foresaw."""

    code = "bug"
