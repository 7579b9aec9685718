"""The workload of a benchmark, checked against the model's context before the model is loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import ContextOverflowError, Fix
from localllm.models.config import ModelConfig


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
        if self.ctx > longest:
            half = (longest - 1) // 2
            raise ContextOverflowError(
                f"{self.ctx} tokens are too many for {name}",
                why=f"its context is {longest} tokens, for a prompt, or for a context and what is generated behind it",
                fix=Fix.flag("--prompt-tokens", half, "--context", half, "--gen-tokens", half),
            )
