"""Which blocks a model leaves out while it guesses: those that are slow to come by where there are any, else those that
it is found to need the least for the time that they take."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from localllm.engine.drawing import drawn
from localllm.engine.residency import Residency
from localllm.engine.runner import Chunk
from localllm.engine.sequence import Sequence as Running
from localllm.engine.speculative.layer_importance import Harm, Trial, least_harmful
from localllm.engine.speculative.skip_file import read_trials, write_trials
from localllm.engine.speculative.step_times import unknown_growth
from localllm.kernels.kv_page import PAGE_TOKENS
from localllm.layers.mlp import SplitMLP
from localllm.models.decoder import Decoder
from localllm.settings import DRAFT_TOKENS

TRIAL_TOKENS = 16  # whose draws are compared: as many rows as a plan has room for the logits of
_WORTH = 1.05  # an expected speedup below is not tried
_RANDOM_SHARE = 0.3  # of the trials that change what is left out by chance
_WRITTEN_EVERY = 16  # trials


class SkipSet:
    """directory: of the packed model, where what is learnt is kept; None where it is not. draft_tokens: that are
    guessed at once, at most."""

    def __init__(
        self, residency: Residency, directory: Path | None, draft_tokens: int = DRAFT_TOKENS, seed: int = 0
    ) -> None:
        self._residency, self._directory, self._draft_tokens = residency, directory, draft_tokens
        blocks = residency.model.blocks
        trials = [] if directory is None else read_trials(directory)
        self.harm = Harm([block.name for block in blocks], trials)
        self._bytes = {
            block.name: float(sum(t.nbytes for linear in block.body.linears for t in linear.tensors.values()))
            for block in blocks
        }
        self._generator = random.Random(seed)
        self._chosen: tuple[frozenset[str], int, frozenset[str]] | None = None  # for what is slow, after so many trials
        self._num_unwritten = 0
        self._slow: tuple[weakref.ref[Decoder], frozenset[str]] = weakref.ref(residency.model), _slow(residency.model)

    @property
    def slow(self) -> frozenset[str]:
        """What is streamed, or computed elsewhere than the rest."""
        if self._slow[0]() is not self._residency.model:
            self._slow = weakref.ref(self._residency.model), _slow(self._residency.model)
        return self._slow[1]

    def names(self) -> frozenset[str]:
        """What is left out now; nothing where that would not pay."""
        slow = self.slow
        if slow:
            return slow
        known = len(self.harm.trials)
        if self._chosen is None or self._chosen[:2] != (slow, known):
            self._chosen = slow, known, self._fastest(self.harm.expected())
        return self._chosen[2]

    def least_harmful(self, share: float) -> frozenset[str]:
        """By what is known, the blocks of such a share of all bytes that are needed the least."""
        return self._as_large(self.harm.expected(), share * sum(self._bytes.values()))

    def is_due(self, sequence: Running) -> bool:
        """Whether a trial on this text would be cheap: hardly more than the tokens that are compared are computed."""
        behind_page = (len(sequence.token_ids) - 1) % PAGE_TOKENS
        return sequence.num_completion_tokens > TRIAL_TOKENS and TRIAL_TOKENS <= behind_page < 2 * TRIAL_TOKENS

    def try_on(self, sequence: Running, cancelled: Callable[[], bool]) -> None:
        """Leaves out another set for the last tokens of an answer, each behind those that were really said, and learns
        how many it would have drawn. Raises as a forward does."""
        end = len(sequence.token_ids) - 1
        first, skipped = end - TRIAL_TOKENS, self._proposed()
        if sequence.kv is None or not sequence.kv.can_fork(first) or not 0 < len(skipped) < len(self._bytes):
            return
        with closing(sequence.kv.fork(first, end)) as kv:
            runner = self._residency.runner.without(skipped, captures=False)
            chunk = Chunk(sequence.token_ids[:end], kv, end - kv.length, num_drafted=TRIAL_TOKENS - 1)
            rows = runner.forward([chunk], cancelled=cancelled)
        if not bool(rows.isfinite().all()):
            return
        said = sequence.token_ids
        same = sum(drawn(row, sequence, said[:place]) == said[place] for place, row in enumerate(rows, start=first + 1))
        self.learn(Trial(skipped, same, TRIAL_TOKENS))

    def learn(self, trial: Trial) -> None:
        self.harm.learn(trial)
        self._num_unwritten += 1
        if self._num_unwritten >= _WRITTEN_EVERY:
            self.close()

    def close(self) -> None:
        if self._directory is not None and self._num_unwritten:
            write_trials(self._directory, self.harm.trials)
        self._num_unwritten = 0

    def _proposed(self) -> frozenset[str]:
        slow = self.slow & self._bytes.keys()
        if self._generator.random() < _RANDOM_SHARE:
            return self._changed(slow or self.names() or self._fastest(self.harm.sampled(self._generator)))
        sampled = self.harm.sampled(self._generator)
        return self._as_large(sampled, sum(self._bytes[name] for name in slow)) if slow else self._fastest(sampled)

    def _changed(self, names: frozenset[str]) -> frozenset[str]:
        """With one of them exchanged for another of its kind."""
        if not names:
            return names
        out = self._generator.choice(sorted(names))
        kind = out.rsplit(".", 1)[-1]
        others = [name for name in self._bytes if name not in names and name.rsplit(".", 1)[-1] == kind]
        return names - {out} | ({self._generator.choice(others)} if others else set())

    def _as_large(self, harm: dict[str, float], num_bytes: float) -> frozenset[str]:
        """The least harmful blocks of so many bytes: where others might be kept in their place."""
        chosen: set[str] = set()
        for name in sorted(harm, key=lambda name: harm[name] / self._bytes[name]):
            if sum(self._bytes[other] for other in chosen) >= num_bytes:
                break
            chosen.add(name)
        return frozenset(chosen)

    def _fastest(self, harm: dict[str, float]) -> frozenset[str]:
        """Where every block is as near as every other: what makes the expected tokens a second the most."""
        best, most = frozenset[str](), _WORTH
        total = sum(self._bytes.values())
        for tenths in range(1, 16):
            names = least_harmful(harm, self._bytes, tenths / 20)
            kept = 1 - sum(self._bytes[name] for name in names) / total
            speedup = predicted_speedup(math.exp(-sum(harm[name] for name in names)), kept, self._draft_tokens)
            if speedup > most:
                best, most = names, speedup
        return best


def _slow(model: Decoder) -> frozenset[str]:
    apart = {block.name for block in model.blocks if block.device != model.device or isinstance(block.body, SplitMLP)}
    return model.stream.names | apart


def predicted_speedup(alpha: float, guess_share: float, most: int) -> float:
    """Of the best number of guesses up to `most`, each right with a probability alpha and taking this share of a step
    (Leviathan et al., arXiv:2211.17192, Theorem 3.8, with what verifying costs)."""
    return max(
        sum(alpha**i for i in range(count + 1)) / (count * guess_share + unknown_growth(1, 1 + count))
        for count in range(1, most + 1)
    )
