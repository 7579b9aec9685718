"""Files of Ollama's own converter: what they mean is what llama.cpp's file of the same model means."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from localllm import hub
from localllm.engine.engine import Engine
from localllm.engine.step_types import Chunk
from localllm.errors import CheckpointError, TemplateError, UnsupportedModelError
from localllm.gguf.config import eos_ids
from localllm.gguf.conversion import model_files
from localllm.gguf.header import GgufEntry, GgufHeader, read_header
from localllm.gguf.ollama import as_llama_cpp
from localllm.settings import EngineConfig
from localllm.text.chat_template import ChatTemplate
from tests.checkpoints import write_checkpoint
from tests.gguf_support import all_of, experts_in_mxfp4, tokenizer_metadata, write_gguf

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("empty_cache")

Locate = Callable[[str], Path]
NOTHING: Mapping[str, Any] = MappingProxyType({})
NO_WORDS = {"tokenizer.ggml.pre": None}


@dataclass(frozen=True)
class Form:
    """What Ollama's converter wrote otherwise.

    keys: without the architecture: the name there, None where it is left out. values: by their whole keys, None where
    they are left out. parts: of the names of tensors.
    """

    family: str
    architecture: str
    keys: Mapping[str, str | None] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    words: str = "default"
    config: Mapping[str, object] = field(default_factory=dict)


STRETCHED: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
STRETCHED_KEYS = {"rope.scaling.type": None, "rope.scaling.factor": None}
FORMS = {
    "gptoss": Form(
        "gpt_oss",
        "gptoss",
        {"rope.scaling.type": None, "expert_feed_forward_length": None},
        NO_WORDS,
        {"attn_output": "attn_out", "attn_sinks.weight": "attn_sinks", "post_attention_norm": "ffn_norm"},
        words="gpt-4o",
    ),
    "gemma3-smallest": Form(
        "gemma3",
        "gemma3",
        {"rope.freq_base": "rope.global.freq_base", "rope.freq_base_swa": "rope.local.freq_base"},
        {"gemma3.final_logit_softcapping": 30.0},
    ),
    "gemma3-stretched-by-yarn": Form(
        "gemma3",
        "gemma3",
        {
            "rope.freq_base_swa": "rope.local.freq_base",
            "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
            "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
        },
        config={
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 64.0, "beta_slow": 2.0}
                | {"rope_theta": 1e6, "original_max_position_embeddings": 64},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma3-without-norm": Form(
        "gemma3",
        "gemma3",
        {
            "rope.freq_base": "rope.global.freq_base",
            "rope.freq_base_swa": "rope.local.freq_base",
            "attention.layer_norm_rms_epsilon": None,
        },
        {"gemma3.vision.block_count": 27},
        beside=("v.blk.0.attn_q.weight", "mm.mm_input_projection.weight"),
    ),
    "gemma3-stretched": Form(
        "gemma3",
        "gemma3",
        STRETCHED_KEYS | {"rope.freq_base": None, "rope.freq_base_swa": None},
        beside=("v.blk.0.attn_q.weight",),
        config=STRETCHED,
    ),
    "gemma3-stretched-text": Form(
        "gemma3", "gemma3", STRETCHED_KEYS | {"rope.freq_base_swa": "rope.local.freq_base"}, config=STRETCHED
    ),
    "gemma3n": Form(
        "gemma3n", "gemma3n", {"rope.freq_base_swa": "rope.freq_base_local", "attention.key_length": "head_dim"}
    ),
    "gemma4": Form(
        "gemma4-experts",
        "gemma4",
        parts={"ffn_down_exps.scale": "ffn_gate_inp.per_expert_scale"},
        beside=("a.blk.0.attn_q.weight", "v.clamp_data", "model.vision_tower.std_bias"),
    ),
    "mistral3": Form(
        "ministral3",
        "mistral3",
        {
            "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
            "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
            "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
            "attention.temperature_scale": "rope.scaling_beta",
        },
        {"tokenizer.ggml.pre": "default"},
        words="tekken",
    ),
    "olmo3": Form("olmo3", "olmo3"),
    "qwen25vl": Form("qwen2_5_vl", "qwen25vl", beside=("v.blk.0.attn_q.weight",)),
    "qwen35": Form(
        "qwen3_5",
        "qwen35",
        values={"qwen35.attention.head_count_kv": [0, 0, 0, 2]},
        parts={"ssm_dt.bias": "ssm_dt"},
        beside=("v.blk.0.attn_qkv.weight", "mtp.layers.0.attn_q.weight"),
    ),
}


def write_pair(tmp_path: Path, form: Form) -> tuple[Path, Path]:
    """Write llama.cpp's file of a small model and Ollama's, and return where they are."""
    folder, plain, own = tmp_path / "checkpoint", tmp_path / "plain.gguf", tmp_path / "own.gguf"
    write_checkpoint(folder, form.family, **form.config)
    write_gguf(folder, plain, experts_in_mxfp4() if form.family == "gpt_oss" else all_of("F32"))
    rewrite(plain, plain, values={"tokenizer.ggml.pre": form.words})
    rewrite(plain, own, form.architecture, form.keys, form.values, form.parts, form.beside)
    return plain, own


def rewrite(
    path: Path,
    to: Path,
    architecture: str | None = None,
    keys: Mapping[str, str | None] = NOTHING,
    values: Mapping[str, object] = NOTHING,
    parts: Mapping[str, str] = NOTHING,
    beside: tuple[str, ...] = (),
) -> None:
    """Write a file again in another form: see `Form`."""
    reader = gguf.GGUFReader(path)
    name = reader.fields["general.architecture"].contents()
    own = architecture or name
    writer = gguf.GGUFWriter(to.with_suffix(".new"), own)
    for key, each in reader.fields.items():
        part = key.removeprefix(f"{name}.")
        renamed = key if part == key else f"{own}.{keys.get(part, part)}"
        is_gone = part in keys and keys[part] is None
        if not (key.startswith("GGUF.") or key == "general.architecture" or is_gone or renamed in values):
            writer.add_key_value(renamed, each.contents(), each.types[0], each.types[-1])
    for key, value in values.items():
        if value is not None:
            kinds = {int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
            kind = gguf.GGUFValueType[kinds[type(value)]]
            writer.add_key_value(key, value, kind, gguf.GGUFValueType.UINT32)
    for tensor in reader.tensors:
        renamed = renamed_tensor(tensor.name, parts)
        writer.add_tensor(renamed, tensor.data.copy(), raw_dtype=tensor.tensor_type)
    for extra in beside:
        writer.add_tensor(extra, torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    to.with_suffix(".new").replace(to)


def renamed_tensor(name: str, parts: Mapping[str, str]) -> str:
    part = next((each for each in parts if f".{each}" in name), None)
    return name if part is None else name.replace(f".{part}", f".{parts[part]}")


@pytest.mark.parametrize("name", FORMS)
@torch.inference_mode()
def test_a_file_of_ollamas_is_the_model_that_llama_cpps_is(name: str, tmp_path: Path) -> None:
    both = write_pair(tmp_path, FORMS[name])
    plain, own = ({file: json.loads(text) for file, text in model_files(path).items()} for path in both)
    assert own["config.json"] == plain["config.json"]
    assert own["tokenizer.json"] == plain["tokenizer.json"]
    assert own["tokenizer_config.json"] == plain["tokenizer_config.json"]
    loaded = [Engine.load(hub.locate(str(path)), EngineConfig(device="cpu", dtype="fp32")) for path in both]
    ids = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    expected, found = (
        engine.runner.forward([Chunk(ids, engine.residency.new_kv(len(ids)), len(ids), all_logits=True)])
        for engine in loaded
    )
    assert torch.equal(expected, found)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "gemma3n", "qwen3_5"])
def test_a_file_of_llama_cpps_means_what_it_meant(family: str, tmp_path: Path) -> None:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if family == "gpt_oss" else {}
    write_checkpoint(tmp_path, family, max_position_embeddings=131072, **plain)
    metadata = tokenizer_metadata(tmp_path) | {"tokenizer.chat_template": None}
    write_gguf(tmp_path, tmp_path / "plain.gguf", all_of("F32"), metadata)
    header = read_header(tmp_path / "plain.gguf")
    (read,) = as_llama_cpp([header])
    assert read.tensors == header.tensors
    assert {**header.metadata, **read.metadata} == read.metadata
    assert read.metadata.get("tokenizer.chat_template") == header.metadata.get("tokenizer.chat_template")
    assert not any("scaling" in key for key in read.metadata)


def test_every_file_of_a_split_model_has_llama_cpps_names(tmp_path: Path) -> None:
    _, own = write_pair(tmp_path, FORMS["gptoss"])
    header = read_header(own)
    later = replace(header, metadata={"split.no": 1})
    _, read = as_llama_cpp([header, later])
    assert "blk.0.attn_output.weight" in read.tensors and "blk.0.attn_out.weight" not in read.tensors


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    _, own = write_pair(tmp_path, FORMS["gptoss"])
    rewrite(own, own, parts={"attn_norm.": "attn_output."})
    with pytest.raises(CheckpointError) as caught:
        model_files(own)
    assert "two tensors 'blk.0.attn_output.weight'" in str(caught.value.why)


def test_rows_of_gate_and_up_that_take_turns_are_refused(tmp_path: Path) -> None:
    _, own = write_pair(tmp_path, FORMS["gptoss"])
    rewrite(own, own, parts={"ffn_gate_exps": "ffn_gate_up_exps", "ffn_up_exps": "ffn_gate_up_exps.other"})
    with pytest.raises(UnsupportedModelError, match="a form that is not read") as caught:
        model_files(own)
    assert "rows of gate and up take turns" in str(caught.value.why)


def header(architecture: str, rows: int = 4, **tokenizer: object) -> GgufHeader:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    entry = GgufEntry("token_embd.weight", "F32", (rows, 2), 0, rows * 8)
    return GgufHeader(Path("x.gguf"), {"general.architecture": architecture} | metadata, {entry.name: entry}, {})


def read(architecture: str, key: str, **tokenizer: object) -> object:
    (found,) = as_llama_cpp([header(architecture, **tokenizer)])
    return found.metadata.get(f"tokenizer.ggml.{key}")


def test_words_of_llama_3_are_known_by_its_ending() -> None:
    tokens = ["x"] * 128009 + ["<|eot_id|>"]
    assert read("llama", "pre", tokens=tokens) == "llama-bpe"
    assert read("llama", "pre", tokens=tokens, pre="default") == "llama-bpe"
    assert read("llama", "pre", tokens=tokens, pre="smaug-bpe") == "smaug-bpe"
    assert read("llama", "pre", tokens=tokens[1:]) is None
    assert read("llama", "pre") is None
    assert read("mistral3", "pre", pre="") == "tekken" and read("gptoss", "pre", pre="gpt-2") == "gpt-4o"


def test_pieces_of_gemma_3_end_with_the_embedding() -> None:
    pieces, scores = ["a", "b", "c", "d", "<image_soft_token>"], array("f", range(5))
    lists = {"tokens": pieces, "scores": scores, "token_type": [1, 1, 1, 1, 4]}
    assert read("gemma3", "tokens", **lists) == pieces[:4]
    assert read("gemma3", "scores", **lists) == scores[:4]
    assert read("gemma3", "token_type", **lists) == [1, 1, 1, 1]
    assert read("llama", "tokens", **lists) == pieces
    assert read("gemma3", "add_space_prefix") is False
    assert read("gemma3", "add_space_prefix", add_space_prefix=True) is True


@pytest.mark.parametrize("heads", [[0, 2, 0, 4], [0, 0], [], ["a", ""]])
def test_heads_of_keys_are_one_number_or_what_the_file_says(heads: list[object]) -> None:
    key = "qwen35.attention.head_count_kv"
    (found,) = as_llama_cpp([replace(header("qwen35"), metadata={"general.architecture": "qwen35", key: heads})])
    assert found.metadata[key] == (heads if heads != ["a", ""] else "a")


def test_a_chat_of_gemma_3_has_its_turns() -> None:
    (found,) = as_llama_cpp([header("gemma3")])
    template = ChatTemplate(str(found.metadata["tokenizer.chat_template"]), special_tokens={"bos_token": "<bos>"})
    user, answer = {"role": "user", "content": " a "}, {"role": "assistant", "content": "b\n"}
    turns = "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    assert template.render([user, answer], add_generation_prompt=False) == f"<bos>{turns}"
    opened = f"{turns}<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
    assert template.render([user, answer, user]) == f"<bos>{opened}"
    system = {"role": "system", "content": "Be brief."}
    first = "<bos><start_of_turn>user\nBe brief.\n\na<end_of_turn>\n<start_of_turn>model\n"
    assert template.render([system, user]) == first
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert template.render([system, parts]) == first
    with pytest.raises(TemplateError) as caught:
        template.render([user, user])
    assert "must alternate" in str(caught.value.why)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Get the weather.",
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "default": 3},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "hours": {"type": "array", "items": {"type": "number"}},
                    "place": {"type": "object"},
                    "other": {"type": ["string", "null"]},
                    "exact": {"type": "boolean"},
                    "more": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Tell the time."}},
]
HI, HO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
RULE = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "thinking": "Hm.",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
}
SUN = {"role": "tool", "content": '{"t": 20}'}


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        ([HI], {}),
        ([HI], {"reasoning_effort": "high"}),
        ([HI], {"tools": TOOLS}),
        ([RULE, HI], {}),
        ([RULE | {"content": ""}, HI], {}),
        ([RULE, HI, HO, HI], {"tools": TOOLS}),
        ([HI, HO], {"add_generation_prompt": False}),
        ([RULE, HI, CALL, SUN], {"tools": TOOLS}),
        ([RULE, HI, CALL, SUN, HO, HI], {"tools": TOOLS}),
    ],
)
def test_a_chat_of_gpt_oss_is_that_of_its_makers(
    messages: list[dict[str, Any]], variables: dict[str, Any], shared_data: Locate
) -> None:
    makers = shared_data("chat_templates/jinja/openai-gpt-oss-120b.jinja").read_text()
    (found,) = as_llama_cpp([header("gptoss")])
    own, other = (
        ChatTemplate(source, now=lambda: datetime(2026, 1, 2))
        for source in (str(found.metadata["tokenizer.chat_template"]), makers)
    )
    assert own.render(messages, **variables) == other.render(messages, **variables)


def test_a_template_of_the_file_stays() -> None:
    plain = replace(header("gptoss"), metadata={**header("gptoss").metadata, "tokenizer.chat_template": "own"})
    assert as_llama_cpp([plain])[0].metadata["tokenizer.chat_template"] == "own"


def test_all_ids_that_ollama_lists_end_a_text() -> None:
    ids = {
        "tokens": ["a", "b", "c"],
        "token_type": [3, 3, 1],
        "eos_token_id": 0,
        "eos_token_ids": array("i", [0, 2, 9]),
    }
    assert eos_ids(header("gpt-oss", **ids).metadata) == [0, 2]
