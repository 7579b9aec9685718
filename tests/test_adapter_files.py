"""Adapters: what is read of PEFT's folders and of GGUF files is what PEFT adds to the same model."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm import hub
from localllm.errors import AdapterError
from localllm.gguf.architectures import holds_type
from localllm.layers.config import Mamba2Config, MambaConfig
from localllm.layers.low_rank import AdapterWeights
from localllm.models.adapters.dense import DenseDeltas
from localllm.models.adapters.reader import open_adapter, read_adapter
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.families import load_config
from tests.adapters import (
    fused_weights,
    layers_of,
    targets_of,
    with_adapter,
    write_gguf_lora,
    write_merged,
    write_peft_adapter,
)
from tests.checkpoints import OF_TRANSFORMERS, write_checkpoint
from tests.gguf_metadata import ARCHITECTURES
from tests.gguf_support import all_of, write_gguf

peft = pytest.importorskip("peft")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def assert_adds(base: Path, merged: Path, adapter: Path) -> AdapterWeights:
    """The adapter, of which it is asserted that with it every matrix of the base is the merged one."""
    config = load_config(base)
    weights = read_adapter(adapter, config)
    before, after = fused_weights(base, config), fused_weights(merged, config)
    found = with_adapter(before, weights)
    assert found.keys() == after.keys()
    for site, weight in after.items():
        difference = float((found[site] - weight).abs().max())
        assert difference < 1e-5 * max(1.0, float(weight.abs().max())), site
        assert (site in weights.sites) == (not torch.equal(before[site], weight)), site
    return weights


# The largest by far has encoders of images and sounds.
@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_an_adapter_of_every_matrix_adds_what_peft_merges(family, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    write_merged(merged, write_peft_adapter(adapter, write_checkpoint(base, family)), base)
    weights = assert_adds(base, merged, adapter)
    config = load_config(base)
    left_out = fused_weights(base, config).keys() - weights.sites.keys() - {"embed", "head"}
    if any(isinstance(mixer, MambaConfig | Mamba2Config) for mixer in config.recurrents):
        # PEFT leaves their out_proj alone.
        left_out = {site for site in left_out if not site.endswith(".out_proj")}
    assert not left_out


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank-1": ("llama-one-kv-head-odd-sizes", {"r": 1, "lora_alpha": 3}),
    "rank-256": ("llama-one-kv-head-odd-sizes", {"r": 256, "lora_alpha": 16, "size": 0.02}),
    "rank-stabilized": ("phi3", {"r": 7, "lora_alpha": 5, "use_rslora": True}),
    "patterns": (
        "qwen3",
        {
            "r": 5,
            "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"],
            "rank_pattern": {r"layers\.[12]\..*q_proj": 3, "^model.layers.0.self_attn.v_proj": 11, "lm_head": 2},
            "alpha_pattern": {"layers.1.mlp.down_proj": 1, r".*\.(?:q|v)_proj": 40},
        },
    ),
    "patterns-of-experts": (
        "qwen3_moe",
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
            "rank_pattern": {r".*\.gate_up_proj": 6, "mlp.gate.weight": 2},
            "alpha_pattern": {r".*\.down_proj": 32},
        },
    ),
    "second-matrix-of-experts": (
        "gpt_oss",
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "use_rslora": True},
    ),
    "some-layers": ("gemma2", {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [0, 3]}),
    "regex": ("gemma3", {"target_modules": r".*layers\.(2|5)\.(self_attn\.o|mlp\.up)_proj"}),
    "all-linear": ("glm", {"target_modules": "all-linear"}),
    "excluded": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["o_proj"]}),
    "embedding-and-head": ("olmo2", {"target_modules": ["embed_tokens", "lm_head"], "r": 9}),
    "orthogonal-head-alone": ("granitemoe", {"target_modules": ["lm_head"], "r": 3}),
    "residual-scale": ("granite", {"target_modules": ["o_proj", "down_proj", "v_proj"], "lora_alpha": -7}),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_ranks_scales_and_targets_are_those_of_peft(options, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    family, config = OPTIONS[options]
    write_merged(merged, write_peft_adapter(adapter, write_checkpoint(base, family), **config), base)
    sites = assert_adds(base, merged, adapter).sites
    if options == "some-layers":
        assert layers_of(tuple(sites)) == {0, 3}


@pytest.mark.parametrize("mixer", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_adapter_with_a_module_for_each_expert_adds_what_peft_merges(family, mixer, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    model = write_checkpoint(base, family, layers=2)
    kinds = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    mixer = mixer if family == "mixtral" else "mlp"
    tensors: dict[str, Tensor] = {}
    experts = model.model.layers[0].mlp.experts
    for layer in range(2):
        modules = {f"experts.{n}.{kind}": kind for n in range(experts.gate_up_proj.shape[0]) for kind in kinds}
        for module, kind in modules.items():
            rows, columns = experts.down_proj.shape[1:] if kind == kinds[2] else experts.down_proj.shape[:0:-1]
            name = f"base_model.model.model.layers.{layer}.{mixer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(3, columns) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 3) * 0.1
    adapter.mkdir()
    save_file(tensors, adapter / WEIGHTS)
    described = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": list(kinds)}
    (adapter / CONFIG).write_text(json.dumps(described))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_merged(merged, peft.PeftModel.from_pretrained(model, str(adapter)), base)
    assert "layers.1.mlp.experts.2.down_proj" in assert_adds(base, merged, adapter).sites


GGUF_FAMILIES = [
    "llama", "qwen3", "phi3", "gemma3", "olmo2", "granite", "glm", "cohere2", "ernie4_5", "qwen3_5", "qwen3_next",
    "qwen3_5_moe", "qwen3_moe", "mixtral", "gpt_oss", "gemma4-experts",
]  # fmt: skip


GGUF_SIZES = {"glm": {"head_dim": 16}}  # of which the format knows no other


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_an_adapter_of_peft_adds_to_a_gguf_model_what_peft_merges(family, tmp_path):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    model = write_checkpoint(base, family, **GGUF_SIZES.get(family, {}))
    write_merged(merged, write_peft_adapter(adapter, model), base)
    folders = []
    for checkpoint in (base, merged):
        path = tmp_path / f"{checkpoint.name}.gguf"
        write_gguf(checkpoint, path, all_of("F32"))
        folders.append(hub.locate(str(path)).directory)
    assert_adds(*folders, adapter)


@pytest.mark.parametrize("family", [*GGUF_FAMILIES[:11], "qwen3_5-odd"])
def test_a_gguf_lora_is_the_adapter_that_it_was_made_of(family, tmp_path):
    base, adapter, path = tmp_path / "base", tmp_path / "adapter", tmp_path / "lora.gguf"
    model = write_checkpoint(base, family, **GGUF_SIZES.get(family, {}))
    write_peft_adapter(adapter, model, target_modules=targets_of(model)["target_modules"], r=8, lora_alpha=12)
    write_gguf_lora(adapter, path, base)
    write_gguf(base, tmp_path / "base.gguf", all_of("F32"))
    for folder in (base, hub.locate(str(tmp_path / "base.gguf")).directory):
        config = load_config(folder)
        ours, theirs = read_adapter(path, config), read_adapter(adapter, config)
        assert ours.sites.keys() == theirs.sites.keys()
        if family == "qwen3_next":  # whose widest matrices are two in the file
            plain = fused_weights(folder, config)
            found, wanted = with_adapter(plain, ours), with_adapter(plain, theirs)
            assert all(torch.allclose(found[site], weight, atol=1e-5) for site, weight in wanted.items())
        else:
            assert ours.digest == theirs.digest


def test_a_gguf_lora_of_experts_is_the_adapter_that_it_was_made_of(tmp_path):
    base, adapter, path = tmp_path / "base", tmp_path / "adapter", tmp_path / "lora.gguf"
    write_checkpoint(base, "qwen3_moe", layers=1)
    tensors = {}
    for n in range(6):
        for kind, (rows, columns) in {"gate_proj": (40, 64), "up_proj": (40, 64), "down_proj": (64, 40)}.items():
            name = f"model.layers.0.mlp.experts.{n}.{kind}"
            tensors |= {f"base_model.model.{name}.lora_A.weight": torch.randn(4, columns)}
            tensors |= {f"base_model.model.{name}.lora_B.weight": torch.randn(rows, 4)}
    adapter.mkdir()
    save_file(tensors, adapter / WEIGHTS)
    (adapter / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4.0}))
    write_gguf_lora(adapter, path, base)
    config = load_config(base)
    assert read_adapter(path, config).digest == read_adapter(adapter, config).digest


@pytest.mark.parametrize(("kind", "error"), [("F16", 2**-10), ("BF16", 2**-7), ("Q8_0", 2**-5)])
def test_a_gguf_lora_in_fewer_bits_is_read(kind, error, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_peft_adapter(adapter, write_checkpoint(base, "llama"), target_modules=["q_proj", "down_proj"], r=32)
    write_gguf_lora(adapter, tmp_path / "lora.gguf", base, kind)
    config = load_config(base)
    ours, theirs = read_adapter(tmp_path / "lora.gguf", config), read_adapter(adapter, config)
    for site, (exact,) in theirs.sites.items():
        (part,) = ours.sites[site]
        for found, wanted in ((part.a, exact.a), (part.b, exact.b)):
            assert float((found.float() - wanted).abs().max()) <= error * float(wanted.abs().max())


def test_a_gguf_lora_without_alpha_is_not_scaled(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_peft_adapter(adapter, write_checkpoint(base, "qwen3"), target_modules=["v_proj"], r=4, lora_alpha=4)
    write_gguf_lora(adapter, tmp_path / "lora.gguf", base, adapter__lora__alpha=None)
    config = load_config(base)
    assert read_adapter(tmp_path / "lora.gguf", config).digest == read_adapter(adapter, config).digest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_in_16_bits_is_scaled_in_fp32(dtype, tmp_path):
    base = tmp_path / "base"
    write_checkpoint(base, "llama", layers=1)
    a, b = torch.randn(4, 64).to(dtype), torch.randn(64, 4).to(dtype)
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    adapter = plain_adapter(tmp_path, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, lora_alpha=7)
    ((part,),) = read_adapter(adapter, load_config(base)).sites.values()
    assert torch.equal(part.a, a.float()) and torch.equal(part.b, 1.75 * b.float())


def plain_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A folder of PEFT's with these tensors, of rank 4 by default."""
    path = folder / "adapter"
    path.mkdir(exist_ok=True)
    save_file(tensors, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, **config}))
    return path


# The embedding and the head


def test_of_tied_embeddings_an_adapter_changes_the_one_that_it_names(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = write_checkpoint(base, "llama-biases-tied")
    config = load_config(base)
    for module, site in (("embed_tokens", "embed"), ("lm_head", "head")):
        adapted = write_peft_adapter(adapter, model, target_modules=[module], lora_alpha=6)
        ((found, (part,)),) = read_adapter(adapter, config).sites.items()
        layers = dict(adapted.named_modules())
        delta = next(layer for name, layer in layers.items() if name.endswith(module)).get_delta_weight("default")
        added = part.b @ part.a
        assert found == site
        torch.testing.assert_close(added.T if site == "embed" else added, delta)


@pytest.mark.parametrize("is_head_stored", [True, False])
def test_an_adapter_that_ties_changes_the_head_as_it_does_the_embedding(is_head_stored, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = write_checkpoint(base, "llama-biases-tied")
    write_peft_adapter(adapter, model, target_modules=["embed_tokens"], ensure_weight_tying=True)
    if not is_head_stored:
        tensors = load_file(adapter / WEIGHTS)
        save_file({name: values for name, values in tensors.items() if "lm_head" not in name}, adapter / WEIGHTS)
    sites = read_adapter(adapter, load_config(base)).sites
    (embed,), (head,) = sites["embed"], sites["head"]
    torch.testing.assert_close((embed.b @ embed.a).T, head.b @ head.a)


# Names, digests and the level below


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, "llama", layers=2)
    return folder


Q = "base_model.model.model.layers.1.self_attn.q_proj"


def pair(module: str = Q, rank: int = 4, columns: int = 64, rows: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{module}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("base_model.model.model.", "model."),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.model.", "base_model.model.language_model.model."),
        (".weight", ".default.weight"),
        (".weight", ".my-adapter_2.weight"),
    ],
)
def test_names_of_other_versions_mean_the_same(theirs, ours, base, tmp_path):
    config = load_config(base)
    usual = read_adapter(plain_adapter(tmp_path, pair()), config)
    renamed = {name.replace(theirs, ours): values for name, values in pair().items()}
    other = read_adapter(plain_adapter(tmp_path, renamed), config)
    assert usual.digest == other.digest
    assert [*usual.sites] == ["layers.1.attention.qkv_proj"]


def test_equal_adapters_have_equal_digests_and_others_have_others(base, tmp_path):
    config = load_config(base)
    usual = read_adapter(plain_adapter(tmp_path, pair()), config, "first")
    again = read_adapter(plain_adapter(tmp_path, dict(reversed(pair().items()))), config, "second")
    assert (usual.name, again.name) == ("first", "second")
    assert usual.digest == again.digest
    rescaled = read_adapter(plain_adapter(tmp_path, pair(), lora_alpha=5), config)
    moved = read_adapter(plain_adapter(tmp_path, pair(Q.replace("1", "0"))), config)
    assert len({usual.digest, rescaled.digest, moved.digest}) == 3


def test_what_is_stored_has_the_names_and_the_order_of_a_checkpoint(base, tmp_path):
    stored = open_adapter(
        plain_adapter(tmp_path, pair(), lora_alpha=6, base_model_name_or_path="x/y"), load_config(base)
    )
    (delta,) = stored.deltas.values()
    assert (delta.name, delta.scale, stored.base) == ("model.layers.1.self_attn.q_proj", 1.5, "x/y")
    assert torch.equal(delta.a, pair()[f"base_model.model.{delta.stored}".replace("lora_B", "lora_A")])
    assert torch.equal(delta.b, pair()[f"base_model.model.{delta.stored}"])


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "glm", "granite", "gemma3", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5", "starcoder2"]
)
@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_whole_delta_is_what_the_merged_checkpoint_has_more(family, is_gguf, tmp_path):
    base, adapter, merged, path = (tmp_path / name for name in ("base", "adapter", "merged", "lora.gguf"))
    model = write_checkpoint(base, family, layers=4, **GGUF_SIZES.get(family, {}))
    names = (
        targets_of(model) if not is_gguf else {"target_modules": r".*layers.*\.(o_proj|out_proj|q_proj|in_proj_qkv)"}
    )
    write_merged(merged, write_peft_adapter(adapter, model, **names), base)
    if is_gguf:
        write_gguf_lora(adapter, path, base)
    config = load_config(base)
    deltas, changed = DenseDeltas(open_adapter(path if is_gguf else adapter, config), config), 0
    with Checkpoint.open(base, config.stored) as before, Checkpoint.open(merged, config.stored) as after:
        for name in before.names():
            if len(shape := before.shape(name)) != 2:
                continue
            more = after.read(name, shape, torch.float32) - before.read(name, shape, torch.float32)
            delta = deltas.of(name.removesuffix(".weight"))
            if delta is not None and delta.shape != shape:  # experts, with columns first
                delta = delta.T
            assert float((more - (0 if delta is None else delta)).abs().max()) < 1e-5, name
            changed += delta is not None
    assert changed >= 4


# What is refused


def refusal(adapter: Path, base: Path) -> str:
    """What an error says: one that is an adapter's, with something that helps."""
    with pytest.raises(AdapterError) as caught:
        read_adapter(adapter, load_config(base))
    error = caught.value
    assert error.code == "adapter" and error.fix and "MODEL" not in error.fix
    return f"{error.what}; {error.why}"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"peft_type": None}, "without a type"),
        ({"peft_type": 3}, "peft_type"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "bias"),
        ({"bias": "lora_only"}, "lora_only"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_something_new": True}, "'use_something_new'"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"monteclora_config": {"x": 1}}, "MonteCLoRA"),
        ({"alora_invocation_tokens": [1]}, "Activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"trainable_token_indices": [3]}, "trained tokens"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "PiSSA"),
        ({"init_lora_weights": "olora"}, "OLoRA"),
        ({"init_lora_weights": "corda"}, "CorDA"),
        ({"init_lora_weights": "loftq"}, "LoftQ"),
        ({"init_lora_weights": "lora_ga"}, "LoRA-GA"),
        ({"r": 8}, "rank 4, by r and rank_pattern 8"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 4, by r and rank_pattern 2"),
        ({"r": -4}, "r is not usable; it is -4"),
        ({"r": 2**60}, str(2**60)),
        ({"r": True}, "it is True"),
        ({"r": "4"}, "'4'"),
        ({"lora_alpha": 1e300}, "1e+300"),
        ({"lora_alpha": [4]}, "a list"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj"),
        ({"rank_pattern": [4]}, "an object"),
        ({"rank_pattern": {"(a+)+$": 4}}, "regular expression"),
        ({"rank_pattern": {"a{3}": 4}}, "regular expression"),
        ({"rank_pattern": {"(?=q)": 4}}, "regular expression"),
        ({"rank_pattern": {"(q": 4}}, "regular expression"),
        ({"rank_pattern": {f"a{n}$": 4 for n in range(300)}}, "300 regular expressions"),
        ({"target_modules": ["q_proj", "down_proj"]}, "'down_proj' is missing"),
        ({"target_modules": ["nope", "foo_proj"]}, "'nope'"),
        ({"target_modules": [1, 2]}, "target_modules"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_to_transform": 0}, "layers_to_transform"),
        ({"init_lora_weights": ["pissa"]}, "PiSSA"),
    ],
)
def test_a_config_of_another_computation_or_of_absurd_values_is_refused(config, said, base, tmp_path):
    assert said in refusal(plain_adapter(tmp_path, pair(), **config), base)


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"loftq_config": {}, "fan_in_fan_out": True, "lora_dropout": 0.5},
        {"target_modules": ["q_proj", "c_attn", "qkv_proj"]},
        {"target_modules": "all-linear", "peft_version": "99", "unknown": {"a": [1]}},
        {"base_model_name_or_path": "../../../etc/passwd", "revision": "/dev/zero"},
    ],
)
def test_what_changes_nothing_of_what_is_computed_is_read(config, base, tmp_path):
    usual = read_adapter(plain_adapter(tmp_path, pair()), load_config(base))
    assert read_adapter(plain_adapter(tmp_path, pair(), **config), load_config(base)).digest == usual.digest


ONE = torch.ones(4, 64)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "none of them lora_A or lora_B"),
        ({f"{Q}.lora_A.weight": ONE}, "not the lora_B"),
        ({f"{Q}.lora_B.weight": ONE.T.contiguous()}, "not the lora_A"),
        (pair() | {f"{Q}.lora_A.weight": torch.ones(3, 64)}, "[3, 64]"),
        (pair() | {f"{Q}.lora_A.weight": torch.ones(4)}, "do not fit together"),
        (pair() | {f"{Q}.lora_A.weight": torch.ones(4, 0)}, "do not fit together"),
        (pair(rank=3), "rank 3, by r and rank_pattern 4"),
        (pair(columns=80), "80 features in and 64 out, the model's has 64 in and 64 out; it was made for 'x/other'"),
        (pair(rows=96), "64 features in and 96 out"),
        (pair(Q.replace("layers.1", "layers.2")), "changes 'model.layers.2.self_attn.q_proj'"),
        (pair(Q.replace("q_proj", "query")), "self_attn.query"),
        (pair("base_model.model.model.vision_tower.layers.0.q_proj"), "vision_tower"),
        (pair() | {f"{Q}.lora_A.weight": torch.full((4, 64), float("nan"))}, "256 of 256"),
        (pair() | {f"{Q}.lora_B.weight": torch.full((64, 4), float("inf"))}, "lora_B"),
        ({name: values.double() for name, values in pair().items()}, "F64"),
        ({name: values.int() for name, values in pair().items()}, "I32"),
        (pair() | {f"{Q}.lora_magnitude_vector": torch.ones(64)}, "DoRA"),
        (pair() | {f"{Q}.lora_B.bias": torch.ones(64)}, "a trained bias"),
        (pair() | {f"{Q}.lora_diag": torch.ones(4)}, "KaSA"),
        (pair() | {"base_model.model.lm_head.weight": torch.ones(272, 64)}, "modules_to_save"),
        (pair() | {"base_model.model.model.norm.weight": torch.ones(64)}, "modules_to_save"),
        (pair() | {"base_model.model.model.embed_tokens.token_adapter.x": torch.ones(4)}, "trained tokens"),
        (pair() | {"base_model.model.lm_head.base_layer.weight": torch.ones(280, 64)}, "[280, 64]"),
        (pair() | {f"{Q}.lora_A.other.weight": torch.ones(4, 64)}, "several adapters"),
        (pair() | pair("layers.1.self_attn.q_proj"), "twice"),
        ({f"{Q}.lora_A.weight": ONE, f"{Q}.lora_embedding_B": ONE.T.contiguous()}, "is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors, said, base, tmp_path):
    assert said in refusal(plain_adapter(tmp_path, tensors, base_model_name_or_path="x/other"), base)


def test_numbers_that_are_infinite_once_scaled_are_refused(base, tmp_path):
    tensors = {name: values * 1e36 for name, values in pair().items()}
    assert "too large" in refusal(plain_adapter(tmp_path, tensors, lora_alpha=4000), base)


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        ({"rank": 25}, "fits no matrix of the experts"),
        ({"rank": 24, "rows": 48}, "[48, 24]"),
        ({"rank": 30}, "rank 5, by r and rank_pattern 4"),
    ],
)
def test_experts_of_another_model_are_refused(fit, said, tmp_path):
    write_checkpoint(tmp_path / "base", "qwen3_moe", layers=1)
    tensors = pair("base_model.model.model.layers.0.mlp.experts", **{"columns": 40, "rows": 64} | fit)
    assert said in refusal(plain_adapter(tmp_path, tensors), tmp_path / "base")


@pytest.mark.parametrize(
    ("present", "said"),
    [
        ((), "adapter_config.json is not there"),
        (("adapter_config.json",), "adapter_model.safetensors is not there"),
        (("adapter_config.json", "adapter_model.bin"), "pickles are never opened"),
        (("config.json", "model.safetensors"), "it is a model"),
        (("lora.gguf",), "'lora.gguf' is"),
    ],
)
def test_a_folder_that_is_no_adapter_says_what_is_missing(present, said, base, tmp_path):
    for name in present:
        (tmp_path / name).write_text("{}")
    assert said in refusal(tmp_path, base)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"r": NaN}', b'{"r": 1, "r": 2}', b"\xff\xfe", b"[" * 5000])
def test_a_config_that_is_no_json_is_refused(content, base, tmp_path):
    adapter = plain_adapter(tmp_path, pair())
    (adapter / CONFIG).write_bytes(content)
    assert CONFIG in refusal(adapter, base)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"{}" + b"x",
        struct.pack("<Q", 63) + b'{"a.lora_A.weight":{"dtype":"F32","shape":[9],"data_offsets":[0,1]}}'[:63],
    ],
)
def test_a_hostile_header_is_refused(content, base, tmp_path):
    adapter = plain_adapter(tmp_path, pair())
    (adapter / WEIGHTS).write_bytes(content)
    assert WEIGHTS in refusal(adapter, base)


def test_a_truncated_file_is_refused(base, tmp_path):
    adapter = plain_adapter(tmp_path, pair())
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-100])
    assert "cut short" in refusal(adapter, base)


def test_a_link_to_what_is_no_file_is_refused_and_one_to_a_file_is_read(base, tmp_path):
    adapter = plain_adapter(tmp_path, pair())
    (adapter / WEIGHTS).rename(tmp_path / "blob")
    (adapter / WEIGHTS).symlink_to(tmp_path / "blob")  # as in the hub's cache
    assert read_adapter(adapter, load_config(base)).rank == 4
    (adapter / WEIGHTS).unlink()
    (adapter / WEIGHTS).symlink_to("/dev/zero")
    assert "not a plain file" in refusal(adapter, base)


def test_a_path_that_is_neither_is_refused(base, tmp_path):
    assert "it is not there" in refusal(tmp_path / "absent", base)
    (tmp_path / "file.bin").touch()
    assert "no folder, and no .gguf file" in refusal(tmp_path / "file.bin", base)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"general__architecture": "qwen2"}, "'qwen2', the model is of the type 'llama'"),
        ({"adapter__type": "ia3"}, "adapter.type is 'ia3'"),
        ({"adapter__type": None}, "adapter.type is absent"),
        ({"adapter__lora__alpha": float("nan")}, "nan"),
        ({"adapter__lora__alpha": "4"}, "'4'"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused(keys, said, base, tmp_path):
    path = tmp_path / "lora.gguf"
    checkpoint = tmp_path / "base"
    shutil.copytree(base, checkpoint)
    if (architecture := keys.get("general__architecture")) is not None:
        described = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(described | {"model_type": architecture}))
        keys = {}
    write_gguf_lora(plain_adapter(tmp_path, pair()), path, checkpoint, **keys)
    assert said in refusal(path, base)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_gguf_file_is_taken_by_every_type_of_model_that_it_may_be_for(model_type):
    assert holds_type(ARCHITECTURES[model_type], model_type)
    assert not holds_type("bert", model_type) and not holds_type("None", model_type)


@pytest.mark.parametrize("architecture", ["granite", "granitemoe", "granitehybrid"])
def test_granite_4_without_mamba_is_called_as_granite_3(architecture):
    assert holds_type(architecture, "granitemoehybrid")


def test_a_gguf_model_is_no_adapter(base, tmp_path):
    write_gguf(base, tmp_path / "model.gguf", all_of("F32"))
    assert "general.type" in refusal(tmp_path / "model.gguf", base)


@pytest.mark.parametrize(
    ("module", "fit", "said"),
    [
        ("model.layers.1.self_attn.q_proj", {"columns": 80}, "80 features in"),
        ("model.layers.7.self_attn.q_proj", {}, "the model is a llama of 2 layers"),
    ],
)
def test_a_gguf_lora_of_another_base_is_refused(module, fit, said, base, tmp_path):
    checkpoint = tmp_path / "base"
    shutil.copytree(base, checkpoint)
    described = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 8}))
    write_gguf_lora(plain_adapter(tmp_path, pair(module, **fit)), tmp_path / "lora.gguf", checkpoint)
    assert said in refusal(tmp_path / "lora.gguf", base)


def test_a_cut_gguf_file_is_refused(base, tmp_path):
    path = tmp_path / "lora.gguf"
    write_gguf_lora(plain_adapter(tmp_path, pair()), path, base)
    whole = path.read_bytes()
    for size in (0, 3, 40, len(whole) - 64):
        path.write_bytes(whole[:size])
        assert re.search("cut short|not a GGUF file", refusal(path, base))


def mutated(data: bytes, generator: random.Random) -> bytes:
    """The bytes with a few of the first 3,000 changed, taken out, or replaced by a piece of JSON."""
    found = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 5])):
        at = generator.randrange(min(len(found), 3000))
        found[at : at + 1] = generator.choice(
            [bytes([generator.randrange(256)]), b"", b"9", b"-", b"null", b"[", b"e9"]
        )
    return bytes(found)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "lora.gguf"])
def test_whatever_bytes_are_changed_it_is_read_or_refused_in_words(name, base, tmp_path):
    adapter, generator, config = plain_adapter(tmp_path, pair()), random.Random(0), load_config(base)
    write_gguf_lora(adapter, adapter / "lora.gguf", base)
    path = adapter / name if name.endswith(".gguf") else adapter
    whole, refused = (adapter / name).read_bytes(), 0
    for _ in range(300):
        (adapter / name).write_bytes(mutated(whole, generator))
        try:
            read_adapter(path, config)
        except AdapterError:
            refused += 1
    assert refused > 100
