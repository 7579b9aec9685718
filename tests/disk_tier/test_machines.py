"""Tiers against a model of them: any order of putting, reading, damaging and opening anew."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localllm.cache.disk import DiskTier
from localllm.cache.page_file import PageKey
from tests.disk_tier.support import (
    ABOUT,
    FILE_BYTES,
    PATIENCE_S,
    ROOT,
    chain,
    held_bytes,
    opened,
    orphans,
    page,
    path_of,
    payload,
    read,
    temporaries,
)

SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


class OneTier(RuleBasedStateMachine):
    """One tier and a dict: which pages there are, in the order of their use, is known exactly."""

    limit = 6

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name) / "kv"
        self.turn = 0
        self.used: dict[int, int] = {}
        # A forest: page i hangs on page (i - 1) // 2 - 1, the first three on the root.
        self.keys: list[PageKey] = []
        for index in range(16):
            parent = self.parent(index)
            self.keys.append(page(ROOT if parent is None else self.keys[parent].digest, index))
        self.start()

    def start(self) -> None:
        self.tier = DiskTier(self.directory, ROOT, ABOUT, self.limit * FILE_BYTES, self.fail)

    def fail(self, sentence: str) -> None:
        raise AssertionError(sentence)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close(PATIENCE_S)
            self.folder.cleanup()

    @staticmethod
    def parent(index: int) -> int | None:
        return index // 2 - 1 if index >= 2 else None

    def line(self, index: int) -> list[int]:
        parent = self.parent(index)
        return [*([] if parent is None else self.line(parent)), index]

    def use(self, index: int) -> None:
        self.used[index] = self.turn
        self.turn += 1

    def make_room(self, keep: int | None) -> bool:
        while len(self.used) >= self.limit:
            tails = set(self.used) - {self.parent(index) for index in self.used} - {keep}
            if not tails:
                return False
            del self.used[min(tails, key=lambda index: self.used[index])]
        return True

    @rule(index=st.integers(0, 15))
    def put_line(self, index: int) -> None:
        for each in self.line(index):
            self.put(each)

    @rule(index=st.integers(0, 15))
    def put(self, index: int) -> None:
        parent, key = self.parent(index), self.keys[index]
        self.tier.put(key, payload(key))
        assert self.tier.flush(PATIENCE_S)
        if index in self.used or ((parent is None or parent in self.used) and self.make_room(parent)):
            self.use(index)

    @rule(index=st.integers(0, 15))
    def read(self, index: int) -> None:
        line = self.line(index)
        there = [each for each in line if each in self.used]
        assert there == line[: len(there)]
        assert read(self.tier, [self.keys[each] for each in line]) == len(there)
        for each in there:
            self.use(each)

    @rule(index=st.integers(0, 15))
    def touch(self, index: int) -> None:
        self.tier.touch([self.keys[index].digest])
        if index in self.used:
            self.use(index)

    @rule(index=st.integers(0, 15), at=st.integers(0, FILE_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, index: int, at: int, bit: int) -> None:
        """A page nothing hangs on: what is behind it would be there, and of no use, until it is written again."""
        if index not in self.used or index in {self.parent(each) for each in self.used}:
            return
        path = path_of(self.directory, self.keys[index])
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << bit
        path.write_bytes(content)
        count = self.tier.num_quarantined
        assert read(self.tier, [self.keys[index]]) == 0
        assert self.tier.num_quarantined == count + 1
        del self.used[index]

    @precondition(lambda self: self.used)
    @rule(start=st.integers(0, 4_000_000_000))
    def reopen(self, start: int) -> None:
        """The files say in which order they were used, whatever the clock said."""
        self.tier.close(PATIENCE_S)
        now = time.time()
        dates = {index: min(start, now - 1000) + turn for index, turn in self.used.items()}
        for index, date in dates.items():
            os.utime(path_of(self.directory, self.keys[index]), (date, date))
        self.start()
        self.agrees()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert {index for index, key in enumerate(self.keys) if key.digest in self.tier} == set(self.used)
        assert held_bytes(self.directory) == self.tier.bytes_on_disk == len(self.used) * FILE_BYTES
        assert not orphans(self.directory) and not temporaries(self.directory)


TestOneTier = OneTier.TestCase
TestOneTier.settings = SETTINGS


class TwoTiers(RuleBasedStateMachine):
    """Two on one folder, of which pages are cut, flipped, deleted and swapped: what comes is right, all the same."""

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name) / "kv"
        self.chains = [chain(5, seed) for seed in range(3)]
        self.warnings: list[str] = []
        self.tiers = [self.start(), self.start()]

    def start(self) -> DiskTier:
        return DiskTier(self.directory, ROOT, ABOUT, 9 * FILE_BYTES, self.warnings.append)

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return
        for tier in self.tiers:
            assert tier.close(PATIENCE_S)
        with opened(self.directory, limit_bytes=9 * FILE_BYTES) as tier:
            for keys in self.chains:
                read(tier, keys)
        assert not orphans(self.directory) or tier.num_quarantined
        assert not temporaries(self.directory)
        assert not self.warnings
        self.folder.cleanup()

    @rule(which=st.integers(0, 1), seed=st.integers(0, 2), count=st.integers(1, 5))
    def put(self, which: int, seed: int, count: int) -> None:
        for key in self.chains[seed][:count]:
            self.tiers[which].put(key, payload(key))

    @rule(which=st.integers(0, 1), seed=st.integers(0, 2))
    def read(self, which: int, seed: int) -> None:
        read(self.tiers[which], self.chains[seed])

    @rule(which=st.integers(0, 1))
    def flush(self, which: int) -> None:
        assert self.tiers[which].flush(PATIENCE_S)

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.tiers[which].close(PATIENCE_S)
        self.tiers[which] = self.start()

    @rule(seed=st.integers(0, 2), index=st.integers(0, 4), at=st.integers(0, FILE_BYTES), how=st.sampled_from("fcds"))
    def damage(self, seed: int, index: int, at: int, how: str) -> None:
        path = path_of(self.directory, self.chains[seed][index])
        try:
            if how == "d":
                path.unlink()
            elif how == "c":
                os.truncate(path, at)
            elif how == "s":
                path_of(self.directory, self.chains[seed][index - 1]).replace(path)
            else:
                content = bytearray(path.read_bytes())
                content[min(at, len(content) - 1)] ^= 64
                path.write_bytes(content)
        except (FileNotFoundError, IndexError):
            pass


TestTwoTiers = TwoTiers.TestCase
TestTwoTiers.settings = SETTINGS
