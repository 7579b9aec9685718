"""Every kernel beside its reference on random inputs: `python -m localllm.kernels.gpu.check cuda:0`.

A program of its own, see `ready`. Exit code 0 says that all are right; its last line, which is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels import int8, paged_attention, reference, tile16
from localllm.kernels.gpu import activations, catalog, dequantize, embed, gemm, gemv, sample
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import DECODE_ROWS, PREFILL_ROWS, SECTION_PAGES, History, attend, tasks_of
from localllm.kernels.gpu.attention_merge import new_parts
from localllm.kernels.gpu.gemm import Shape
from localllm.kernels.gpu.gemv import GpuMatrix
from localllm.kernels.gpu.launch import run_all
from localllm.kernels.gpu.product import Dispatch
from localllm.kernels.gpu.ready import WRONG
from localllm.kernels.gpu.rope import Rope, TokenTables, rope_store
from localllm.kernels.kv_page import PAGE_TOKENS, Coding, PageLayout
from localllm.kernels.paged_attention import LayerPages

EXACT = 2e-6  # of the norm: sums of whole numbers, and what fp32 loses of some hundred terms
ROUNDED = 5e-3  # where bf16 is multiplied
_N, _K = 200, 2100
ROW_COUNTS, HEAD_DIMS = (1, 2, 4, 7, 16, 33, 64), (64, 128)
_HEADS, _KV_HEADS, _LAYER = 8, 2, 1


class Case(NamedTuple):
    """error: of the norm of what is right; NaN where the kernel left something unwritten."""

    name: str
    error: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance  # false of a NaN

    def line(self) -> str:
        state = "ok:" if self.is_right else WRONG
        return f"{state} {self.name}, error {self.error:.1e}, at most {self.tolerance:.0e}"


def cases(device: torch.device) -> Iterator[Case]:
    for group in (*catalog.GROUPS, None):
        yield from _products(device, group)
        yield _dequantized(device, group)
    yield from _between(device)
    yield _embedded(device)
    yield _drawn(device)
    for head_dim in HEAD_DIMS:
        for keys, values in catalog.FORMATS:
            yield from _attention(device, head_dim, keys, values)


def _error(found: Tensor, right: Tensor) -> float:
    found, right = found.double().cpu(), right.double().cpu()
    return float((found - right).norm() / right.norm())


def _poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def _matrix(device: torch.device, group: int | None) -> GpuMatrix:
    tiles = -(-_N // tile16.TILE)
    if group is None:
        codes = torch.randint(-127, 128, (tiles * tile16.TILE, -(-_K // 64) * 64), dtype=torch.int8)
        return GpuMatrix(int8.pack(codes).to(device), torch.rand((tiles, tile16.TILE), device=device) / 127, None)
    groups = -(-_K // group)
    qweight = tile16.pack(torch.randint(0, 16, (tiles * tile16.TILE, groups * group), dtype=torch.uint8))
    scale = torch.rand((tiles, groups, tile16.TILE)).half()
    return GpuMatrix(qweight.to(device), scale.to(device), (-7.5 * scale).half().to(device))


def _expected(x: Codes, matrix: GpuMatrix) -> Tensor:
    grouped, x_scale = x.q.cpu().view(len(x.q), -1, x.group), x.scale.cpu()
    tensors = [None if part is None else part.cpu() for part in (matrix.qweight, matrix.scale, matrix.bias)]
    qweight, scale, bias = tensors
    assert qweight is not None and scale is not None
    if bias is None:
        return reference.int8_product(grouped, x_scale, qweight, scale, _N)
    return reference.int4_product(grouped, x_scale, qweight, scale, bias, _N)


def _products(device: torch.device, group: int | None) -> Iterator[Case]:
    """Both kernels; each of few rows must have the bits that it has alone."""
    matrix, x = _matrix(device, group), torch.randn((64, _K), device=device)
    codes = Codes.empty(64, matrix.in_features, matrix.group, device)
    activations.to_codes(x, codes, _K).run()
    right = _expected(codes, matrix)
    alone = _poisoned(1, _N, device=device)
    gemv.gemv(codes.first(1), matrix, alone, _N).run()
    named = "int8" if group is None else f"int4-g{group}"
    for rows in ROW_COUNTS:
        found = {"gemv": _poisoned(rows, _N, device=device)}
        gemv.gemv(codes.first(rows), matrix, found["gemv"], _N).run()
        for parts in (1, 4):
            shape = Dispatch(1).shape(matrix, rows)
            y, partial = _poisoned(rows, _N, device=device), _poisoned(parts, rows, _N, device=device)
            shaped = Shape(shape.weight_rows, parts, shape.num_warps, shape.num_stages)
            run_all(gemm.gemm(codes.first(rows), matrix, y, _N, shape=shaped, partial=partial))
            found[f"gemm in {parts}"] = y
        for kernel, y in found.items():
            yield Case(f"{kernel} of {named}, {rows} rows", _error(y, right[:rows]), EXACT)
            differ = float((y[:1] != alone).sum())
            yield Case(f"{kernel} of {named}, {rows} rows: bits of the first", differ, 0)


def _dequantized(device: torch.device, group: int | None) -> Case:
    matrix, out = _matrix(device, group), _poisoned(_N, _K, device=device)
    dequantize.dequantize(matrix, out, 0, matrix.tiles, _N).run()
    if matrix.bias is None:
        right = int8.dequantize(matrix.qweight, matrix.scale, _N, _K, torch.float32)
    else:
        right = tile16.dequantize(matrix.qweight, matrix.scale, matrix.bias, _N, _K, torch.float32)
    return Case(f"dequantized {'int8' if group is None else f'int4-g{group}'}", _error(out, right), EXACT)


def _between(device: torch.device) -> Iterator[Case]:
    x, weight = torch.randn((3, 2 * _K), device=device), torch.rand(_K, device=device)
    wide = x.double()
    first, second = wide[:, :_K], wide[:, _K:]
    normed = first * torch.rsqrt(first.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    tanh = torch.nn.functional.gelu(first, approximate="tanh")
    right = {
        "a norm": (normed, {"weight": weight, "eps": 1e-5}),
        "silu": (torch.nn.functional.silu(first) * second, {"activation": "silu"}),
        "gelu": (torch.nn.functional.gelu(first) * second, {"activation": "gelu"}),
        "gelu_tanh": (tanh * second, {"activation": "gelu_tanh"}),
        "rows": (first, {}),
    }
    for name, (expected, options) in right.items():
        y, codes = _poisoned(3, _K, device=device), Codes.empty(3, -(-_K // 64) * 64, 64, device)
        activations.to_floats(x, y, _K, **options).run()  # type: ignore[arg-type]
        yield Case(f"{name} as floats", _error(y, expected), EXACT * 10)
        activations.to_codes(x, codes, _K, **options).run()  # type: ignore[arg-type]
        values = codes.q.view(3, -1, 64).double() * codes.scale.double().unsqueeze(-1)
        half_steps = (values.flatten(1)[:, :_K] - expected).abs() / codes.scale.repeat_interleave(64, 1)[:, :_K]
        yield Case(f"{name} as codes, in steps", float(half_steps.max()), 0.51)
        yield Case(f"{name}: sums of codes", _error(codes.bias, values.sum(-1)), EXACT * 10)


def _embedded(device: torch.device) -> Case:
    matrix, ids = _matrix(device, None), torch.tensor([3, 0, _N - 1], device=device)
    x = _poisoned(3, _K, device=device)
    embed.embed(matrix.qweight, matrix.scale, ids, x, 2.0).run()
    return Case("an embedding", _error(x, 2 * int8.rows(matrix.qweight, matrix.scale, ids, _K)), EXACT)


def _drawn(device: torch.device) -> Case:
    """Noise aside, which `sampler` is the reference of: a greedy row, one at a temperature near zero, one of NaN."""
    logits = torch.randn((3, 5000), device=device)
    logits[2, 4000] = torch.nan
    tokens, room = torch.full((3,), -7, device=device), sample.SampleRoom.empty(3, 5000, device)
    keys = torch.tensor([1, 2, 3], device=device)
    temperatures, thresholds = torch.tensor([0.0, 1e-6, 1.0], device=device), torch.full((3,), -1.0, device=device)
    run_all(sample.sample(logits, keys, temperatures, thresholds, tokens, room))
    right = [int(logits[0].argmax()), int(logits[1].argmax()), sample.NOT_FINITE]
    return Case("drawn tokens", float(tokens.tolist() != right), 0)


def _attention(device: torch.device, head_dim: int, keys: Coding, values: Coding) -> Iterator[Case]:
    """New tokens behind 700, over the border of a page, beside torch's operators over a copy of the pages."""
    for count, rows in ((5, DECODE_ROWS), (70, PREFILL_ROWS)):
        pages = _Pages(device, head_dim, keys, values, past=702, count=count)
        qkv = torch.randn((count, _HEADS + 2 * _KV_HEADS, head_dim), device=device)
        inv_freq = torch.rand((1, head_dim // 2), device=device) * 0.1
        q, k, v = torch.split(qkv, [_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
        angles = torch.arange(702, 702 + count, device=device)[:, None, None].float() * inv_freq
        right = pages.copied().attended(_turned(q, angles), _turned(k, angles), v)
        found = pages.by_kernels(qkv, inv_freq, rows)
        yield Case(f"attention of {keys}/{values}, heads of {head_dim}, {count} rows", _error(found, right), ROUNDED)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: x [T, heads, D], angles [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _Pages:
    """One sequence's pages of two layers, with random tokens in them and room for `count` more."""

    def __init__(
        self, device: torch.device, head_dim: int, keys: Coding, values: Coding, *, past: int, count: int
    ) -> None:
        self.device, self.past, self.count = device, past, count
        self.dense = PageLayout(_KV_HEADS, head_dim, "dense", "dense", torch.bfloat16)
        is_dense = keys == "dense"
        self.coded = None if is_dense else PageLayout(_KV_HEADS, head_dim, keys, values, torch.bfloat16)
        total = -(-(past + count) // PAGE_TOKENS)
        layouts = [self.dense] + [self.coded or self.dense] * (total - 1)
        self.pages = [self._page(layout) for layout in layouts]
        first = past // PAGE_TOKENS
        self.own = self.pages[first:] if is_dense else [self._page(self.dense) for _ in range(total - first)]
        written = torch.randn((2, past, _KV_HEADS, head_dim), device=device)
        for begin in range(0, past, PAGE_TOKENS):
            number, part = begin // PAGE_TOKENS, written[:, begin : begin + PAGE_TOKENS]
            own = self.own[0] if number == first else self._page(self.dense) if number else self.pages[0]
            own = self.pages[number] if is_dense else own
            layer = LayerPages(self.dense, self.coded, number, [self.pages[number][_LAYER]], [own[_LAYER]])
            paged_attention.write(layer, begin, part[0], part[1])

    def _page(self, layout: PageLayout) -> Tensor:
        return torch.zeros((2, layout.layer_bytes), dtype=torch.uint8, device=self.device)

    def copied(self) -> _Pages:
        """Of the same content, as tokens were written."""
        other = object.__new__(_Pages)
        other.__dict__.update(self.__dict__)
        other.pages = [page.clone() for page in self.pages]
        first = self.past // PAGE_TOKENS
        other.own = other.pages[first:] if self.coded is None else [page.clone() for page in self.own]
        return other

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """By torch's operators, in fp32: [T, H * D]."""
        pages, own = ([page[_LAYER] for page in some] for some in (self.pages, self.own))
        layer = LayerPages(self.dense, self.coded, 0, pages, own)
        paged_attention.write(layer, self.past, k, v)
        return paged_attention.paged_attention(q, layer, self.past, scale=q.shape[-1] ** -0.5).flatten(1)

    def by_kernels(self, qkv: Tensor, inv_freq: Tensor, rows: int) -> Tensor:
        T, D = self.count, qkv.shape[-1]
        slots = torch.arange(self.past, self.past + T)
        numbers = slots // PAGE_TOKENS
        first = self.past // PAGE_TOKENS
        own = torch.tensor([self.own[number - first].data_ptr() for number in numbers.tolist()])
        addresses = torch.tensor([page.data_ptr() for page in self.pages])
        coded = torch.where(numbers > 0, addresses[numbers], 0) if self.coded is not None else torch.zeros_like(own)
        strides = torch.full((T,), self.dense.layer_bytes)
        position = slots.int().to(self.device)
        tables = TokenTables(position, position, *(x.to(self.device) for x in (own, strides, coded)))
        tasks = list(tasks_of(0, 0, self.past, T, rows // (_HEADS // _KV_HEADS)))
        history = History(
            torch.tensor(tasks, dtype=torch.int32, device=self.device),
            torch.tensor([self.past], dtype=torch.int32, device=self.device),
            addresses.unsqueeze(0).to(self.device),
        )
        q, out = (_poisoned(T, *shape, device=self.device) for shape in ((_HEADS, D), (_HEADS * D,)))
        rope_store(qkv, q, tables, Rope(inv_freq), self.dense, self.coded, _LAYER).run()
        sections = -(-len(self.pages) // SECTION_PAGES) if rows == DECODE_ROWS else 1
        parts = new_parts(sections, T, _HEADS, D, self.device)
        scale = D**-0.5
        run_all(attend(q, out, tables, history, parts, self.dense, self.coded, _LAYER, scale=scale, rows=rows))
        return out


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here that torch can use")
    torch.manual_seed(0)
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda:0")
    torch.cuda.set_device(device)  # Triton launches on the current one
    found = list(cases(device))
    wrong = [case for case in found if not case.is_right]
    for case in [case for case in found if case.is_right] + wrong:
        print(case.line())  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
