"""Quantized Hugging Face folders, packed here by plain loops in each format's own layout: what their matrices are."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.models.checkpoints.quantized import QuantizedMatrix
from localllm.models.checkpoints.quantizers import quantized_matrices
from localllm.quant.layouts import CodedLayout, Int4Layout

DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
AS_BITS = {torch.uint32: torch.int32, torch.float8_e4m3fn: torch.uint8, torch.float8_e8m0fnu: torch.uint8}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
Q = "model.layers.0.self_attn.q_proj"
W = f"{Q}.weight"


@dataclass(frozen=True)
class Stored:
    """A folder's tensors in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> str:
        return DTYPES[self.tensors[name].dtype]

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        tensor = self.tensors[name]
        rows = tensor[first:end] if tensor.dim() else tensor
        return rows.view(AS_BITS.get(rows.dtype, rows.dtype)).clone()


@dataclass(frozen=True)
class Case:
    """dense: what the format means. kept: the weight format that keeps the codes."""

    config: dict[str, object]
    tensors: dict[str, Tensor]
    dense: Tensor
    kept: str | None
    name: str = W

    @property
    def stored(self) -> Stored:
        return Stored(self.tensors)

    def matrix(self) -> QuantizedMatrix:
        return quantized_matrices(self.config, "config.json", self.stored)[self.name]

    def without(self, *names: str) -> Case:
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if name not in names})

    def having(self, **tensors: Tensor) -> Case:
        return replace(self, tensors=self.tensors | {f"{Q}.{name}": tensor for name, tensor in tensors.items()})

    def told(self, **keys: object) -> Case:
        section = next(key for key in ("quantization", "quantization_config") if key in self.config)
        return replace(self, config=self.config | {section: {**self.config[section], **keys}})  # type: ignore[dict-item]


def random(*shape: int, low: int = 0, high: int = 16, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).integers(low, high, shape)).int()


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (random(*shape, low=50, high=100, seed=1) / 1000).to(dtype)


def stream(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, columns * bits / 32]: the codes of each row one behind the other, from the lowest bit on."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * place for place, code in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(-(-len(row) * bits // 32) * 4, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def pairs(codes: Tensor) -> Tensor:
    """uint8 [..., columns / 2]: the first of two codes in the low nibble."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def group_of(columns: int, group: int) -> Tensor:
    return torch.tensor([column // group for column in range(columns)])


def by_group(q: Tensor, scale: Tensor, zero: Tensor | float, order: Tensor) -> Tensor:
    """scale * (q - zero) in fp64, which has room for it: scale and zero [N, groups]."""
    own = zero[:, order].double() if isinstance(zero, Tensor) else zero
    return ((q.double() - own) * scale.double()[:, order]).float()


def gptq(
    N: int, K: int, group: int, bits: int = 4, sym: bool = True, v2: bool = False, order: Tensor | None = None
) -> Case:
    G, middle = K if group == -1 else group, 1 << bits - 1
    plain = group_of(K, G)
    own, groups = plain if order is None else order, int(plain[-1]) + 1
    q, scale = random(N, K, high=1 << bits), scales(N, groups)
    zero = torch.full((N, groups), middle) if sym else random(N, groups, low=0 if v2 else 1, high=1 << bits, seed=2)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": order is not None}
    tensors = {
        f"{Q}.qweight": stream(q, bits).T.contiguous(),
        f"{Q}.qzeros": stream((zero - int(not v2)).T, bits),
        f"{Q}.scales": scale.T.contiguous(),
        f"{Q}.g_idx": own.int(),
    }
    finer = next((size for size in (128, 64, 32) if np.gcd(G, K) % size == 0), None)
    name = {(4, True): "int4-g{}-sym", (4, False): "int4-g{}", (8, True): "int8-g{}", (8, False): "int8-g{}-bias"}
    kept = None if finer is None or not own.equal(plain) else name[bits, sym].format(finer)
    return Case(
        {"quantization_config": config | ({"checkpoint_format": "gptq_v2"} if v2 else {})},
        tensors,
        by_group(q, scale, zero, own),
        kept,
    )


def awq(N: int, K: int, group: int) -> Case:
    G = K if group == -1 else group
    q, zero, scale = random(N, K), random(N, K // G, seed=2), scales(N, K // G)

    def packed(codes: Tensor) -> Tensor:
        words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
        for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= codes[:, column::8].long() << 4 * nibble
        return words.to(torch.int32)

    tensors = {f"{Q}.qweight": packed(q.T), f"{Q}.qzeros": packed(zero.T), f"{Q}.scales": scale.T.contiguous()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}
    dense = by_group(q, scale, zero, group_of(K, G))
    return Case({"quantization_config": config}, tensors, dense, f"int4-g{min(G & -G, 128)}")


def compressed(weights: dict[str, object], form: str = "pack-quantized") -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}}


def packed(N: int, K: int, group: int | None, bits: int = 4, sym: bool = True, order: Tensor | None = None) -> Case:
    G, offset = group or K, 1 << bits - 1
    own = group_of(K, G) if order is None else order
    groups = -(-K // G)
    q, scale = random(N, K, high=1 << bits), scales(N, groups, dtype=torch.bfloat16)
    zero = random(N, groups, high=1 << bits, seed=2)
    tensors = {
        f"{Q}.weight_packed": stream(q, bits),
        f"{Q}.weight_scale": scale,
        f"{Q}.weight_shape": torch.tensor([N, K]),
    }
    tensors |= {} if sym else {f"{Q}.weight_zero_point": stream(zero.T, bits).T.contiguous()}
    tensors |= {} if order is None else {f"{Q}.weight_g_idx": order.int()}
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "group_size": group, "strategy": strategy}
    finer = min(G & -G, 128)
    kept = f"int{bits}-g{finer}" + {(4, True): "-sym", (8, False): "-bias"}.get((bits, sym), "")
    dense = by_group(q, scale, offset if sym else zero, own)
    return Case(compressed(weights), tensors, dense, kept if order is None else None)


def int8(N: int, K: int, shape: tuple[int, ...], sym: bool = True) -> Case:
    q, scale = random(N, K, low=-128, high=128), scales(*shape, dtype=torch.bfloat16)
    zero = random(*shape, low=-20, high=20, seed=2)
    groups = shape[1] if len(shape) == 2 else 1
    wide = scale.reshape(-1, groups).expand(N, groups), zero.reshape(-1, groups).expand(N, groups)
    dense = by_group(q, wide[0], 0 if sym else wide[1], group_of(K, K // groups))
    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "group_size": K // groups if groups > 1 else None}
    tensors = {W: q.to(torch.int8), f"{Q}.weight_scale": scale}
    tensors |= {} if sym else {f"{Q}.weight_zero_point": zero.to(torch.int8)}
    kept = f"int8-g{min(K & -K, 128) if groups == 1 else K // groups}" + ("" if sym else "-bias")
    return Case(compressed(weights, "int-quantized"), tensors, dense, kept)


def fp8(N: int, K: int, shape: tuple[int, ...], config: dict[str, object], end: str = "weight_scale") -> Case:
    weight, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    dense = torch.empty(N, K)
    wide = scale.reshape((-1, 1) if len(shape) < 2 else shape)
    rows, columns = (1 if wide.shape[0] == N else 128), 128
    for n in range(N):
        for k in range(K):
            dense[n, k] = weight[n, k].float() * wide[n // rows % len(wide), min(k // columns, wide.shape[1] - 1)]
    return Case({"quantization_config": config}, {W: weight, f"{Q}.{end}": scale}, dense, None)


FP8 = {"quant_method": "fp8"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def two_powers(exponents: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (e - 127) for e in exponents.flatten().tolist()]).view(exponents.shape)


def mlx(N: int, K: int, group: int, bits: int, mode: str = "affine", experts: int = 0) -> Case:
    rows = N * max(experts, 1)
    q = random(rows, K, high=1 << bits)
    own, shape = group_of(K, group), (experts, N) if experts else (N,)
    if mode == "affine":
        scale = scales(rows, K // group)
        bias = (-scale.float() * random(rows, K // group, low=4, high=12)).half()
        parts = {"scales": scale, "biases": bias}
        dense = (q.double() * scale.double()[:, own] + bias.double()[:, own]).float()
        kept = f"int4-g{group}" if bits <= 4 else f"int8-g{group}-bias"
    else:
        stored = random(rows, K // group, low=100, high=140) if mode == "mxfp4" else random(rows, K // group, high=120)
        parts = {"scales": stored.to(torch.uint8)}
        scale = two_powers(stored) if mode == "mxfp4" else parts["scales"].view(torch.float8_e4m3fn).float()
        dense, kept = torch.tensor(E2M1)[q.long()] * scale[:, own], f"fp4-g{group}"
    tensors = {f"{Q}.{part}": tensor.view(*shape, -1) for part, tensor in parts.items()}
    tensors[W] = stream(q, bits).view(torch.uint32).view(*shape, -1)
    config = {"group_size": group, "bits": bits} | ({} if mode == "affine" else {"mode": mode})
    return Case({"quantization": config, "quantization_config": config}, tensors, dense.view(*shape, K), kept)


def bnb4(N: int, K: int, kind: str, nested: bool = False, block: int = 64) -> Case:
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(torch.randn(N, K), blocksize=block, quant_type=kind, compress_statistics=nested)
    tensors = {f"{W}.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    group = min(np.gcd(block, K) & -np.gcd(block, K), 128)
    kept = f"{'nf4' if kind == 'nf4' else 'bnb4'}-g{group}" if group >= 16 else None
    # As one row: of rows that end within a block, its CPU kernel returns wrong numbers (0.50.2).
    state.shape = torch.Size([1, N * K])
    dense = bnb.dequantize_4bit(codes, state).view(N, K)
    return Case({"quantization_config": config}, {W: codes, **tensors}, dense, kept)


def bnb8(N: int, K: int) -> Case:
    q, scale = random(N, K, low=-127, high=128), torch.rand(N) + 0.5
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {W: q.to(torch.int8), f"{Q}.SCB": scale, f"{Q}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Case({"quantization_config": config}, tensors, q * (scale / 127)[:, None], f"int8-g{min(K & -K, 128)}")


def gpt_oss(experts: int, N: int, K: int) -> Case:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    q, exponents = random(experts, N, K), random(experts, N, K // 32, low=1, high=140)
    tensors = {
        f"{name}_blocks": pairs(q).view(experts, N, K // 32, 16),
        f"{name}_scales": exponents.to(torch.uint8),
    }
    dense = torch.tensor(E2M1)[q.long()] * two_powers(exponents)[..., group_of(K, 32)]
    return Case({"quantization_config": {"quant_method": "mxfp4"}}, tensors, dense, "fp4-g32", name)


def nvfp4(N: int, K: int, by: str) -> Case:
    q, small = random(N, K), random(N, K // 16, high=120).to(torch.uint8).view(torch.float8_e4m3fn)
    number = torch.tensor([0.37 if by == "modelopt" else 371.0])
    scale = small.float() * number if by == "modelopt" else small.float() / number
    dense = torch.tensor(E2M1)[q.long()] * scale[:, group_of(K, 16)]
    tensors = {f"{Q}.weight_scale": small}
    if by == "modelopt":
        tensors |= {W: pairs(q), f"{Q}.weight_scale_2": number[0]}
        config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
        return Case(dict(config), tensors, dense, "fp4-g16")
    tensors |= {f"{Q}.weight_packed": pairs(q), f"{Q}.weight_global_scale": number}
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}
    return Case(compressed(weights, "nvfp4-pack-quantized"), tensors, dense, "fp4-g16")


def mxfp4_packed(N: int, K: int) -> Case:
    q, exponents = random(N, K), random(N, K // 32, low=100, high=140)
    tensors = {f"{Q}.weight_packed": pairs(q), f"{Q}.weight_scale": exponents.to(torch.uint8)}
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    dense = torch.tensor(E2M1)[q.long()] * two_powers(exponents)[:, group_of(K, 32)]
    return Case(compressed(weights, "mxfp4-pack-quantized"), tensors, dense, "fp4-g32")


def shuffled(K: int, group: int) -> Tensor:
    return group_of(K, group)[torch.from_numpy(np.random.default_rng(3).permutation(K))]


PER_ROW = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
PER_BLOCK = PER_ROW | {"strategy": "block", "block_structure": [128, 128]}
CASES: dict[str, Callable[[], Case]] = {
    "gptq sym": lambda: gptq(24, 256, 64),
    "gptq sym, v2": lambda: gptq(24, 256, 128, v2=True),
    "gptq asym": lambda: gptq(16, 128, 32, sym=False),
    "gptq asym, v2": lambda: gptq(16, 128, 32, sym=False, v2=True),
    "gptq 8 bits": lambda: gptq(12, 128, 64, bits=8),
    "gptq 8 bits, asym": lambda: gptq(12, 128, 64, bits=8, sym=False),
    "gptq, a row one group": lambda: gptq(16, 192, -1),
    "gptq, groups wider than any kept": lambda: gptq(8, 512, 256, sym=False),
    "gptq, the last group cut": lambda: gptq(8, 160, 128),
    "gptq, no kept group": lambda: gptq(8, 72, 24),
    "gptq in its order": lambda: gptq(16, 128, 32, order=shuffled(128, 32)),
    "gptq in its order, asym": lambda: gptq(16, 128, 32, sym=False, order=shuffled(128, 32)),
    "gptq, ordered and plain": lambda: gptq(16, 128, 32, order=group_of(128, 32)),
    "gptq without g_idx": lambda: gptq(16, 128, 32).without(f"{Q}.g_idx"),
    "gptq, its own bits": lambda: gptq(16, 128, 32, bits=8).told(
        bits=4, dynamic={"-:head": {}, r"+:.*q\.*": {"bits": 8}}
    ),
    "awq": lambda: awq(32, 256, 64),
    "awq, a row one group": lambda: awq(16, 128, -1),
    "compressed-tensors w4a16": lambda: packed(16, 256, 128),
    "compressed-tensors w4a16 asym": lambda: packed(20, 128, 32, sym=False),
    "compressed-tensors w4a16 of rows": lambda: packed(16, 192, None),
    "compressed-tensors w4a16 in its order": lambda: packed(16, 128, 32, order=shuffled(128, 32)),
    "compressed-tensors w8a16": lambda: packed(16, 128, 64, bits=8),
    "compressed-tensors w8a16 asym": lambda: packed(15, 128, None, bits=8, sym=False),
    "compressed-tensors w8a8": lambda: int8(16, 192, (16, 1)),
    "compressed-tensors w8a8 of one scale": lambda: int8(16, 192, (1,)),
    "compressed-tensors w8 in groups": lambda: int8(16, 192, (16, 3)),
    "compressed-tensors w8a8 asym": lambda: int8(16, 192, (16, 1), sym=False),
    "compressed-tensors fp8 of rows": lambda: fp8(10, 40, (10, 1), compressed(PER_ROW)["quantization_config"]),  # type: ignore[arg-type]
    "compressed-tensors fp8 of blocks": lambda: fp8(200, 150, (2, 2), compressed(PER_BLOCK)["quantization_config"]),  # type: ignore[arg-type]
    "compressed-tensors nvfp4": lambda: nvfp4(10, 48, "compressed-tensors"),
    "compressed-tensors mxfp4": lambda: mxfp4_packed(10, 96),
    **{f"mlx {bits} bits": lambda bits=bits: mlx(6, 128, 64, bits) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx experts": lambda: mlx(6, 64, 32, 4, experts=3),
    "mlx mxfp4": lambda: mlx(6, 96, 32, 4, mode="mxfp4"),
    "mlx nvfp4": lambda: mlx(6, 96, 16, 4, mode="nvfp4"),
    "mlx, its own bits": lambda: mlx(6, 128, 64, 8).told(
        bits=4, **{Q: {"bits": 8, "group_size": 64}, "lm_head": False}
    ),
    "bnb nf4": lambda: bnb4(16, 128, "nf4"),
    "bnb nf4 nested": lambda: bnb4(96, 192, "nf4", nested=True),
    "bnb fp4": lambda: bnb4(16, 128, "fp4", nested=True),
    "bnb nf4, blocks over the ends of rows": lambda: bnb4(10, 40, "nf4"),
    "bnb nf4, half a block a row": lambda: bnb4(10, 96, "nf4", block=128),
    "bnb int8": lambda: bnb8(10, 128),
    "fp8 of blocks": lambda: fp8(200, 300, (2, 3), BLOCKS, "weight_scale_inv"),
    "fp8 of a block": lambda: fp8(100, 60, (1, 1), BLOCKS, "weight_scale_inv"),
    "fp8 of rows": lambda: fp8(10, 40, (10, 1), FP8),
    "fp8 of one scale": lambda: fp8(10, 40, (), FP8),
    "modelopt fp8": lambda: fp8(10, 40, (), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "mxfp4": lambda: gpt_oss(3, 10, 96),
    "modelopt nvfp4": lambda: nvfp4(10, 48, "modelopt"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_matrix_means_what_its_format_says(name: str) -> None:
    case = CASES[name]()
    matrix = case.matrix()
    experts: list[int | None] = [None] if case.dense.dim() == 2 else [*range(len(case.dense))]
    assert matrix.shape == tuple(case.dense.shape)
    assert set(matrix.used) == set(case.tensors)
    assert (matrix.kept.name if matrix.kept else None) == case.kept
    for expert in experts:
        dense = case.dense if expert is None else case.dense[expert]
        assert torch.equal(matrix.dense(case.stored, expert), dense)
        if matrix.codes is None or matrix.kept is None:
            assert matrix.codes is None and matrix.kept is None
            continue
        codes = matrix.codes(case.stored, expert)
        assert isinstance(matrix.kept, Int4Layout | CodedLayout)
        table = None if isinstance(matrix.kept, Int4Layout) else matrix.kept.table
        assert codes.scale.shape == (dense.shape[0], dense.shape[1] // matrix.kept.group)
        assert (codes.bias is not None) == (isinstance(matrix.kept, Int4Layout) or matrix.kept.has_bias)
        assert codes.q.dtype == (torch.int8 if matrix.kept.name.startswith("int8") else torch.uint8)
        again, rounded = codes.dequantize(table), name.startswith(("bnb nf4", "bnb fp4"))
        bound = 0.004 * dense.abs().max() if rounded else 0  # by the rounding of the kept table
        assert float((again - dense).abs().max()) <= bound


def test_int8_of_bitsandbytes_is_its_own_dequantization() -> None:
    import bitsandbytes.functional as bnb

    case = bnb8(10, 128)
    theirs = bnb.int8_vectorwise_dequant(case.tensors[W], case.tensors[f"{Q}.SCB"])
    assert torch.allclose(case.matrix().dense(case.stored, None), theirs, rtol=3e-7, atol=0)


def test_mxfp4_and_fp8_are_as_transformers_reads_them() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    case = gpt_oss(3, 10, 96)
    blocks, exponents = case.tensors[f"{case.name}_blocks"], case.tensors[f"{case.name}_scales"]
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).transpose(1, 2)
    assert all(torch.equal(case.matrix().dense(case.stored, expert), theirs[expert]) for expert in range(3))
    case = fp8(256, 384, (2, 3), BLOCKS, "weight_scale_inv")
    found = Fp8Dequantize(None).convert({"weight": case.tensors[W], "weight_scale_inv": case.tensors[f"{W}_scale_inv"]})
    assert torch.equal(case.matrix().dense(case.stored, None), found["weight"])


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_and_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    N, group = int(rng.integers(1, 6)) * 8, int(rng.choice([16, 32, 64, 128]))
    K = group * int(rng.integers(1, 4)) * (2 if group == 16 else 1)
    sym, bits = bool(rng.integers(2)), int(rng.choice([4, 8]))
    order = shuffled(K, group) if rng.integers(2) else None
    for case in (gptq(N, K, group, bits, sym, order=order), packed(N, K, group, bits, sym, order), mlx(N, K, 32, bits)):
        assert torch.equal(case.matrix().dense(case.stored, None), case.dense)
    nf4 = bnb4(N, K, "nf4", nested=sym)
    assert torch.equal(nf4.matrix().dense(nf4.stored, None), nf4.dense)


def test_a_config_without_quantization_means_plain_tensors() -> None:
    assert quantized_matrices({"hidden_size": 64}, "config.json", Stored({W: torch.zeros(2, 2)})) == {}


def test_of_two_schemes_that_fit_the_stored_shape_decides() -> None:
    """8 bits in groups of 64 of half the columns are as many words and scales as 4 bits in groups of 128."""
    case = packed(16, 128, 64, bits=8)
    own = compressed({"num_bits": 4, "group_size": 128})["quantization_config"]["config_groups"]["group_0"]  # type: ignore[index]
    groups = {"first": own, **case.config["quantization_config"]["config_groups"]}  # type: ignore[index]
    case = case.told(config_groups=groups)
    assert torch.equal(case.matrix().dense(case.stored, None), case.dense)


def with_value(case: Case, name: str, value: float) -> Case:
    tensor = case.tensors[name].clone()
    tensor.view(-1)[-1] = value
    return replace(case, tensors=case.tensors | {name: tensor})


NAN = float("nan")
BROKEN: dict[str, tuple[Callable[[], Case], str]] = {
    "gptq: no scales": (lambda: gptq(16, 128, 32).without(f"{Q}.scales"), f"{Q}.scales"),
    "gptq: no zeros": (lambda: gptq(16, 128, 32).without(f"{Q}.qzeros"), f"{Q}.qzeros"),
    "gptq: no g_idx": (lambda: gptq(16, 128, 32, order=shuffled(128, 32)).without(f"{Q}.g_idx"), f"{Q}.g_idx"),
    "gptq: g_idx out of range": (
        lambda: with_value(gptq(16, 128, 32, order=shuffled(128, 32)), f"{Q}.g_idx", 4),
        "g_idx",
    ),
    "gptq: g_idx below 0": (lambda: with_value(gptq(16, 128, 32, order=shuffled(128, 32)), f"{Q}.g_idx", -1), "g_idx"),
    "gptq: desc_act false": (lambda: gptq(16, 128, 32, order=shuffled(128, 32)).told(desc_act=False), "g_idx"),
    "gptq: sym is not": (lambda: gptq(16, 128, 32, sym=False).told(sym=True), f"{Q}.qzeros"),
    "gptq: NaN": (lambda: with_value(gptq(16, 128, 32), f"{Q}.scales", NAN), f"{Q}.scales"),
    "gptq: other bits": (lambda: gptq(16, 128, 32, bits=8).told(bits=4), f"{Q}.qweight"),
    "gptq: other groups": (lambda: gptq(16, 128, 32).told(group_size=64), f"{Q}.qweight"),
    "gptq: group 0": (lambda: gptq(16, 128, 32).told(group_size=0), "group_size"),
    "gptq: group -2": (lambda: gptq(16, 128, 32).told(group_size=-2), "group_size"),
    "gptq: other zeros": (lambda: gptq(16, 128, 32).having(qzeros=torch.zeros(4, 3).int()), f"{Q}.qzeros"),
    "gptq: no such tensors": (lambda: replace(awq(16, 64, 32), config=mlx(8, 64, 32, 4).config), "config.json"),
    "awq: no zeros": (lambda: awq(16, 64, 32).without(f"{Q}.qzeros"), f"{Q}.qzeros"),
    "awq: other groups": (lambda: awq(16, 64, 32).told(group_size=64), f"{Q}.scales"),
    "awq: infinite": (lambda: with_value(awq(16, 64, 32), f"{Q}.scales", float("inf")), f"{Q}.scales"),
    "packed: no scales": (lambda: packed(16, 128, 32).without(f"{Q}.weight_scale"), f"{Q}.weight_scale"),
    "packed: no zeros": (lambda: packed(8, 128, 32, sym=False).without(f"{Q}.weight_zero_point"), "weight_zero_point"),
    "packed: zeros": (
        lambda: packed(8, 128, 32).having(weight_zero_point=torch.ones(1, 4, dtype=torch.int32)),
        f"{Q}.weight_zero_point",
    ),
    "packed: another shape": (lambda: packed(8, 128, 32).having(weight_shape=torch.tensor([8, 96])), "weight_shape"),
    "packed: g_idx": (lambda: packed(8, 64, 32).having(weight_g_idx=torch.full((64,), 2)), f"{Q}.weight_g_idx"),
    "packed: float": (lambda: replace(packed(8, 64, 32), config=nvfp4(8, 64, "").config), f"{Q}.weight_packed"),
    "packed: 8 bits": (lambda: replace(packed(8, 64, 32), config=packed(8, 64, 32, 8).config), "weight_packed"),
    "int8: scales": (lambda: int8(8, 64, (8, 1)).having(weight_scale=torch.ones(8, 3)), f"{Q}.weight_scale"),
    "int8: zeros": (lambda: int8(8, 64, (8, 1), False).without(f"{Q}.weight_zero_point"), "weight_zero_point"),
    "mlx: no biases": (lambda: mlx(8, 64, 32, 4).without(f"{Q}.biases"), f"{Q}.biases"),
    "mlx: other bits": (lambda: mlx(8, 64, 32, 8).told(bits=4), f"{Q}.scales"),
    "mlx: no whole groups": (lambda: mlx(8, 96, 32, 4).told(group_size=64), W),
    "mlx: a row one group": (lambda: mlx(8, 96, 32, 4).told(group_size=-1), "group_size"),
    "mlx: NaN": (lambda: with_value(mlx(8, 64, 32, 4), f"{Q}.biases", NAN), f"{Q}.biases"),
    "mlx: NaN of 8 bits": (lambda: with_value(mlx(8, 64, 32, 4, mode="mxfp4"), f"{Q}.scales", 255), f"{Q}.scales"),
    "bnb: no absmax": (lambda: bnb4(8, 64, "nf4").without(f"{W}.absmax"), f"{W}.absmax"),
    "bnb: no state": (lambda: bnb4(8, 64, "nf4").without(f"{W}.quant_state.bitsandbytes__nf4"), "quant_state"),
    "bnb: fewer codes": (lambda: bnb4(8, 64, "nf4").having(weight=torch.zeros(9, 1).byte()), W),
    "bnb: another table": (lambda: with_value(bnb4(8, 64, "nf4"), f"{W}.quant_map", 2.0), f"{W}.quant_map"),
    "bnb: another kind": (lambda: bnb4(8, 64, "nf4").told(bnb_4bit_quant_type="fp4"), "quant_state"),
    "bnb: 8 bits": (lambda: bnb4(8, 64, "nf4").told(load_in_4bit=False, load_in_8bit=True), W),
    "bnb: NaN": (lambda: with_value(bnb4(8, 64, "nf4"), f"{W}.absmax", NAN), f"{W}.absmax"),
    "bnb int8: no scales": (lambda: bnb8(8, 64).without(f"{Q}.SCB"), f"{Q}.SCB"),
    "fp8: no scales": (
        lambda: fp8(8, 64, (1, 1), BLOCKS, "weight_scale_inv").without(f"{W}_scale_inv"),
        f"{W}_scale_inv",
    ),
    "fp8: other blocks": (lambda: fp8(8, 64, (2, 2), BLOCKS, "weight_scale_inv"), f"{W}_scale_inv"),
    "fp8: a block of 0": (lambda: fp8(8, 64, (1, 1), BLOCKS | {"weight_block_size": [0, 128]}), "weight_block_size"),
    "fp8: NaN": (lambda: with_value(fp8(8, 64, (8, 1), FP8), f"{W}_scale", NAN), f"{W}_scale"),
    "mxfp4: no scales": (
        lambda: gpt_oss(2, 4, 64).without("model.layers.0.mlp.experts.gate_up_proj_scales"),
        "_scales",
    ),
    "mxfp4: NaN": (
        lambda: with_value(gpt_oss(2, 4, 64), "model.layers.0.mlp.experts.gate_up_proj_scales", 255),
        "_scales",
    ),
    "nvfp4: no number": (lambda: nvfp4(8, 64, "modelopt").without(f"{Q}.weight_scale_2"), f"{Q}.weight_scale_2"),
    "nvfp4: divides by 0": (lambda: nvfp4(8, 64, "").having(weight_global_scale=torch.zeros(1)), "weight_global_scale"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_by_the_name_of_the_tensor(name: str) -> None:
    make, named = BROKEN[name]
    with pytest.raises(CheckpointError) as caught:
        case = make()
        matrix = case.matrix()
        matrix.dense(case.stored, None if len(matrix.shape) == 2 else matrix.shape[0] - 1)
    assert named in str(caught.value) and caught.value.why and caught.value.fix


UNREAD: dict[str, Case] = {
    **{
        method: Case({"quantization_config": {"quant_method": method, "bits": 4}}, {}, torch.empty(0), None)
        for method in ("exl2", "aqlm", "hqq", "eetq", "torchao", "quanto", "vptq", "higgs")
    },
    "gptq 3 bits": gptq(16, 128, 32).told(bits=3),
    "gptq marlin": gptq(16, 128, 32).told(checkpoint_format="marlin"),
    "awq gemv": awq(16, 128, 32).told(version="gemv"),
    "awq 8 bits": awq(16, 128, 32).told(bits=8),
    "compressed-tensors marlin-24": packed(16, 128, 32).told(format="marlin-24"),
    "compressed-tensors 3 bits": replace(packed(16, 128, 32), config=compressed({"num_bits": 3})),
    "sparse": packed(16, 128, 32).told(sparsity_config={"format": "sparse-24-bitmask"}),
    "transformed": packed(16, 128, 32).told(transform_config={"config_groups": {"R1": {}}}),
    "mlx mxfp8": mlx(8, 64, 32, 8).told(mode="mxfp8"),
    "mlx 7 bits": mlx(8, 64, 32, 8).told(bits=7),
    "bnb storage": bnb8(8, 64).told(bnb_4bit_quant_storage="bfloat16"),
    "bnb columns": with_value(bnb8(8, 64), f"{Q}.weight_format", 1),
    "fp4 experts": fp8(8, 64, (1, 1), BLOCKS, "weight_scale_inv").told(expert_dtype="fp4"),
    "modelopt awq": nvfp4(8, 64, "modelopt").told(quant_algo="W4A16_AWQ"),
    "modelopt smoothed": nvfp4(8, 64, "modelopt").having(pre_quant_scale=torch.ones(64)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_says_so(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        UNREAD[name].matrix().dense(UNREAD[name].stored, None)
    assert "config.json" in str(caught.value) and caught.value.fix


def test_a_state_of_bitsandbytes_is_bounded() -> None:
    case = bnb4(8, 64, "nf4")
    name = f"{W}.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(case.tensors[name].tolist()))
    for change in (
        {"shape": [8]},
        {"shape": [8, 0]},
        {"blocksize": 48},
        {"quant_type": "fp4"},
        {"padding": "x" * 5000},
    ):
        stored = torch.tensor(list(json.dumps(state | change).encode()), dtype=torch.uint8)
        with pytest.raises(CheckpointError, match="quant_state"):
            replace(case, tensors=case.tensors | {name: stored}).matrix()
