"""Files of adapters as PEFT and llama.cpp write them, of which the weights are never looked at."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy

BASE = "Qwen/Qwen3-8B"


def peft_files(base: object = BASE, size_bytes: int = 2000, **more: Any) -> dict[str, bytes]:
    """What a repository on the hub has of an adapter, and what else it usually has."""
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": base, **more}
    unwanted = ("README.md", "adapter_model.bin", "tokenizer.json", "training_args.bin", "optimizer.pt", "handler.py")
    return {
        **dict.fromkeys(unwanted, b"no"),
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": random.Random(7).randbytes(size_bytes),
    }


def write_peft(folder: Path, **more: Any) -> Path:
    """A folder with the two files of an adapter. more: as of `peft_files`."""
    folder.mkdir(parents=True)
    for name, data in peft_files(**more).items():
        if name.startswith("adapter_") and not name.endswith(".bin"):
            (folder / name).write_bytes(data)
    return folder


def write_gguf_lora(file: Path, rank: int = 4, base: str = f"https://huggingface.co/{BASE}") -> Path:
    """A GGUF file as llama.cpp's convert_lora_to_gguf.py begins one. base: an address, or a title."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 8.0)
    writer.add_base_model_count(1)
    (writer.add_base_model_repo_url if "://" in base else writer.add_base_model_name)(0, base)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", numpy.zeros((rank, 64), numpy.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", numpy.zeros((32, rank), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
