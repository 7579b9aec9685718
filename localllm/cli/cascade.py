"""`--cascade`: the models of a command line of which each answers where those before are not sure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.chat.answer import MAX_ANSWERS, Answer
from localllm.chat.cascade import DEFAULT_ACCEPT, Bar, Tried
from localllm.chat.recorder import ChatRecorder
from localllm.cli.choices import AnswerChoice
from localllm.cli.context import CliContext
from localllm.cli.options import number, option, refuse_together
from localllm.errors import Fix, UsageError
from localllm.registry import BUILT_IN
from localllm.runtime.engine_loader import check
from localllm.runtime.selection import Selection, is_model
from localllm.settings import ANSWER

_CHOOSES = "a cascade chooses the answer itself"
# Why --cascade does not go with other flags.
_EXCLUSIVE = {
    "--adapter": "an adapter fits one model",
    "--logit-bias": "a token has another id in each model",
    "--n": _CHOOSES,
    "--best-of": _CHOOSES,
    "--beams": _CHOOSES,
    "--show-prompt": "each model has a prompt of its own",
    "--ray": "replicas are of one model",
}
_NOT_BATCH = {"--cascade --batch": "a job is answered by one model"}
_ONE_MODEL = Fix.without("--cascade", "--accept", "--agree")
CASCADE_OPTIONS = (
    option(
        "--cascade",
        "Ask the first model, and the next one only if the answer's confidence is below --accept. "
        "Two models or more, the cheapest first: tiny,qwen3-8b.",
        "MODEL,MODEL",
        group=ANSWER,
    ),
    number(
        "--accept",
        "With --cascade: the lowest confidence of an answer that is given, up to 1. It is the mean probability of its "
        f"tokens, or the share of drafts that agree (--agree). Default: {DEFAULT_ACCEPT:g}.",
        0.001,
        1,
        f"{DEFAULT_ACCEPT:g}",
        "P",
        float,
        group=ANSWER,
    ),
    number(
        "--agree",
        "With --cascade: sample N drafts and count how many say the same. For short answers.",
        2,
        MAX_ANSWERS,
        "5",
        group=ANSWER,
    ),
)


@dataclass(frozen=True)
class CascadeFlags:
    """names: of the models, the cheapest first. bar: what an answer of all but the last must pass. takes_prompt: the
    command does."""

    names: tuple[str, ...]
    bar: Bar
    takes_prompt: bool = False

    def select(self, model: str | None, select: Callable[[str], Selection]) -> list[Selection]:
        """Return the models. All but the first are loaded when they are needed, but that they are there, and of a kind
        that runs, is found out now.

        model: named on the line in another place. Raises UsageError, and what `select` and `check` do.
        """
        if model is not None:
            what, why = f"--cascade and the model {model[:80]!r} cannot go together", "a cascade names its models"
            prompt = f", or write -p {shlex.quote(model)[:80]} where it is the prompt" if self.takes_prompt else ""
            raise UsageError(what, why=why, fix=f"leave {model[:80]!r} out{prompt}")
        found: dict[Path, Selection] = {}
        for place, name in enumerate(self.names):
            others = self.names[:place], self.names[place + 1 :]
            selection = select(name)
            if selection.preset is not None:
                why = f"its settings are for {selection.model_name} alone, and the models of a cascade share theirs"
                fix = _named(*others[0], selection.model_name, *others[1])
                raise UsageError(f"--cascade names the preset {selection.preset.name}", why=why, fix=fix)
            check(selection)
            if found.setdefault(selection.files.directory, selection) is not selection:
                why = "it would be asked twice, and be as unsure"
                fix = _named(*dict.fromkeys((*others[0], *others[1])))
                raise UsageError(f"--cascade names the model {name} twice", why=why, fix=fix)
        return list(found.values())

    def answers(
        self,
        cli: CliContext,
        selections: Sequence[Selection],
        recorder: ChatRecorder,
        asked: Callable[..., list[Answer]],
    ) -> list[Answer]:
        """Return the first answer that passes the bar, or the last model's. asked: gives the answers of one model, none
        where they do not pass."""
        tried: list[Tried] = []
        for selection in selections:
            cli.model, cli.resolved = selection.files, selection.resolved
            recorder.use_model(selection.model_name)
            bar = None if selection is selections[-1] else self.bar
            if answers := asked(selection, choice=AnswerChoice.judged(bar), tried=tried):
                return answers
        return []


def cascade_of(flags: Mapping[str, Any]) -> CascadeFlags | None:
    """Raises UsageError for flags that contradict each other, and for one that would have no effect."""
    text = flags["cascade"]
    if text is None:
        for name in ("accept", "agree"):
            if flags[name] is not None:
                why = "it says when the answer of a cascade's model is sure enough"
                raise UsageError(f"--{name} needs --cascade", why=why, fix=[_named(), Fix.without(f"--{name}")])
        return None
    for other, why in _EXCLUSIVE.items():
        refuse_together(flags, {f"--cascade {other}": why}, [Fix.without(other), _ONE_MODEL])
    refuse_together(flags, _NOT_BATCH, _ONE_MODEL)
    names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2 or not all(names):
        why = "it must be two models or more, the cheapest first, with commas between"
        raise UsageError(f"--cascade is {text[:80]!r}", why=why, fix=_named(*filter(None, _separated(names))))
    bar = Bar(flags["accept"] or DEFAULT_ACCEPT, flags["agree"] or 1)
    return CascadeFlags(names, bar, takes_prompt="prompt" in flags)


def _separated(names: Sequence[str]) -> list[str]:
    """Return the names, those apart that have a semicolon or a blank in place of the comma."""
    return [part for name in names for part in ([name] if is_model(name) else re.split(r"[;\s]+", name))]


def _named(*names: str) -> Fix:
    """Return the fix that names these models; the built-in one is the cheapest, and there beside any other."""
    names = names if len(names) != 1 or names == (BUILT_IN,) else (BUILT_IN, *names)
    if len(names) < 2:
        return Fix.advice("name two models of `localllm list`, the cheaper first: --cascade SMALL,LARGE")
    return Fix.flag("--cascade", ",".join(names))
