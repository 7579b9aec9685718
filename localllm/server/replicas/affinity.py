"""The choice of a replica for a request: the one that has computed most of its beginning, unless it is much busier.

A request on its way to a replica is plain data, whole, so that another replica can be given it again. It comes with
digests of ever longer beginnings: two requests that share some share what is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)

_MOST_KNOWN = 1 << 16  # beginnings that are remembered: 8 MiB of text, in about as much memory
# A page of keys and values has 64 tokens, of which English makes 256 bytes or more: a replica that knows a chunk more
# has a page more every other time.
CHUNK_BYTES = 128
MOST_CHUNKS = 4096  # 512 KiB of text, which fill a context of 131,072 tokens
_DIGEST_BYTES = 8
# The fields with texts, in the order in which templates put them in front of the model: of all dialects.
_FIELDS = ("system", "instructions", "tools", "messages", "prompt", "input")


@dataclass(frozen=True)
class ReplicaCall:
    """A request that was let in. scope: as ASGI has it. beginning: as `beginning_of` has it."""

    scope: Mapping[str, Any]
    body: bytes
    beginning: tuple[bytes, ...]


def beginning_of(body: bytes) -> tuple[bytes, ...]:
    """Return a chain of digests, of which i is of the first i + 1 whole chunks of the body's texts. It is empty for a
    body that is not a JSON object: the replica refuses it."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    said = "".join(json.dumps(fields[name]) for name in _FIELDS if fields.get(name) is not None).encode()
    chain, digest = list[bytes](), b""
    for start in range(0, min(len(said) // CHUNK_BYTES, MOST_CHUNKS) * CHUNK_BYTES, CHUNK_BYTES):
        digest = hashlib.blake2b(digest + said[start : start + CHUNK_BYTES], digest_size=_DIGEST_BYTES).digest()
        chain.append(digest)
    return tuple(chain)


class Affinity(Generic[R]):
    """Replicas, what each was asked, and how much it has to do. It is an estimate: a replica does not
    report what it has evicted."""

    def __init__(self, most_more: int, most_known: int = _MOST_KNOWN) -> None:
        """most_more: requests that the best replica may have more than the least busy one. most_known: beginnings."""
        self._most_more = most_more
        self._most_known = most_known
        self._num_open: dict[R, int] = {}
        self._num_asked: dict[R, int] = {}  # beginnings that it knows
        self._knowing: OrderedDict[bytes, dict[R, None]] = OrderedDict()  # by digest; what was long not asked is first

    @property
    def num_known(self) -> int:
        """Beginnings that are remembered."""
        return len(self._knowing)

    def keep(self, replicas: Iterable[R]) -> None:
        """Know these replicas, and no others."""
        there = set(replicas)
        for gone in self._num_open.keys() - there:
            self.forget(gone)
        self._num_open = dict.fromkeys(there, 0) | self._num_open
        self._num_asked = dict.fromkeys(there, 0) | self._num_asked

    def forget(self, replica: R) -> None:
        """Forget a replica that has ended."""
        self._num_open.pop(replica, None)
        self._num_asked.pop(replica, None)
        for digest in [digest for digest, knowing in self._knowing.items() if replica in knowing]:
            del self._knowing[digest][replica]
            if not self._knowing[digest]:
                del self._knowing[digest]

    def ranked(self, beginning: Sequence[bytes]) -> list[R]:
        """Return all replicas, the best first: those that are not much busier than the least busy one, by how much of
        the beginning they know; among equals the one with less to do, then the one that knows fewer beginnings."""
        least = min(self._num_open.values(), default=0)
        known: dict[R, int] = {}  # chunks, by replica
        for count, digest in enumerate(beginning, 1):
            if not (knowing := self._knowing.get(digest)):
                break
            known |= dict.fromkeys(knowing, count)

        def rank(replica: R) -> tuple[bool, int, int, int]:
            num_open = self._num_open[replica]
            return num_open > least + self._most_more, -known.get(replica, 0), num_open, self._num_asked[replica]

        return sorted(self._num_open, key=rank)

    def sent(self, replica: R) -> None:
        """Count one more request of a replica."""
        if replica in self._num_open:
            self._num_open[replica] += 1

    def answered(self, replica: R) -> None:
        """Count one request less."""
        if self._num_open.get(replica):
            self._num_open[replica] -= 1

    def learn(self, replica: R, beginning: Sequence[bytes]) -> None:
        """Note what a replica computes. The longest beginnings are the first to be forgotten, as its pages are."""
        if replica not in self._num_open:
            return
        for digest in reversed(beginning):
            knowing = self._knowing.setdefault(digest, {})
            self._num_asked[replica] += replica not in knowing
            knowing[replica] = None
            self._knowing.move_to_end(digest)
        while len(self._knowing) > self._most_known:
            _, forgotten = self._knowing.popitem(last=False)
            for each in forgotten:
                self._num_asked[each] -= 1
