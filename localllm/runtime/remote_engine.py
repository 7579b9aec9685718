"""A loaded engine in another process, used as if it were here. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from localllm.engine.engine_info import EngineFacts, EngineStatus
from localllm.engine.request import Request
from localllm.engine.validation import encode_prompt, require_fit, require_unchanged
from localllm.errors import EngineGoneError, EngineStuckError, Fix, TemplateError
from localllm.models.config import ModelConfig
from localllm.models.families import load_config
from localllm.runtime import protocol
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

Call = Callable[[str, Any], Any]
T = TypeVar("T")


class RemoteEngine:
    """`LoadedEngine`: what the model's files say is read here, all else is asked of the other process."""

    def __init__(self, directory: Path, facts: EngineFacts, call: Call) -> None:
        """directory: the model's files. call: asks the other process, by a name of `engine_server.CALLS`."""
        self._directory = directory
        self._facts = facts
        self._call = call

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._read(Tokenizer.load)

    @cached_property
    def config(self) -> ModelConfig:
        return self._read(load_config)

    @cached_property
    def _template(self) -> ChatTemplate | TemplateError:
        tokenizer = self.tokenizer
        return self._read(lambda directory: ChatTemplate.load_or_why_not(directory, tokenizer))

    def _read(self, read: Callable[[Path], T]) -> T:
        """Read the files that the other process has loaded from. Raises ModelChangedError where they are others
        now."""
        try:
            return read(self._directory)
        finally:
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Raises ModelChangedError, and ModelNotFoundError where the files are gone."""
        require_unchanged(self._directory, self.contents)

    @property
    def contents(self) -> str:
        return self._facts.contents

    @property
    def template(self) -> ChatTemplate:
        """Raises TemplateError where the model has none, or a broken one."""
        if isinstance(self._template, TemplateError):
            raise self._template.with_traceback(None)
        return self._template

    @property
    def ctx(self) -> int:
        return self._facts.ctx

    @property
    def weights(self) -> str:
        return self._facts.weights

    @property
    def load_s(self) -> float:
        return self._facts.load_s

    def fixes_for(self, ctx: int) -> list[Fix]:
        """Return the flags with which a context of so many tokens fits; none where nobody can be asked."""
        with contextlib.suppress(EngineGoneError):
            return protocol.read_fixes(self._call("fixes_for", ctx))
        return []

    def check(self, request: Request) -> None:
        """Raises ContextOverflowError or UsageError for a request that cannot run."""
        require_fit(request, self.ctx, self.config, self.fixes_for)
        if request.grammar is not None or request.beams > 1:  # compiled, and searched, where they are used
            self._call("check", protocol.plain(request))

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt, as `encode_prompt` does."""
        return encode_prompt(prompt, self.tokenizer, lambda: self.template)

    @property
    def current_plan(self) -> None:
        return None

    def facts(self) -> EngineFacts:
        """Return the engine's facts as they are now, or as they were where it does not answer."""
        with contextlib.suppress(EngineStuckError):
            self._facts = protocol.read(EngineFacts, self._call("facts", None))
        return self._facts

    def status(self) -> EngineStatus:
        """Raises EngineStuckError where it does not answer."""
        status: EngineStatus = protocol.read(EngineStatus, self._call("status", None))
        return status

    def go_on_as(self, other: RemoteEngine) -> None:
        """Become `other`, the same model loaded anew, which may have changed meanwhile."""
        self.__dict__ = dict(vars(other))  # at once: other threads read it, and what they still read is the old one's

    def set_ctx(self, ctx: int) -> None:
        """Take over the context's new length."""
        self._facts = replace(self._facts, ctx=ctx)
