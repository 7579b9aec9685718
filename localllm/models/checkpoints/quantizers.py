"""What a quantized Hugging Face folder means: which plain matrices its tensors are, by the format that its config.json
names."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.errors import FETCH_ANEW, CheckpointError, show
from localllm.models.checkpoints import awq, bnb, compressed_tensors, fp4, fp8, gptq, mlx
from localllm.models.checkpoints.quantized import READ, Folder, QuantizedMatrix, RawTensors, unsupported
from localllm.models.fields import Fields


def quantized_matrices(config: Mapping[str, object], source: str, raw: RawTensors) -> dict[str, QuantizedMatrix]:
    """Return the quantized matrices by their plain names, none where config.json names no quantization. Stored tensors
    that none of them uses are plain ones.

    source: names config.json in errors. Raises CheckpointError where the tensors contradict each other or the config,
    and UnsupportedModelError for a method that is not read.
    """
    section, method = _quantization(Fields(config, source))
    if section is None:
        return {}
    readers = {
        "gptq": gptq.matrices,
        "awq": awq.matrices,
        "compressed-tensors": compressed_tensors.matrices,
        "mlx": mlx.matrices,
        "bitsandbytes": bnb.matrices,
        "fp8": fp8.matrices,
        "fbgemm_fp8": fp8.matrices,
        "mxfp4": fp4.mxfp4_matrices,
        "modelopt": fp4.modelopt_matrices,
    }
    if method not in readers:
        raise unsupported(source, f"weights quantized by {show(method)}", READ)
    found = readers[method](section, Folder(source, raw, frozenset(raw.names())))
    if not found:
        why = f"{section.path.rstrip('.')} names {method}, and none of the {len(raw.names())} stored tensors is of it"
        raise CheckpointError(f"{source} contradicts the tensors", why=why, fix=FETCH_ANEW)
    return found


def _quantization(config: Fields) -> tuple[Fields | None, str]:
    """Return the section that describes the quantization, and its method."""
    text = config.section("text_config")
    for fields in (config, text) if text else (config,):
        ours = fields.section("quantization")
        if ours is not None and "bits" in ours.raw:
            return ours, "mlx"
        for key in ("quantization_config", "compression_config"):
            section = fields.section(key)
            if section is not None:
                return section, _method(section)
    return None, ""


def _method(section: Fields) -> str:
    method = section.optional_text("quant_method")
    if method is None:
        flags = section.flag("load_in_4bit") or section.flag("load_in_8bit")
        method = "bitsandbytes" if flags else "modelopt" if "quant_algo" in section.raw else "unknown"
    return "modelopt" if method.startswith("modelopt") else method
