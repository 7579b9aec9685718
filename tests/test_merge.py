"""A model and its adapters as one checkpoint: the numbers are PEFT's, and nothing is there before all of it is."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from localllm.engine.engine import Engine
from localllm.engine.request import AdapterRef
from localllm.models import merged_folder
from localllm.models.merge import merge
from localllm.settings import EngineConfig
from tests import cli_support, test_quantized_model
from tests import test_quantized_formats as formats
from tests.adapters import write_gguf_lora, write_merged, write_peft_adapter
from tests.checkpoints import OF_TRANSFORMERS, write_checkpoint
from tests.cli_support import run_cli
from tests.gguf_support import all_of, write_gguf
from tests.patience import PATIENCE_S
from tests.test_adapters import Case
from tests.test_parity import TOLERANCE, peer_logits, prompt
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("own_folders")

FP32 = EngineConfig(device="cpu", dtype="fp32")
INDEX = "model.safetensors.index.json"
ORACLES = ("llama", "phi3", "gemma2", "qwen3_moe", "qwen3_vl_moe", "gpt_oss", "gpt_oss-square", "granite")


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def logits_of(folder: Path, *adapters: AdapterRef) -> Tensor:
    engine = Engine.load(folder, FP32)
    found = Case(engine, [*adapters], []).logits(prompt(33), *adapters)
    engine.close()
    return found


def write_rounded(folder: Path, family: str, **options: Any) -> Any:
    """A checkpoint whose numbers are bf16's, as most are; returns transformers' model, in fp32."""
    peer = write_checkpoint(folder, family, **options)
    rounded = {name: tensor.bfloat16() for name, tensor in weights_of(folder).items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    for values in peer.state_dict().values():
        values.copy_(values.bfloat16())
    return peer


@pytest.mark.parametrize("family", thinned(OF_TRANSFORMERS, ORACLES.__contains__))
def test_numbers_are_those_that_peft_merges_in_fp32(tmp_path: Path, family: str) -> None:
    """Almost all bit by bit, the others within a step of bf16: a factor that is no power of two may be multiplied by
    earlier, and a product summed in another order. Where a sum is nearly nothing, that is a step of fp32 of its parts.
    """
    peer = write_rounded(tmp_path / "base", family)
    adapted = write_peft_adapter(tmp_path / "adapter", peer)
    write_merged(tmp_path / "peft", adapted, tmp_path / "base")
    size_bytes = merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    found, base = weights_of(tmp_path / "merged"), weights_of(tmp_path / "base")
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(tmp_path / "peft").items()}
    assert found.keys() == base.keys() == expected.keys()
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert {name for name in base if not torch.equal(base[name], expected[name])} == changed != set()
    for name in changed:
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=2**-7, atol=1e-7)
    differing = sum(int((found[name] != expected[name]).sum()) for name in changed)
    assert differing <= 1e-3 * sum(base[name].numel() for name in changed)
    assert size_bytes == sum(path.stat().st_size for path in (tmp_path / "merged").iterdir())


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "qwen3_moe", "llama-biases-tied", "gpt_oss", "qwen3_vl"])
def test_the_folder_computes_what_the_base_computes_with_its_adapter(tmp_path: Path, family: str) -> None:
    """But for the rounding of the sums to bf16, which a deep random model makes a hundredth of its logits."""
    peer = write_rounded(tmp_path / "base", family)
    rounded = write_peft_adapter(tmp_path / "adapter", peer, size=0.05).merge_and_unload()
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    base, found = logits_of(tmp_path / "base"), logits_of(tmp_path / "merged")
    adapted = logits_of(tmp_path / "base", AdapterRef(str(tmp_path / "adapter")))
    assert (found - adapted).norm() < 0.03 * adapted.norm() < 0.15 * (adapted - base).norm()
    for values in rounded.state_dict().values():
        values.copy_(values.bfloat16())
    torch.testing.assert_close(found, peer_logits(rounded, prompt(33)), rtol=0, atol=10 * TOLERANCE)


def test_transformers_opens_the_folder(tmp_path: Path) -> None:
    peer = write_rounded(tmp_path / "base", "llama")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    write_peft_adapter(tmp_path / "adapter", peer)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", attn_implementation="eager")
    assert opened.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "{{ messages }}"
    expected = peer_logits(opened.float(), prompt(33))
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=0, atol=TOLERANCE)
    names = {path.name for path in (tmp_path / "base").iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names | {
        INDEX,
        "model-00001-of-00001.safetensors",
    }


@pytest.mark.parametrize("family", ["llama-biases-tied", "gemma2", "granite"])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_a_head_that_was_the_embedding_is_written_where_the_two_now_differ(
    tmp_path: Path, family: str, targets: list[str]
) -> None:
    peer = write_rounded(tmp_path / "base", family)
    adapted = write_peft_adapter(tmp_path / "adapter", peer, target_modules=targets)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    found, base = weights_of(tmp_path / "merged"), weights_of(tmp_path / "base")
    unchanged = "lm_head.weight" if targets == ["embed_tokens"] else "model.embed_tokens.weight"
    assert torch.equal(found[unchanged], base["model.embed_tokens.weight"])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    assert opened.config.tie_word_embeddings is False
    expected, plain = peer_logits(adapted, prompt(33)), peer_logits(peer, prompt(33))
    for logits in (peer_logits(opened, prompt(33)), logits_of(tmp_path / "merged")):
        assert (logits - expected).norm() < 0.03 * (expected - plain).norm()


def test_a_head_that_changes_as_the_embedding_does_stays_it(tmp_path: Path) -> None:
    peer = write_rounded(tmp_path / "base", "llama-biases-tied")
    write_peft_adapter(tmp_path / "adapter", peer, target_modules=["embed_tokens"], ensure_weight_tying=True)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    assert weights_of(tmp_path / "merged").keys() == weights_of(tmp_path / "base").keys()
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    adapted = logits_of(tmp_path / "base", AdapterRef(str(tmp_path / "adapter")))
    assert (logits_of(tmp_path / "merged") - adapted).norm() < 0.01 * adapted.norm()


def test_several_adapters_of_either_form_add_up_by_their_scales(tmp_path: Path) -> None:
    peer = write_rounded(tmp_path / "base", "llama")
    for number in range(2):
        write_peft_adapter(tmp_path / str(number), peer, seed=number, size=0.05)
    write_gguf_lora(tmp_path / "1", tmp_path / "1.gguf", tmp_path / "base")
    merge(tmp_path / "base", [(tmp_path / "0", 0.5), (tmp_path / "1.gguf", -1.0)], tmp_path / "merged")
    refs = AdapterRef(str(tmp_path / "0"), 0.5), AdapterRef(str(tmp_path / "1.gguf"), -1.0)
    adapted, base = logits_of(tmp_path / "base", *refs), logits_of(tmp_path / "base")
    assert (logits_of(tmp_path / "merged") - adapted).norm() < 0.03 * (adapted - base).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_base_of_other_numbers_becomes_bf16(tmp_path: Path, dtype: torch.dtype) -> None:
    peer = write_checkpoint(tmp_path / "base", "llama")
    path = tmp_path / "base" / "model.safetensors"
    base = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(base, path, metadata={"format": "pt"})
    write_peft_adapter(tmp_path / "adapter", peer, target_modules=["q_proj"])
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    found = weights_of(tmp_path / "merged")
    assert all(torch.equal(found[name], base[name].bfloat16()) for name in base if "q_proj" not in name)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} - {None} == {"bfloat16"}


def test_what_alone_is_in_fp32_stays_so_and_integers_stay_as_they_are(tmp_path: Path) -> None:
    peer = write_rounded(tmp_path / "base", "glm4_moe")
    path = tmp_path / "base" / "model.safetensors"
    base = load_file(path)
    special = {name: t.float() + 1e-5 for name, t in base.items() if name.endswith("e_score_correction_bias")}
    special["model.layers.0.self_attn.positions"] = torch.arange(5)
    save_file(base | special, path, metadata={"format": "pt"})
    write_peft_adapter(tmp_path / "adapter", peer, target_modules=["q_proj"])
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    found = weights_of(tmp_path / "merged")
    assert len(special) > 1 and all(torch.equal(found[name], tensor) for name, tensor in special.items())


@pytest.mark.parametrize("form", ["gptq", "awq", "w4a16", "fp8", "nf4", "nvfp4"])
def test_a_quantized_base_becomes_numbers(tmp_path: Path, form: str) -> None:
    peer = test_quantized_model.write_quantized(tmp_path / "base", test_quantized_model.FOLDERS[form][0])
    path = tmp_path / "base" / "model.safetensors"
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("k", "v", "o_proj.input")}
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})
    write_peft_adapter(tmp_path / "adapter", peer)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "merged")
    found = weights_of(tmp_path / "merged")
    adapted = write_peft_adapter(tmp_path / "again", peer)
    expected = write_merged(tmp_path / "peft", adapted, tmp_path / "base").state_dict()
    assert found.keys() == weights_of(tmp_path / "peft").keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=1e-6)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", attn_implementation="eager")
    assert opened.dtype == torch.bfloat16 and not hasattr(opened.config, "quantization_config")


def test_codes_of_experts_become_numbers_as_transformers_has_them(tmp_path: Path) -> None:
    """The same as where the base was stored in numbers, with the experts' columns before their rows."""
    peer = write_rounded(tmp_path / "numbers", "gpt_oss")
    shutil.copytree(tmp_path / "numbers", tmp_path / "codes")
    write_peft_adapter(tmp_path / "adapter", peer)
    numbers = load_file(tmp_path / "numbers" / "model.safetensors")
    codes = dict(numbers)
    for name in [name for name in numbers if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = codes.pop(name).shape
        case = formats.gpt_oss(experts, rows, columns)
        scales = {f"{case.name}_scales": torch.full((experts, rows, columns // 32), 124, dtype=torch.uint8)}
        codes |= {own.replace(case.name, name): part for own, part in (case.tensors | scales).items()}
        number = formats.random(experts, rows, columns)
        numbers[name] = (torch.tensor(formats.E2M1)[number.long()] / 8).bfloat16().transpose(1, 2).contiguous()
    save_file(numbers, tmp_path / "numbers" / "model.safetensors", metadata={"format": "pt"})
    save_file(codes, tmp_path / "codes" / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "codes" / "config.json"
    described = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(described))
    for form in ("numbers", "codes"):
        merge(tmp_path / form, [(tmp_path / "adapter", 1.0)], tmp_path / f"merged {form}")
    found, expected = weights_of(tmp_path / "merged codes"), weights_of(tmp_path / "merged numbers")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged codes", dtype=torch.float32, attn_implementation="eager"
    )
    found_logits = logits_of(tmp_path / "merged codes")
    torch.testing.assert_close(found_logits, peer_logits(opened, prompt(33)), rtol=0, atol=TOLERANCE)


def test_a_large_model_is_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = write_checkpoint(tmp_path / "base", "llama", shard_size="100KB")
    assert len([*(tmp_path / "base").glob("*.safetensors")]) > 2
    write_peft_adapter(tmp_path / "adapter", peer)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "one")
    monkeypatch.setattr(merged_folder, "SHARD_BYTES", 70_000)
    merge(tmp_path / "base", [(tmp_path / "adapter", 1.0)], tmp_path / "many")
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    for shard in shards:
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            assert {name for name, own in index["weight_map"].items() if own == shard} == set(file.keys())
    one, many = weights_of(tmp_path / "one"), weights_of(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in many.values())


# The command


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder with a base and an adapter of it."""
    peer = write_rounded(tmp_path / "base", "llama")
    write_peft_adapter(tmp_path / "adapter", peer)
    return tmp_path


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"home", "hub", "cache"}


def test_the_command_says_what_to_type_next_and_that_runs(folders: Path) -> None:
    base, adapter, merged = folders / "base", folders / "adapter", folders / "merged"
    result = run_cli("merge", base, f"{adapter}:0.5", "-o", merged)
    assert result.code == 0, result.err
    assert result.out.decode().startswith(f"{base} with adapter:0.5: ")
    assert f'`localllm run {merged} "..."` uses it' in result.err and "merging" in result.err
    ran = run_cli("run", merged, "-p", "Once", "--max-tokens", "2", "--weights", "bf16")
    assert ran.code == 0, ran.err
    told = run_cli("merge", base, adapter, "-o", folders / "again", "--json").json
    assert told == {
        "schema_version": 1,
        "model": str(base),
        "adapters": [{"name": "adapter", "scale": 1.0}],
        "directory": str(folders / "again"),
        "size_bytes": sum(path.stat().st_size for path in (folders / "again").iterdir()),
    }


def test_a_preset_brings_its_own_adapters(folders: Path) -> None:
    own = f"{folders / 'adapter'}:0.5"
    assert run_cli("preset", "save", "mine", "--model", folders / "base", "--adapter", own).code == 0
    told = run_cli("merge", "mine", f"{folders / 'adapter'}:0.25", "-o", folders / "merged", "--json").json
    assert [each["scale"] for each in told["adapters"]] == [0.5, 0.25]


def test_an_adapter_that_is_not_here_is_named_with_how_to_get_it(folders: Path) -> None:
    refused = run_cli("merge", folders / "base", "maker/none", "-o", folders / "merged")
    assert refused.code == 1 and "fix:   localllm pull maker/none" in refused.err
    assert "offline" not in refused.err


def test_what_is_in_the_way_is_left_as_it_is(folders: Path) -> None:
    base, adapter = folders / "base", folders / "adapter"
    for target in (base, base / "config.json", folders / "none" / "merged"):
        refused = run_cli("merge", base, adapter, "-o", target)
        assert (refused.code, len(refused.error_lines)) == (2, 4)
    assert f"mkdir -p {folders / 'none'}" in refused.err
    (folders / "empty").mkdir()
    assert run_cli("merge", base, adapter, "-o", folders / "empty").code == 0
    assert (folders / "empty" / "config.json").is_file()


@pytest.mark.parametrize("at", ["before", "while writing"])
def test_a_full_disk_is_told_with_numbers_and_nothing_is_left(
    folders: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    if at == "before":
        monkeypatch.setattr(merged_folder, "free_bytes", lambda _: 1000)
    else:
        monkeypatch.setattr(merged_folder.NewFile, "publish", raising_full_disk)
    before = left_in(folders)
    refused = run_cli("merge", folders / "base", folders / "adapter", "-o", folders / "merged")
    assert (refused.code, left_in(folders)) == (4, before)
    assert "MiB are needed" in refused.err or "KiB are needed" in refused.err


def raising_full_disk(_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_adapter_of_another_model_is_refused_and_nothing_is_left(folders: Path) -> None:
    write_checkpoint(folders / "other", "llama", hidden_size=96, head_dim=24)
    before = left_in(folders)
    refused = run_cli("merge", folders / "other", folders / "adapter", "-o", folders / "merged")
    assert (refused.code, len(refused.error_lines), left_in(folders)) == (1, 4, before)
    assert "made for an embedding of another size" in refused.err


def test_an_adapter_that_makes_infinite_numbers_is_refused_and_nothing_is_left(folders: Path) -> None:
    path = folders / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.full_like(tensor, 3e18) for name, tensor in load_file(path).items()}, path)
    before = left_in(folders)
    refused = run_cli("merge", folders / "base", f"{folders / 'adapter'}:100", "-o", folders / "merged")
    assert (refused.code, left_in(folders)) == (1, before) and "infinite numbers" in refused.err


def test_a_base_in_another_programs_form_is_refused_by_its_name(tmp_path: Path) -> None:
    peer = test_quantized_model.write_quantized(tmp_path / "base", test_quantized_model.FOLDERS["mlx"][0])
    write_peft_adapter(tmp_path / "adapter", peer)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "maker/model"}))
    refused = run_cli("merge", tmp_path / "base", tmp_path / "adapter", "-o", tmp_path / "merged")
    assert refused.code == 1 and "MLX" in refused.err
    assert f"fix:   localllm merge maker/model {tmp_path / 'adapter'} -o {tmp_path / 'merged'}" in refused.err


def test_a_gguf_base_is_refused_with_the_model_that_it_was_made_from(folders: Path) -> None:
    write_gguf(folders / "base", folders / "base.gguf", all_of("F16"))
    path = folders / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "maker/model"}))
    refused = run_cli("merge", folders / "base.gguf", folders / "adapter", "-o", folders / "merged")
    assert refused.code == 1 and "in the form of GGUF" in refused.err
    assert f"fix:   localllm merge maker/model {folders / 'adapter'} -o {folders / 'merged'}" in refused.err
    assert not (folders / "merged").exists()


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    base = cli_support.write_checkpoint(tmp_path / "base", hidden=1024, layers=6)
    peer = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    write_peft_adapter(tmp_path / "adapter", peer, target_modules=["q_proj"])
    (tmp_path / "home").mkdir()
    before = left_in(tmp_path)
    command = ("merge", base, tmp_path / "adapter", "-o", tmp_path / "merged")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with cli_support.start_cli(tmp_path / "home", *command, **pipes) as process:
        assert b"merging" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert err.decode().endswith(f"interrupted; {tmp_path / 'merged'} was not made\n")
    assert left_in(tmp_path) == before


def test_what_ends_the_work_leaves_nothing(folders: Path) -> None:
    before = left_in(folders)

    def end(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(folders / "base", [(folders / "adapter", 1.0)], folders / "merged", end)
    assert left_in(folders) == before
