"""Who does the work of the kernels on the simulated card: torch's operators, in a moment, or Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from localllm.kernels.gpu.launch import KernelLaunch
from localllm.models import (
    gpu_warm as gpu_warm,
)  # with all that has a kernel's function by its name, before it is replaced
from tests.interpreter import language_patched_once, types_looked_up_once
from tests.simulated_card.device import SimulatedCard
from tests.simulated_card.references import REFERENCES, RUN_BY_THEMSELVES
from tests.simulated_card.tensors import content_of, tensors_in


@dataclass(frozen=True)
class _Launch:
    """In the place of a KernelLaunch, or of several."""

    run: Callable[[], None]

    def __iter__(self) -> Iterator[_Launch]:
        yield self


@contextmanager
def use_references(card: SimulatedCard) -> Iterator[None]:
    """Let every function that makes launches make those of its reference."""

    def without_reference(launch: KernelLaunch) -> None:
        error = AssertionError(f"{launch.name} is launched by a function that tests/simulated_card/references.py lacks")
        card.broke_rule(str(error), error)

    with pytest.MonkeyPatch.context() as patch:
        for function, reference in REFERENCES.items():
            replace_everywhere(function, _launching(card, function, reference), patch)
        patch.setattr(KernelLaunch, "run", without_reference)
        yield


@contextmanager
def interpret(card: SimulatedCard) -> Iterator[None]:
    """Let Triton's interpreter run each launch when it is its turn."""
    run = KernelLaunch.run

    def launched(launch: KernelLaunch) -> None:
        on_card = replace(launch, arguments={name: content_of(value) for name, value in launch.arguments.items()})
        card.launch(launch.name, partial(run, on_card), list(tensors_in(on_card.arguments)))

    with pytest.MonkeyPatch.context() as patch, language_patched_once(), types_looked_up_once():
        patch.setattr(KernelLaunch, "run", launched)
        yield


def _launching(
    card: SimulatedCard, function: Callable[..., Any], reference: Callable[..., None]
) -> Callable[..., _Launch | None]:
    def launching(*arguments: Any, **named: Any) -> _Launch | None:
        arguments, named = content_of(arguments), {name: content_of(value) for name, value in named.items()}
        work = partial(reference, card, *arguments, **named)
        launch = partial(card.launch, function.__name__, work, list(tensors_in([*arguments, named])))
        if function not in RUN_BY_THEMSELVES:
            return _Launch(launch)
        launch()
        return None

    return launching


def replace_everywhere(function: Callable[..., Any], other: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
    """Wherever a module of ours has it by a name."""
    for module in [module for name, module in sys.modules.items() if name.startswith("localllm.")]:
        for name in [name for name, value in vars(module).items() if value is function]:
            patch.setattr(module, name, other)
