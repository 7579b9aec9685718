"""An adapter as its files have it: two thin matrices beside some of a checkpoint's. Knows no file format, and not how a
model fuses its matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from localllm.errors import AdapterError, CheckpointError, Fixes, UnsupportedModelError, show
from localllm.models.architecture import ModelConfig
from localllm.models.checkpoints.safetensors_file import allocate
from localllm.quant.layouts import torch_dtype

CHOOSE_ANOTHER = "choose an adapter that was made for this model, or the model that it was made for"
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """What an adapter adds to a matrix of a checkpoint: W [N, K] += scale * b @ a. Rows and columns are in the order of
    the checkpoints that it was made for. Of an embedding, N is the vocabulary.

    name: the matrix, as `Checkpoint` calls it without ".weight": "model.layers.0.self_attn.q_proj".
    stored: its name in the adapter's file, for errors.
    a: [rank, K]. b: [N, rank]. Both on the CPU, of one floating dtype.
    """

    name: str
    stored: str
    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True, eq=False)
class StoredAdapter:
    """place: the folder or the file. base: the model that it was made for, by its own account, or "".
    made_for: the config of the model that it is to change, with the way in which the adapter has its matrices.
    deltas: by the names of the matrices.
    """

    place: Path
    base: str
    made_for: ModelConfig
    deltas: Mapping[str, WeightDelta]


@dataclass(frozen=True)
class LoraTensor:
    """A tensor of a file, and how it is read. dtype: torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read_into: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LoraPair:
    """The two tensors of one change. module: what they change, in the file's words.

    a: [rank, K], of experts [experts, rank, K]. b: [N, rank], or [experts, N, rank]. Raises AdapterError.
    """

    place: Path
    module: str
    a: LoraTensor
    b: LoraTensor

    def __post_init__(self) -> None:
        a, b = self.a, self.b
        for tensor in (a, b):
            if tensor.dtype not in _DTYPES:
                why = f"{show(tensor.name)} is stored as {tensor.dtype}; {', '.join(_DTYPES)} are read"
                raise AdapterError(f"{self.place} cannot be read", why=why, fix=CHOOSE_ANOTHER)
        is_matrix = len(a.shape) == len(b.shape) >= 2 and 0 not in a.shape + b.shape
        if not is_matrix or a.shape[:-2] != b.shape[:-2] or a.shape[-2] != b.shape[-1]:
            why = f"{show(a.name)} is {list(a.shape)} and {show(b.name)} is {list(b.shape)}"
            what = f"{self.place}: the two matrices of {show(self.module)} do not fit together"
            raise AdapterError(what, why=f"{why}; [rank, in] and [out, rank] are needed", fix=CHOOSE_ANOTHER)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return a and b in one dtype. Raises AdapterError for a NaN or an infinity, naming the tensor."""
        dtype = torch_dtype(self.a.dtype if self.a.dtype == self.b.dtype else "float32")
        a, b = (
            self._finite(tensor.name, tensor.read_into(allocate(tensor.shape, dtype, tensor.name)))
            for tensor in (self.a, self.b)
        )
        return a, b

    def _finite(self, name: str, values: Tensor) -> Tensor:
        wrong = values.numel() - int(torch.isfinite(values).sum())
        if wrong:
            why = f"{wrong} of {values.numel()} numbers are no finite ones"
            raise AdapterError(f"{self.place}: {show(name)} is damaged", why=why, fix="fetch the adapter's files anew")
        return values


def by_name(deltas: Iterable[WeightDelta], place: Path) -> dict[str, WeightDelta]:
    """Raises AdapterError where two change one matrix."""
    found: dict[str, WeightDelta] = {}
    for delta in deltas:
        if delta.name in found:
            why = f"{show(found[delta.name].stored)} and {show(delta.stored)} are both stored"
            what = f"{place} changes {show(delta.name)} twice"
            raise AdapterError(what, why=why, fix="fetch the adapter's files anew")
        found[delta.name] = delta
    return found


def unknown_matrix(place: Path, name: str, stored: str, base: str, config: ModelConfig) -> AdapterError:
    """Return the error of an adapter of what the model does not have. stored: the name in the file."""
    why = f"it stores {show(stored)}, the model is a {config.model_type} of {config.num_layers} layers{made_for(base)}"
    return AdapterError(f"{place} changes {show(name)}, which the model does not have", why=why, fix=CHOOSE_ANOTHER)


def made_for(base: str) -> str:
    """Return the end of an error's reason that names the model that an adapter was made for."""
    return f"; it was made for {show(base)}" if base else ""


def unsupported(place: Path | str, what: str, why: str = "", fix: Fixes = "choose another adapter") -> AdapterError:
    """Return the error of an adapter that computes what is not computed here. what: "DoRA (use_dora)"."""
    reason = why or "only plain LoRA is computed here: two thin matrices beside one of the model's"
    return AdapterError(f"{place}: {what} is not supported", why=reason, fix=fix)


@contextmanager
def blaming_adapter() -> Iterator[None]:
    """Errors of files are the adapter's, and what helps is not to fetch the model anew. Raises AdapterError."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        raise AdapterError(error.what, why=error.why, fix="fetch the adapter's files anew") from None
