"""The workload of a benchmark, checked against the model's context before the model is loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import ContextOverflowError, Fix
from localllm.models.architecture import ModelConfig


@dataclass(frozen=True)
class Workload:
    """In every round a prompt is prefilled, and tokens are decoded behind each of `contexts`."""

    prompt_tokens: int
    gen_tokens: int
    contexts: tuple[int, ...]
    rounds: int

    def length(self, context: int) -> int:
        """The length that a sequence grows to at this depth."""
        return context + 1 + self.gen_tokens

    @property
    def ctx(self) -> int:
        """The engine's context that the longest sequence needs."""
        return max(self.prompt_tokens + 1, *map(self.length, self.contexts))

    @property
    def kv_tokens(self) -> int:
        """Tokens of all caches that are held at once."""
        return self.prompt_tokens + 1 + sum(map(self.length, self.contexts))

    def check(self, name: str, config: ModelConfig) -> None:
        """Raises ContextOverflowError where the model's context is too short."""
        longest = config.longest_context
        deepest = max(self.contexts)
        if self.prompt_tokens + 1 > longest:
            what = f"a prompt of {self.prompt_tokens} tokens is too long for {name}"
            fix = Fix.flag("--prompt-tokens", max(1, longest - self.length(0)))
        elif self.length(deepest) > longest:
            what = f"{self.gen_tokens} tokens behind {deepest} others are too many for {name}"
            left = longest - self.length(0)
            fix = Fix.flag("--context", left) if left >= 0 else Fix.flag("--gen-tokens", max(1, longest // 2))
        else:
            return
        raise ContextOverflowError(what, why=f"its context is {longest} tokens, one of them for the answer", fix=fix)
