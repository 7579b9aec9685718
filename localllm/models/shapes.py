"""The architectures of the models of models.toml, as shipped: what a model's speed depends on, without its weights.

shapes.json holds, under each name, the numbers of that model's config.json; they are read as any config.json is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import hub
from localllm.hub.names import understand
from localllm.models.architecture import ModelConfig
from localllm.models.families import load_config, parse_config
from localllm.registry import load_registry

SHAPES = Path(__file__).parent / "shapes.json"


@dataclass(frozen=True)
class Shape:
    """raw_config: as config.json has it."""

    name: str
    config: ModelConfig
    raw_config: Mapping[str, Any]


def shipped_shapes() -> dict[str, dict[str, Any]]:
    """The objects of config.json by the names of models.toml. `tiny` is not among them: it is in the package itself."""
    shapes: dict[str, dict[str, Any]] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


def find_shape(name: str) -> Shape:
    """The architecture of a model of the registry, on this disk or not; of another model where it is on this disk.

    Raises ModelNotFoundError naming what the name may have been meant for. Uses no network.
    """
    registry = load_registry()
    reference = understand(name, registry)
    raw = shipped_shapes().get(reference.entry.name) if reference.entry else None
    if raw is not None:
        return Shape(reference.name, parse_config(raw, f"the shape of {reference.name}"), raw)
    files = hub.locate(name, registry=registry)
    config = load_config(files.directory)
    return Shape(files.name, config, json.loads((files.directory / "config.json").read_text(encoding="utf-8")))
