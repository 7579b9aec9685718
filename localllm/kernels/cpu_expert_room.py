"""A mixture's experts as steps of a tape, and the buffers between the steps.

Knows nothing of models: what a mixture is made of are tensors and addresses. Experts' records may lie anywhere; the
table says where, and may change between two runs of a tape.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels import cpu_experts, cpu_quantize, cpu_router
from localllm.kernels.cpu_isa import Isa
from localllm.kernels.cpu_jit import Native
from localllm.kernels.cpu_linear import Step, float_bits
from localllm.kernels.expert_block import BLOCK_WORDS
from localllm.kernels.sizes import TILE, Glu, RouterConfig, Weights, most_blocks

SMALLEST_GROUP = 16  # of columns that share a scale


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of every expert: its format, and where in an expert's record its tensors begin, in bytes.

    All offsets are multiples of 64, as the records' addresses are. bias: of INT4's groups, 0 where there is none.
    linear_bias: of fp32 [out_features].
    """

    weights: Weights
    out_features: int  # a multiple of 16
    in_features: int  # a multiple of the group
    qweight: int
    scale: int
    bias: int = 0
    linear_bias: int | None = None

    @property
    def group(self) -> int:
        return self.weights.columns


@dataclass(frozen=True)
class Mixture:
    """The experts of one block of a decoder.

    matrix fp32 [num_experts or more, hidden]: the router's; a row behind the experts' is the gate of what all tokens
    share. matrix_bias fp32, one for each of its rows; correction fp32 [num_experts]. norm fp32 [hidden]: of what goes
    in; None where it is normed already; router_norm: of what goes into the router, where that is another. expert_scales
    fp32 [num_experts], which multiply the weights. table int64 [num_experts]: addresses of records.
    """

    router: RouterConfig
    matrix: Tensor
    table: Tensor
    gate_up: ExpertMatrix
    down: ExpertMatrix
    glu: Glu
    norm: Tensor | None = None
    eps: float = 0.0
    matrix_bias: Tensor | None = None
    correction: Tensor | None = None
    router_norm: Tensor | None = None
    expert_scales: Tensor | None = None


# Of the steps of a mixture: those that group tokens by their experts and compute them, and the last, which combines.
GROUP_STEP, COMBINE_STEP = -6, -1


class ExpertRoom:
    """Room for up to `rows` tokens of mixtures of up to the given sizes, and the steps that compute them in it.

    `shape[0]` says how many tokens there are at a run. Blocks of one row read a token's INT8 form where it was made
    once; of more rows, every block has its own.
    """

    def __init__(self, isa: Isa, rows: int, router: RouterConfig, gate_up: ExpertMatrix, block_rows: int) -> None:
        """router, gate_up: the largest of what the mixtures have."""
        self.isa, self.rows, self.block_rows = isa, rows, block_rows
        pairs = rows * router.top_k
        blocks = most_blocks(pairs, router.num_experts, block_rows)
        self.shape = torch.tensor([rows, 1])  # tokens, and rows of their blocks where experts read them one by one
        self.logits = torch.zeros(rows * (router.num_experts + TILE))
        self.experts = torch.zeros(pairs, dtype=torch.int32)
        self.weights = torch.zeros(pairs)
        self._guesses = torch.zeros(router.top_k, dtype=torch.int32)
        self.places = torch.zeros(pairs, dtype=torch.int32)
        self.blocks = torch.zeros(blocks * len(BLOCK_WORDS), dtype=torch.int32)
        self.tokens = torch.zeros(blocks * block_rows, dtype=torch.int32)
        self.grouped_shape = torch.tensor([0, block_rows, 0])  # blocks, their rows, the first block
        features = max(gate_up.in_features, gate_up.out_features // 2)
        self.q = torch.zeros(blocks * block_rows * features, dtype=torch.int8)
        scales = blocks * block_rows * (features // SMALLEST_GROUP)
        self._groups = {name: torch.zeros(scales) for name in ("x_scale", "x_bias")}
        self._groups["x_offset"] = torch.zeros(scales, dtype=torch.int32)
        self.wide = torch.zeros(blocks * block_rows, gate_up.out_features)
        self.y = torch.zeros(blocks * block_rows, gate_up.in_features)

    def steps(
        self, mixture: Mixture, source: Tensor, x: Tensor, *, adds: bool, shared: Tensor | None = None
    ) -> Iterator[Step]:
        """x [T, hidden] = the mixture of source [T, hidden]; or x += it, where `adds`. shared [T, hidden]: see
        `cpu_experts.combine_source`; it is gated where the router's matrix has a row more than there are experts."""
        yield from self._route(mixture, source)
        yield from self.expert_steps(mixture, source)
        outputs, experts = len(mixture.matrix), mixture.router.num_experts
        kind: cpu_experts.Shared = "none" if shared is None else "gated" if outputs > experts else "plain"
        yield cpu_experts.combine(self.isa, adds=adds, shared=kind).step(
            y=self.y,
            places=self.places,
            weights=self.weights,
            shared=0 if shared is None else shared,
            gate=self.logits[experts:],
            x=x,
            shape=self.shape,
            features=mixture.down.out_features,
            top_k=mixture.router.top_k,
            gate_stride=outputs,
        )

    def expert_steps(self, mixture: Mixture, source: Tensor) -> Iterator[Step]:
        """y = what the experts of the blocks have before it is weighed, at the `places` of tokens' slots."""
        yield self._quantize_tokens(mixture, source)
        yield self._multiply(mixture, mixture.gate_up, self.wide, gathers=self.block_rows == 1)
        kernel = cpu_quantize.quantize(self.isa, mixture.down.group, "gated", mixture.glu, "grouped")
        yield self._quantize(kernel, self.wide, mixture.down, mixture.gate_up.out_features)
        yield self._multiply(mixture, mixture.down, self.y, gathers=False)

    def guess_steps(self, mixture: Mixture, source: Tensor) -> Iterator[Step]:
        """Guess the experts of a single token, source [1, hidden], before the blocks in front of the mixture have added
        to it. Of a trained mixture of 9 million parameters three of four such guesses are right a block ahead."""
        outputs = len(mixture.matrix)
        yield from self._choose(mixture, source, torch.zeros(outputs), self._guesses, torch.zeros(len(self._guesses)))

    def guessed(self, top_k: int) -> list[int]:
        """Return what the last guess was, the most likely expert first."""
        return self._guesses[:top_k].tolist()

    def chosen(self, top_k: int) -> Tensor:
        """Return the experts that were chosen for the tokens of now, int32 [T, top_k]."""
        return self.experts[: int(self.shape[0]) * top_k].view(-1, top_k)

    def arrange(self, chosen: Tensor, groups: Iterable[Sequence[int]]) -> Generator[None, None, None]:
        """Lay out the blocks of each group of experts as `cpu_experts.group` does those of all, and yield: the steps
        between routing and combining compute that group then. chosen: see there."""
        pairs: dict[int, list[int]] = {}
        for pair, expert in enumerate(chosen.flatten().tolist()):
            pairs.setdefault(expert, []).append(pair)
        top_k, rows, end = chosen.shape[1], self.block_rows, 0
        blocks, tokens, places = self.blocks.numpy(), self.tokens.numpy(), self.places.numpy()
        try:
            for group in groups:
                begin = end
                for expert in group:
                    own = pairs[expert]
                    first, count = end, -(-len(own) // rows)
                    end += count
                    for number in range(first, end):
                        part = own[(number - first) * rows : (number - first + 1) * rows]
                        at = number * len(BLOCK_WORDS)
                        blocks[at : at + len(BLOCK_WORDS)] = (expert, len(part), first, count)
                        tokens[number * rows : number * rows + len(part)] = [pair // top_k for pair in part]
                        places[part] = range(number * rows, number * rows + len(part))
                self.grouped_shape[0], self.grouped_shape[2] = end - begin, begin
                yield
        finally:
            self.grouped_shape[2] = 0  # whoever groups all experts begins with the first block

    def _route(self, mixture: Mixture, source: Tensor) -> Iterator[Step]:
        router = mixture.router
        yield from self._choose(mixture, source, self.logits, self.experts, self.weights)
        yield cpu_experts.group(self.isa, router.num_experts, self.block_rows).step(
            experts=self.experts,
            blocks=self.blocks,
            tokens=self.tokens,
            places=self.places,
            tokens_shape=self.shape,
            shape=self.grouped_shape,
            top_k=router.top_k,
        )

    def _choose(
        self, mixture: Mixture, source: Tensor, scratch: Tensor, experts: Tensor, weights: Tensor
    ) -> Iterator[Step]:
        router, bias = mixture.router, mixture.matrix_bias
        norm = mixture.norm if mixture.router_norm is None else mixture.router_norm
        outputs, hidden = mixture.matrix.shape
        logits = cpu_router.logits(self.isa, has_norm=norm is not None, has_bias=bias is not None)
        yield logits.step(
            x=source,
            weight=0 if norm is None else norm,
            matrix=mixture.matrix,
            bias=0 if bias is None else bias,
            y=scratch,
            shape=self.shape,
            features=hidden,
            stride=hidden,
            outputs=outputs,
            eps=float_bits(mixture.eps),
        )
        yield cpu_router.route(self.isa, router).step(
            logits=scratch,
            correction=0 if mixture.correction is None else mixture.correction,
            scales=0 if mixture.expert_scales is None else mixture.expert_scales,
            experts=experts,
            weights=weights,
            shape=self.shape,
            stride=outputs,
        )

    def _quantize_tokens(self, mixture: Mixture, source: Tensor) -> Step:
        matrix, kind = mixture.gate_up, "plain" if mixture.norm is None else "norm"
        rows: cpu_quantize.Rows = "all" if self.block_rows == 1 else "gathered"
        kernel = cpu_quantize.quantize(self.isa, matrix.group, kind, rows=rows)
        rest: dict[str, Tensor | int]
        rest = {} if mixture.norm is None else {"weight": mixture.norm, "eps": float_bits(mixture.eps)}
        return self._quantize(kernel, source, matrix, matrix.in_features, **rest)

    def _quantize(self, kernel: Native, x: Tensor, matrix: ExpertMatrix, stride: int, **rest: Tensor | int) -> Step:
        """The rows of x, a block's or a token's, as the matrix takes them."""
        by_blocks = {"blocks": self.blocks, "tokens": self.tokens} if "blocks" in kernel.pointers else {}
        shape = self.grouped_shape if by_blocks else self.shape
        words = {"weight": 0, "eps": 0, "groups": matrix.in_features // matrix.group} | rest | by_blocks | self._groups
        return kernel.step(x=x, q=self.q, shape=shape, stride=stride, **words)

    def _multiply(self, mixture: Mixture, matrix: ExpertMatrix, y: Tensor, *, gathers: bool) -> Step:
        assert matrix.group >= SMALLEST_GROUP
        kernel = cpu_experts.expert_matmul(
            self.isa,
            matrix.weights,
            self.block_rows,
            has_bias=matrix.linear_bias is not None,
            gathers=gathers,
        )
        return kernel.step(
            table=mixture.table,
            blocks=self.blocks,
            shape=self.grouped_shape,
            tokens=self.tokens,
            x=self.q,
            y=y,
            qweight=matrix.qweight,
            scale=matrix.scale,
            bias=matrix.bias,
            linear_bias=matrix.linear_bias or 0,
            tiles=matrix.out_features // TILE,
            groups=matrix.in_features // matrix.group,
            features=matrix.out_features,
            **self._groups,
        )


def block_rows(isa: Isa, rows: int, router: RouterConfig) -> int:
    """Return how many rows a block is best to have: twice as many as an expert has in the mean, of a few sizes.

    Of 128 experts, 8 a token (Zen 5), blocks of 8 rows take as long as blocks of one for 8 tokens, 0.9 of it for 16;
    blocks of 4 rows 0.84 for 32; blocks of 12 rows 0.98 of those of 8 for 512.
    """
    sizes = [size for size in (1, 4, 8) if size < isa.max_rows]
    return next((size for size in sizes if size * router.num_experts >= 2 * rows * router.top_k), isa.max_rows)
