"""`run --n`, `--best-of` and `--beams`: several answers to one prompt, or the best of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.chat.answer import MAX_ANSWERS, seeded
from localllm.chat.cascade import Bar
from localllm.cli.options import flag_of, number, refuse_together
from localllm.engine.request import MAX_BEAMS, Request, SamplingParams
from localllm.errors import Fix, UsageError
from localllm.settings import ANSWER

SEPARATOR = "---"
_SEARCHING = {
    "--beams --best-of": "a search finds the best of many more answers",
    "--beams --top-k --top-p --min-p --typical-p --seed --speculate --draft-tokens": (
        "a search samples nothing and drafts nothing"
    ),
}
_SEVERAL = {
    "--batch": "a line of a job has one answer; write it down once for each that you want",
    "--show-prompt": "nothing is answered",
}
_ONE_ANSWER = "a chat goes on with one answer: --best-of and --beams give one"
_KNOWN_LATE = "which answers are the best is known when all are whole: --json"

CHOICE_OPTIONS = (
    number(
        "--n",
        f"Generate N answers, with a line {SEPARATOR} between two. The chat keeps the first.",
        1,
        MAX_ANSWERS,
        "3",
        group=ANSWER,
    ),
    number(
        "--best-of",
        "Generate N answers and print the likeliest one, or the --n likeliest.",
        1,
        MAX_ANSWERS,
        "3",
        group=ANSWER,
    ),
    number(
        "--beams",
        "Beam search with N beams instead of sampling; --n prints several answers.",
        1,
        MAX_BEAMS,
        "4",
        group=ANSWER,
    ),
)


@dataclass(frozen=True)
class AnswerChoice:
    """n: answers that are printed; count: that are drawn. beams: more than 1 has them searched. bar: that they must
    pass to be printed."""

    n: int = 1
    count: int = 1
    beams: int = 1
    bar: Bar | None = None

    @classmethod
    def judged(cls, bar: Bar | None) -> AnswerChoice:
        """Return the choice of a cascade's model; of the last, which has no bar, it is the plain one."""
        return cls(count=1 if bar is None else bar.drafts, bar=bar)

    @property
    def is_plain(self) -> bool:
        """True for one answer, among which nothing is chosen."""
        return self.n == self.beams == 1 and (self.count == 1 or self.bar is not None)

    @property
    def is_best_of(self) -> bool:
        return self.count > self.n and self.bar is None

    @property
    def in_turn(self) -> bool:
        """True where what comes is known to be printed."""
        return self.beams == 1 and not self.is_best_of and self.bar is None

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how each answer is sampled. Raises UsageError where all would be the same."""
        if self.beams > 1:
            return replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
        if self.count > 1 and sampling.temperature == 0:
            why = "the likeliest token is always the same one, and so is the answer"
            raise UsageError(
                f"{self.count} answers at temperature 0 are one", why=why, fix=Fix.flag("--temperature", "0.8")
            )
        return sampling

    def requests(self, request: Request) -> list[Request]:
        if self.beams > 1:
            return [replace(request, beams=self.beams, num_answers=self.n, is_scored=True)]
        scored = replace(request, is_scored=self.is_best_of if self.bar is None else self.bar.is_scored)
        several = [replace(scored, sampling=seeded(request.sampling, index)) for index in range(self.count)]
        return [several[0], *(replace(each, explains_miss=False) for each in several[1:])]


def choice_of(flags: Mapping[str, Any]) -> AnswerChoice:
    """Raises UsageError for flags that contradict each other."""
    n, beams = flags["n"] or 1, flags["beams"] or 1
    choice = AnswerChoice(n, n if beams == 1 and flags["best_of"] is None else flags["best_of"] or 1, beams)
    if beams > 1:
        choice = replace(choice, count=1)
        refuse_together(flags, _SEARCHING)
        if flags["temperature"]:
            what = f"--beams and --temperature {flags['temperature']:g} cannot go together"
            raise UsageError(what, why="a search draws nothing")
        if n > beams:
            why = "no more answers are found than there are beams"
            raise UsageError(f"--n {n} is more than --beams {beams}", why=why)
    elif choice.count < n:
        raise UsageError(f"--best-of {choice.count} is less than --n {n}", why="no more can be printed than there are")
    if not choice.is_plain:
        first = next(flag for flag in ("beams", "best_of", "n") if (flags[flag] or 1) > 1)
        refuse_together(flags, {f"{flag_of(first)} {other}": why for other, why in _SEVERAL.items()})
        if choice.n > 1:
            refuse_together(flags, {"--n --continue --session": _ONE_ANSWER})
        if choice.is_best_of:
            refuse_together(flags, {"--best-of --jsonl": _KNOWN_LATE})
    return choice
