"""Who drafts for a model, as the user chose."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import Fix, UsageError
from localllm.settings import DRAFT_MODEL, DRAFT_TOKENS, MOST_DRAFT_TOKENS, SPECULATE, EngineConfig


@dataclass(frozen=True)
class Speculate:
    """Raises UsageError for values out of range.

    who: "off"; "ngram", "skip", "mtp" for the checkpoint's own head, or "model:NAME" for a second model; "auto" for
        n-grams, and skipping and the head where they can pay.
    draft_tokens: the most that are drafted at once; None: the usual.
    """

    who: str = "auto"
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.who not in SPECULATE and not self.draft_model:
            known = f"{', '.join(SPECULATE)}, and {DRAFT_MODEL}NAME for a second model"
            raise UsageError(
                f"--speculate is {self.who!r}", why=f"it may be {known}", fix=Fix.flag("--speculate", "auto")
            )
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            why = f"one pass has room to verify from 0 to {MOST_DRAFT_TOKENS}"
            raise UsageError(
                f"--draft-tokens is {self.draft_tokens}", why=why, fix=Fix.flag("--draft-tokens", DRAFT_TOKENS)
            )

    @classmethod
    def of(cls, config: EngineConfig) -> Speculate:
        return cls(config.speculate, config.draft_tokens)

    @property
    def draft_model(self) -> str:
        """The second model's name, or ""."""
        return self.who.removeprefix(DRAFT_MODEL) if self.who.startswith(DRAFT_MODEL) else ""

    @property
    def is_on(self) -> bool:
        return self.who != "off" and self.most_tokens > 0

    @property
    def skips(self) -> bool:
        return self.who in ("auto", "skip") and self.most_tokens > 0

    @property
    def most_tokens(self) -> int:
        return DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens
