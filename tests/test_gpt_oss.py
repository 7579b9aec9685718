"""gpt-oss as it is published: experts in MXFP4, whose codes are kept, beside matrices in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.models.cpu_program import CpuProgram
from localllm.settings import EngineConfig
from tests.checkpoints import write_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
WIDE = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_local_experts": 4}


def test_codes_of_experts_are_kept_and_computed_as_transformers_computes_their_values(tmp_path: Path) -> None:
    peer = write_checkpoint(tmp_path, "gpt_oss", **WIDE)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    parameters, stored = dict(peer.named_parameters()), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, rows, columns), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(121, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).view(experts, rows, columns // 32, 16)
        tensors[f"{name}_scales"] = exponents
        values = E2M1[codes.long()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, -1)
        stored[name] = values
        parameters[name].data.copy_(values.transpose(1, 2))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))

    ids = torch.randint(0, 256, (150,), generator=generator).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    engine = Engine.load(tmp_path, EngineConfig(device="cpu"))
    assert CpuProgram.supports(engine.model)
    first, second = (stored[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    for expert, mlp in next(_experts(engine)):
        gates_first = torch.cat((first[expert, ::2], first[expert, 1::2]))
        assert torch.equal(mlp.gate_up_proj.rows(torch.arange(192)).float(), gates_first)
        assert torch.equal(mlp.down_proj.rows(torch.arange(128)).float(), second[expert])
    whole, single = (_logits(engine, ids, sizes) for sizes in ([150], [70, *[1] * 80]))
    assert torch.equal(whole, single)
    close = functional.cosine_similarity(whole - whole.mean(-1, True), expected - expected.mean(-1, True), dim=-1)
    assert close.mean() > 0.95  # all other matrices are in INT4, and a router may choose another expert for that


def _experts(engine: Engine):  # type: ignore[no-untyped-def]
    return engine.model.blocks[1].body.experts.held([0, 3])  # type: ignore[union-attr]


@torch.inference_mode()
def _logits(engine: Engine, ids: list[int], sizes: list[int]) -> Tensor:
    kv = engine.residency.new_kv(len(ids))
    return torch.cat([engine.runner.forward([Chunk(ids, kv, size, all_logits=True)]) for size in sizes])


def test_another_slope_of_the_gate_is_refused(tmp_path: Path) -> None:
    from localllm.errors import UnsupportedModelError
    from localllm.models.families import load_config

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "swiglu_alpha": 2.0}))
    with pytest.raises(UnsupportedModelError, match="swiglu_alpha 2"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 128, "intermediate_size": 96}, {"hidden_size": 64, "intermediate_size": 64}]
)
@pytest.mark.parametrize("form", ["all experts", "each expert"])
def test_gates_that_are_stored_apart_are_in_order(tmp_path: Path, form: str, sizes: dict[str, int]) -> None:
    peer, ids = write_checkpoint(tmp_path, "gpt_oss", **sizes), list(range(40))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        block, _, last = name.rpartition(".")
        if not block.endswith(".experts"):
            tensors[name] = tensor
            continue
        matrix, kind = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
        parts = {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]} if "gate" in matrix else {matrix: tensor}
        for part, values in parts.items():
            rows = values if kind == "bias" else values.transpose(1, 2)
            if form == "all experts":
                tensors[f"{block}.{part}.{kind}"] = rows.contiguous()
            else:
                tensors |= {f"{block}.{i}.{part}.{kind}": expert.contiguous() for i, expert in enumerate(rows)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        expected = peer(torch.tensor([ids]), use_cache=False).logits[0]
    engine = Engine.load(tmp_path, EngineConfig(device="cpu", dtype="fp32"))
    torch.testing.assert_close(_logits(engine, ids, [40]), expected, atol=1e-4, rtol=1e-4)
