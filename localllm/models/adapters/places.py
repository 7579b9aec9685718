"""Where the matrices of a checkpoint are in the blocks of a model, by their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from localllm.kernels.state_shapes import DeltaShape
from localllm.layers.config import AttentionConfig, DeltaNetConfig
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.layout import EMBED, HEAD, BlockLayout, Experts, HeadCut, Matrix

EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens", "lm_head"
_EXPERT = re.compile(r"(.+)\.(\d{1,5})\.\w+")


@dataclass(frozen=True)
class MatrixPlace:
    """Some rows of a block's matrix, which a checkpoint has as a tensor of their own.

    site: the matrix, "layers.0.attention.qkv_proj". names: of the tensors that are stored where this one is.
    first, rows: which of the stored rows. delta: of the mixer, where that is Gated DeltaNet.
    """

    site: str
    matrix: Matrix
    names: tuple[str, ...]
    first: int
    rows: int
    delta: DeltaShape | None = None

    @property
    def cut(self) -> HeadCut | None:
        """Return how the site's matrix is cut out of the one that is stored; None where it is rows of that."""
        return self.matrix.cut if self.matrix.cut is not None and self.names == (self.matrix.cut.stored,) else None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of what is stored."""
        cut = self.cut
        return (self.rows, self.matrix.in_features) if cut is None else cut.shape(self.matrix)


class MatrixPlaces:
    """The matrices of a model. Embeddings that tokens have for each layer are none of them."""

    def __init__(self, config: ModelConfig) -> None:
        self._places: dict[str, list[MatrixPlace]] = defaultdict(list)
        self._experts: dict[str, tuple[str, Experts]] = {}
        mixers = [layer.mixer for layer in config.layers]
        deltas = {
            f"layers.{number}.attention": mixer.shape
            for number, mixer in enumerate(mixers)
            if isinstance(mixer, DeltaNetConfig)
        }
        for layout in block_layouts(config):
            self._add(layout, deltas.get(layout.name))
        for site, name in ((EMBED, EMBEDDING_NAME), (HEAD, HEAD_NAME)):
            matrix = Matrix(site, name, {name: config.vocab_size}, config.hidden_size, role="embedding")
            self._places[name] = [MatrixPlace(site, matrix, (name,), 0, config.vocab_size)]
        readers = [
            n for n, each in enumerate(mixers) if isinstance(each, AttentionConfig) and each.kv_of_layer is not None
        ]
        self._unread = {f"model.layers.{n}.self_attn.{part}_proj" for n in readers for part in "kv"}

    def _add(self, layout: BlockLayout, delta: DeltaShape | None) -> None:
        for matrix in layout.matrices:
            if matrix.role != "embedding":
                for name, place in _places(f"{layout.name}.{matrix.name}", matrix, delta):
                    self._places[name].append(place)
        if layout.experts is not None:
            self._experts[layout.experts.stored] = layout.name, layout.experts

    def find(self, name: str) -> list[MatrixPlace]:
        """Return the places of a matrix, of which some have two; [] where the model has none of this name."""
        if name in self._places:
            return self._places[name]
        found = _EXPERT.fullmatch(name)
        block, experts = self._experts.get(found[1], ("", None)) if found else ("", None)
        if found is None or experts is None or int(found[2]) >= experts.num_experts:
            return []
        index = int(found[2])
        return [
            place
            for matrix in experts.matrices(index)
            for part, place in _places(f"{block}.experts.{index}.{matrix.name}", matrix, None)
            if part == name
        ]

    def experts(self, name: str) -> Experts | None:
        """Return the experts of this name: "model.layers.0.mlp.experts"."""
        return self._experts.get(name, ("", None))[1]

    def is_unread(self, name: str) -> bool:
        """Return whether checkpoints have a matrix of this name that nobody computes with: a layer's that reads the
        keys and values of another."""
        return name in self._unread

    def sites_of(self, target: str) -> frozenset[str]:
        """Return the sites of the linear layers that a target of an adapter names: by a name, or the end of one.
        Experts and routers are parameters to some versions of transformers, and none of them."""
        return frozenset(
            place.site
            for name, places in self._places.items()
            for place in places
            if place.matrix.role != "router"
            and (name in place.matrix.parts or place.cut is not None)
            and (name == target or name.endswith(f".{target}"))
        )


def _places(site: str, matrix: Matrix, delta: DeltaShape | None) -> Iterator[tuple[str, MatrixPlace]]:
    """Yield the places of a matrix's parts, and of all of it, by the names that they are stored by."""
    first = 0
    for name, rows in matrix.parts.items():
        yield name, MatrixPlace(site, matrix, tuple(matrix.parts), first, rows, delta)
        first += rows
    if matrix.stored not in matrix.parts:
        yield matrix.stored, MatrixPlace(site, matrix, (matrix.stored,), 0, matrix.out_features, delta)
    if matrix.cut is not None:
        yield matrix.cut.stored, MatrixPlace(site, matrix, (matrix.cut.stored,), 0, matrix.out_features)
