"""What is measured of a model, checked against what the model can do before it is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import ContextOverflowError
from localllm.models.config import ModelConfig

VERIFY_TOKENS = 8  # as many rows as the check of a draft has


@dataclass(frozen=True)
class Workload:
    """A prompt to read, and tokens to decode with each of `contexts` in the cache; every round does all of it."""

    prompt_tokens: int = 512
    gen_tokens: int = 128
    contexts: tuple[int, ...] = (512,)
    rounds: int = 5

    @classmethod
    def asked(cls, prompt_tokens: int, gen_tokens: int, contexts: Sequence[int], rounds: int) -> Workload:
        """What a command line says; without a context, decoding follows the prompt."""
        return cls(prompt_tokens, gen_tokens, tuple(dict.fromkeys(contexts)) or (prompt_tokens,), rounds)

    def reach(self, context: int) -> int:
        """The length to which a sequence grows at this depth."""
        return context + 1 + max(self.gen_tokens, VERIFY_TOKENS)

    @property
    def ctx(self) -> int:
        """The engine's context that all of it needs."""
        return max(self.prompt_tokens + 1, *(self.reach(context) for context in self.contexts))

    @property
    def kv_tokens(self) -> int:
        """Tokens in all caches that are held at once."""
        return self.prompt_tokens + 1 + sum(self.reach(context) for context in self.contexts)

    def check(self, name: str, config: ModelConfig) -> None:
        """Raises ContextOverflowError where the model's context is too short."""
        longest = config.longest_context
        if self.prompt_tokens + 1 > longest:
            raise ContextOverflowError(
                f"a prompt of {self.prompt_tokens} tokens is too long for {name}",
                why=f"its context is {longest} tokens, one of them for the answer",
                fix=f"--prompt-tokens {max(1, longest - self.reach(0))}",
            )
        deepest = max(self.contexts)
        if self.reach(deepest) <= longest:
            return
        room = longest - self.reach(0)
        raise ContextOverflowError(
            f"{self.gen_tokens} tokens behind {deepest} others are too many for {name}",
            why=f"its context is {longest} tokens",
            fix=f"--context {room}" if room >= 0 else f"--gen-tokens {max(1, longest // 2)}",
        )
