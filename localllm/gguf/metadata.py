"""What a GGUF file's header says of its model: keys of the architecture, checked as they are read."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from localllm.errors import FETCH_ANEW, CheckpointError, UnsupportedModelError, show

Shape = tuple[int, ...]
Json = dict[str, object]

MOST = (1 << 31) - 1
MAX_LAYERS = 1024


@dataclass(frozen=True)
class Metadata:
    """A model's keys and the shapes of its tensors. name: the file in errors. factors: of its rotary embedding."""

    keys: Mapping[str, object]
    tensors: Mapping[str, Shape]
    factors: Mapping[str, Sequence[float]]
    architecture: str
    name: str

    def get(self, key: str) -> object:
        """Return the value of a key of the architecture, None where it is absent; one for all layers is one."""
        value = self.keys.get(f"{self.architecture}.{key}")
        if not isinstance(value, Sequence) or isinstance(value, str):
            return value
        if not 1 <= len(value) <= MAX_LAYERS:
            raise self.refused(key, value, f"a value for each of at most {MAX_LAYERS} layers")
        if any(each != value[0] for each in value):
            raise self.unsupported(f"another {key} in each layer")
        first: object = value[0]
        return first

    def listed(self, key: str) -> Sequence[object]:
        """Return the value of a key for each layer, without those that predict further tokens. Raises CheckpointError
        where it is a list of another length."""
        value, count = self.keys.get(f"{self.architecture}.{key}"), self.integer("block_count")
        if not isinstance(value, Sequence) or isinstance(value, str):
            return [value] * self.num_layers
        if len(value) != count:
            raise self.refused(key, value, f"a value for each of the {count} layers of block_count")
        return value[: self.num_layers]

    def in_first_layer(self) -> Metadata:
        """Return what the file says of the first layer, where it has a value for each."""
        lists = {key: value for key, value in self.keys.items() if isinstance(value, list | array) and value}
        firsts = {key: value[0] for key, value in lists.items() if key.startswith(f"{self.architecture}.")}
        return replace(self, keys={**self.keys, **firsts})

    def without_gaps(self) -> Metadata:
        """Return what the file says of the layers that have something of a kind, where others have 0 of it."""
        lists = {key: value for key, value in self.keys.items() if isinstance(value, list | array)}
        own = {key: set(value) for key, value in lists.items() if key.startswith(f"{self.architecture}.")}
        alike = {key: max(values) for key, values in own.items() if 0 in values and len(values) <= 2}
        return replace(self, keys={**self.keys, **alike})

    def integer(self, key: str, default: int | None = None) -> int:
        value = default if (found := self.get(key)) is None else found
        if type(value) is not int or not 0 <= value <= MOST:
            raise self.refused(key, value, f"an integer from 0 to {MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = default if (found := self.get(key)) is None else found
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refused(key, value, "a finite number")
        return decimal(float(value))

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    @property
    def head_dim(self) -> int:
        heads = self.integer("attention.head_count")
        return self.integer("attention.key_length", self.integer("embedding_length") // heads if heads else None)

    @property
    def num_layers(self) -> int:
        layers = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 1 <= layers <= MAX_LAYERS:
            raise self.refused("block_count", layers, f"a number of layers up to {MAX_LAYERS}")
        return layers

    @property
    def norm_eps(self) -> float:
        """What norms add. Where they are by mean and variance, there is the other key alone, and in some files of other
        models, too."""
        other = self.optional_number("attention.layer_norm_epsilon")
        return self.number("attention.layer_norm_rms_epsilon", other)

    @property
    def window(self) -> int | None:
        return self.integer("attention.sliding_window", 0) or None

    @property
    def has_bias(self) -> bool:
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")

    def has(self, part: str) -> bool:
        """Whether layers have a tensor of this name: "attn_q.bias"."""
        return any(name.endswith(f".{part}") for name in self.tensors)

    def width(self, part: str) -> int:
        """Return the last dimension of the first tensor of this name."""
        return self._shape(part)[-1]

    def height(self, part: str) -> int:
        """Return the first dimension of the first tensor of this name."""
        return self._shape(part)[0]

    def _shape(self, part: str) -> Shape:
        shapes = (shape for name, shape in self.tensors.items() if name.endswith(f".{part}") and shape)
        shape = next(shapes, None)
        if shape is None:
            raise CheckpointError(
                f"{self.name}: no layer has a tensor {part}", why="its model needs it", fix=FETCH_ANEW
            )
        return shape

    def refused(self, key: str, value: object, wanted: str) -> CheckpointError:
        found = "it is absent" if value is None else f"it is {show(value)}"
        what = f"{self.name}: {self.architecture}.{key} is not usable"
        return CheckpointError(what, why=f"{found}; {wanted} is needed", fix=FETCH_ANEW)

    def unsupported(self, what: str) -> UnsupportedModelError:
        why = f"this version does not run it in a model of the architecture {self.architecture}"
        return UnsupportedModelError(
            f"{self.name}: a model with {what} cannot run here",
            why=why,
            fix="choose another model: localllm list --all",
        )


def decimal(value: float) -> float:
    """Return the shortest decimal number that is this one in fp32, which is how GGUF stores what was a decimal."""
    with suppress(OverflowError):  # a number that fp32 does not have
        stored = struct.pack("<f", value)
        if struct.unpack("<f", stored)[0] == value:
            decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
            return next((each for each in decimals if struct.pack("<f", each) == stored), value)
    return value
