"""The scaling of a rotary embedding, as config.json has it: of GGUF's keys, and of tensors with its factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from localllm.errors import FETCH_ANEW, CheckpointError, show
from localllm.gguf.header import GgufHeader, read_floats
from localllm.gguf.metadata import MOST, Json, Metadata, decimal

LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
DEFAULT_THETA = 10000.0
_STANDING = 1e30  # divides the frequency of features that do not turn, as llama.cpp has it
# Llama 3.1's, which all models with its factors have taken over: the context, and where its scaling begins and ends.
_LLAMA3 = (8192, 1.0, 4.0)


def rope_factors(headers: Sequence[GgufHeader]) -> dict[str, tuple[float, ...]]:
    """Return the factors of the rotary embedding that a model's files hold as tensors, by the tensors' names: what
    `hf_config` needs beside the metadata. Raises CheckpointError where they are not a list of fp32 numbers."""
    names = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    return {name: read_floats(header, name) for header in headers for name in names if name in header.tensors}


def rope_scaling(file: Metadata) -> Json | None:
    """Return config.json's `rope_scaling`, or None where nothing is scaled. Raises UnsupportedModelError for a scaling
    that does not run here, CheckpointError for an unusable value."""
    kind = file.get("rope.scaling.type")
    if LONG_FACTORS in file.tensors or kind == "longrope":
        long, short = (list(factors_of(file, name)) for name in (LONG_FACTORS, SHORT_FACTORS))
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if LLAMA3_FACTORS in file.tensors:
        return _by_divisors(file)
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(file)
    if kind not in (None, "none"):
        raise file.unsupported(f"the RoPE scaling {show(kind)}")
    # Before there was a type, the factor of a linear scaling was all that was written.
    factor = file.number("rope.scale_linear", 1.0)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def share_of(part: int, whole: int) -> float:
    """Return a share of a number that gives this part when it is multiplied and rounded down again."""
    share = part / max(whole, 1)
    return share if int(whole * share) == part else math.nextafter(share, math.inf)


def _yarn(file: Metadata) -> Json:
    scaling: Json = {
        "rope_type": "yarn",
        "factor": file.number("rope.scaling.factor"),
        "original_max_position_embeddings": file.integer("rope.scaling.original_context_length"),
    }
    optional = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for name, key in optional.items():
        if file.get(f"rope.scaling.{key}") is not None:
            scaling[name] = file.number(f"rope.scaling.{key}")
    scale = file.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {**scaling, "mscale": 1.0, "mscale_all_dim": scale} if scale else scaling


def factors_of(file: Metadata, name: str) -> Sequence[float]:
    """Return the numbers of a tensor of factors. Raises CheckpointError where it is missing."""
    if name not in file.factors:
        raise CheckpointError(f"{file.name}: {name} is missing", why="its RoPE scaling needs it", fix=FETCH_ANEW)
    return file.factors[name]


def _by_divisors(file: Metadata) -> Json | None:
    """Return the scaling whose results the file holds, a divisor for each frequency: Llama 3's, or of features that do
    not turn."""
    stored = factors_of(file, LLAMA3_FACTORS)
    dim, theta = file.integer("rope.dimension_count", file.head_dim), file.number("rope.freq_base", DEFAULT_THETA)
    if len(stored) * 2 != dim or not all(math.isfinite(each) and each >= 1.0 for each in stored) or theta <= 1.0:
        why = f"{len(stored)} factors from 1 on are needed, one for each pair of the {dim} features that rotate"
        raise CheckpointError(f"{file.name}: {LLAMA3_FACTORS} is not usable", why=why, fix=FETCH_ANEW)
    factor, turning = decimal(max(stored)), sum(each == 1.0 for each in stored)
    if factor == 1.0:
        return None
    if turning and all(each >= _STANDING for each in stored[turning:]):
        return {"rope_type": "proportional", "partial_rotary_factor": share_of(turning, len(stored))}
    wavelengths = [2 * math.pi * theta ** (2 * pair / dim) for pair in range(len(stored))]
    for original, low, high in (_LLAMA3, _fitted(stored, wavelengths, factor)):
        made = [_llama3_factor(length, factor, original, low, high) for length in wavelengths]
        if all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(made, stored, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise file.unsupported("RoPE factors of its own, which are not those of Llama 3")


def _llama3_factor(wavelength: float, factor: float, original: int, low: float, high: float) -> float:
    """Return what Llama 3 divides a frequency by: 1 for short wavelengths, `factor` for long ones, between them a mean
    of the frequencies."""
    share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - share) / factor + share)


def _fitted(stored: Sequence[float], wavelengths: Sequence[float], factor: float) -> tuple[int, float, float]:
    """Return the context and its two limits from the factors between them: the share of the unscaled frequency is a
    straight line over the frequency. Only the ratios of the three matter, so the lower limit is 1, as in Llama 3."""
    shares = [(1 / each - 1 / factor) / (1 - 1 / factor) for each in stored]
    points = [(1 / length, share) for length, share in zip(wavelengths, shares, strict=True) if 0 < share < 1]
    if len(points) < 2:
        return _LLAMA3
    (x0, y0), (x1, y1) = points[-1], points[0]
    if not (x0 < x1 and y0 < y1):
        return _LLAMA3
    slope = (y1 - y0) / (x1 - x0)
    low, high = x0 - y0 / slope, x0 + (1 - y0) / slope
    return (round(1 / low), 1.0, round(high / low, 4)) if 1 / MOST < low < high / 1.001 else _LLAMA3
