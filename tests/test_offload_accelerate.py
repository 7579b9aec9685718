"""accelerate's disk offload as a side of a comparison."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import peers
from benchmarks.measure import drop_from_cache
from benchmarks.offload_accelerate import INSTALL, PLACEMENTS, Accelerate, contenders
from benchmarks.peers import Match, num_weights
from benchmarks.peers_protocol import REPOSITORY
from tests.test_peers import TOY as TWO_LAYERS

needs_accelerate = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("accelerate", "transformers")),
    reason="accelerate and transformers come with the extra `peers`",
)
TOY = {**TWO_LAYERS, "num_hidden_layers": 12}
MATRIX_BYTES, EMBEDDING_BYTES = 2 * num_weights(TOY), 2 * TOY["vocab_size"] * TOY["hidden_size"]
NORM_BYTES = 2 * (2 * TOY["num_hidden_layers"] + 1) * TOY["hidden_size"]
CAP_BYTES = MATRIX_BYTES // 2
PROBE_BYTES = 1 << 20


def loaded(directory: Path, placement: str) -> tuple[Accelerate, dict[str, Any]]:
    side, threads = Accelerate(), torch.get_num_threads()
    options = {"threads": threads, "directory": str(directory), "cap_bytes": CAP_BYTES, "placement": placement}
    return side, side.load(shape=TOY, **options)


@needs_accelerate
def test_a_placement_obeys_the_cap_leaves_the_rest_on_the_disk_and_the_fitted_one_reads_the_least(tmp_path):
    read = {}
    for placement in PLACEMENTS:
        _, facts = loaded(tmp_path, placement)
        unread = EMBEDDING_BYTES if placement == "fitted" else 0
        read[placement] = facts["disk_bytes_per_token"]
        assert CAP_BYTES / 2 < facts["resident_bytes"] <= CAP_BYTES
        assert facts["weight_bytes_per_token"] == MATRIX_BYTES + NORM_BYTES - EMBEDDING_BYTES
        assert facts["resident_bytes"] + read[placement] + unread == MATRIX_BYTES + NORM_BYTES
    assert read["fitted"] < read["auto"] == read["copied"]


@needs_accelerate
def test_every_placement_computes_with_the_weights_of_the_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(16)[None]
    logits = {placement: loaded(tmp_path, placement)[0].model(ids).logits for placement in PLACEMENTS}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected = whole(ids).logits
    assert expected.std() > 0
    for computed in logits.values():
        torch.testing.assert_close(computed, expected, rtol=0, atol=0)


@needs_accelerate
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # see test_parity.py
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_with_its_pages_dropped_each_token_comes_from_the_disk(tmp_path, placement):
    if not reads_are_counted(tmp_path):
        pytest.skip("reads of this file system are not reads of a disk")
    side, facts = loaded(tmp_path, placement)
    before = disk_read_bytes()
    assert side.decode(tokens=3, depth=16, drops_cache=False) > 0
    warm = disk_read_bytes()
    assert side.decode(tokens=3, depth=16, drops_cache=True) > 0
    dropped = disk_read_bytes()
    assert warm - before < facts["disk_bytes_per_token"]
    assert dropped - warm >= 3 * facts["disk_bytes_per_token"]


def disk_read_bytes() -> int:
    """Bytes that this process had from disks; what the page cache held is not among them."""
    return int(psutil.Process().io_counters().read_bytes)


def reads_are_counted(directory: Path) -> bool:
    probe = directory / "probe"
    probe.write_bytes(os.urandom(PROBE_BYTES))
    drop_from_cache([probe])
    before = disk_read_bytes()
    probe.read_bytes()
    return disk_read_bytes() - before >= PROBE_BYTES


def test_without_accelerate_its_side_says_how_to_install_what_the_page_and_the_extra_name():
    code = (
        "import sys; sys.modules['accelerate'] = None; from benchmarks.offload_accelerate import *; serve(Accelerate())"
    )
    (side, *_) = contenders(TOY, 1, Path(), CAP_BYTES)
    with contextlib.closing(Match()) as match:
        match.start(type(side)(side.name, "", [sys.executable, "-c", code], side.options, needed_bytes=0))
    error = match.skipped[side.name]
    assert "accelerate or transformers cannot be imported" in error.reason
    assert error.fix == INSTALL
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["peers"]
    wanted = [json.dumps(package) for package in extra if package.startswith(("accelerate", "transformers"))]
    assert INSTALL == "pip install " + " ".join(wanted)
    assert INSTALL in peers.PAGE.read_text()
