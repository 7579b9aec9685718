"""JSON from a stranger's model folder: bounded before it is parsed, and refused where two readers could disagree.

Owns the limits on bytes, containers and depth. Knows no key of any file.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import FETCH_ANEW, CheckpointError
from localllm.present import open_plain_file


@dataclass(frozen=True)
class JsonLimits:
    """The most that a file may hold. Elements are counted by bytes that could open or separate one, so before any is
    built.

    objects: part of `containers`; one takes ten times the memory of a short list.
    """

    size_bytes: int = 4 << 20
    objects: int = 600_000
    containers: int = 20_000
    elements: int = 500_000


def read_json_object(path: Path, limits: JsonLimits) -> dict[str, object]:
    """Return the object in `path`. Raises CheckpointError naming a file that is absent, not plain, too large or not
    strict."""
    return parse_json_object(read_bounded(path, limits.size_bytes), str(path), limits)


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return the bytes of a plain file of at most `limit_bytes`."""
    fd = open_plain_file(path)
    size_bytes = os.fstat(fd).st_size
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit_bytes + 1) if size_bytes <= limit_bytes else b""
    if max(size_bytes, len(data)) > limit_bytes:
        why = f"{max(size_bytes, len(data))} bytes; at most {limit_bytes} are read"
        raise CheckpointError(f"{path} is too large", why=why, fix=FETCH_ANEW)
    return data


def parse_json_object(data: bytes, source: str, limits: JsonLimits) -> dict[str, object]:
    """Return one JSON object out of UTF-8 `data`; `source` names it in errors.

    Raises CheckpointError for what `parse_json` refuses, for half surrogates, and for anything but an object.
    """
    value = parse_json(data, source, limits)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source} is not a JSON object", why=f"it holds a {type(value).__name__}", fix=FETCH_ANEW
        )
    if b"\\u" in data:  # half a surrogate pair is not a character: Python's parser lets it pass, printing it fails
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{source} is not valid JSON", why=str(error)[:200], fix=FETCH_ANEW) from None
    return value


def parse_json(data: bytes, source: str, limits: JsonLimits) -> object:
    """Return one JSON value out of UTF-8 `data`; `source` names it in errors.

    Raises CheckpointError for duplicate keys, NaN, -Infinity, and too deep or too many values.
    """
    require_few_values(data, source, limits)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_constant,
            parse_float=_finite_float,
            parse_int=_integer,
        )
    except RecursionError:
        raise CheckpointError(f"{source} is nested too deeply", why="hundreds of levels", fix=FETCH_ANEW) from None
    except ValueError as error:
        raise CheckpointError(f"{source} is not valid JSON", why=str(error)[:200], fix=FETCH_ANEW) from None


def require_few_values(data: bytes, source: str, limits: JsonLimits) -> None:
    """Raise CheckpointError where `data` could hold more values than `limits` allow: counted, not parsed."""
    objects = data.count(b"{")
    containers = objects + data.count(b"[")
    elements = containers + data.count(b",")
    if objects > limits.objects or containers > limits.containers or elements > limits.elements:
        why = f"{objects} objects, {containers - objects} lists, {elements} values; at most {limits.objects} objects,"
        why += f" {limits.containers} lists and objects, {limits.elements} values"
        raise CheckpointError(f"{source} holds too many values", why=why, fix=FETCH_ANEW)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return result


def _constant(name: str) -> float:
    if name == "Infinity":  # JSON has no such word; Python writes it where there is no upper bound
        return math.inf
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} does not fit a 64-bit float")
    return value


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is an integer to some readers and a float to others")
    return int(text)
