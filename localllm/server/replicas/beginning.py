"""The beginning of a request, as digests of ever longer beginnings: two requests that share some share what is
computed."""

from __future__ import annotations

import hashlib
import json

# A page of keys and values has 64 tokens, of which English makes 256 bytes or more: a replica that knows a chunk more
# has a page more every other time.
CHUNK_BYTES = 128
MOST_CHUNKS = 4096  # 512 KiB of text, which fill a context of 131,072 tokens
_DIGEST_BYTES = 8
# The fields with texts, in the order in which templates put them in front of the model: of all dialects.
_FIELDS = ("system", "instructions", "tools", "messages", "prompt", "input")


def beginning_of(body: bytes) -> tuple[bytes, ...]:
    """Return a chain of digests, of which i is of the first i + 1 whole chunks of the body's texts. It is empty for a
    body that is no JSON object: the replica refuses it."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    said = "".join(json.dumps(fields[name]) for name in _FIELDS if fields.get(name) is not None).encode()
    chain, digest = [], b""
    for start in range(0, min(len(said) // CHUNK_BYTES, MOST_CHUNKS) * CHUNK_BYTES, CHUNK_BYTES):
        chunk = said[start : start + CHUNK_BYTES]
        digest = hashlib.blake2b(digest + chunk, digest_size=_DIGEST_BYTES).digest()
        chain.append(digest)
    return tuple(chain)
