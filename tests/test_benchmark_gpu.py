"""`python -m benchmarks.gpu` with a CPU for the card: every part gives its rows, with few packages installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_engines import sized
from benchmarks.gpu_table import Row
from benchmarks.peers_protocol import REPOSITORY
from localllm.models.block_layouts import model_bytes
from localllm.models.families import parse_config
from localllm.quant.recipe import RECIPES
from tests.patience import PATIENCE_S

MISSING = ("platformdirs", "textual", "httpx2", "bitsandbytes")  # what a machine with a GPU may lack


def run_without_packages(tmp_path: Path) -> dict[str, Any]:
    """The result of a run in which no process can import those packages."""
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    lacks = f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n"
    (site / "sitecustomize.py").write_text(lacks, encoding="utf-8")
    command = ["-m", "benchmarks.gpu", "--device", "cpu", "--small", "--rounds", "1", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCALLLM")}
    environment |= {"PYTHONPATH": f"{site}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], env=environment, cwd=REPOSITORY, check=True, timeout=PATIENCE_S)
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    return found


PARTS = {
    "products": ("beside the device copy", "torch's INT4 operator", "16 rows", "which kernel"),
    "model": ("first token after load", "behind 70", "beside a device copy", "behind 64 known ones", "one graph",
              "each layer", "reduce-overhead", "prefill", "beside bf16"),
    "experts, 0.04 GB": ("beside the CPU alone", "beside the plan's"),
    "long texts": ("top:1 of the pages of 300 tokens",),
    "drafts, resident": ("all of them wrong", "4 at once, 80% of them right"),
}  # fmt: skip


@pytest.mark.slow
def test_every_part_has_its_rows_and_all_is_right(tmp_path: Path) -> None:
    result = run_without_packages(tmp_path)
    assert set(result["texts"].values()) == {"ok"}
    assert {"resident", "streamed", "computed", "split", "disk", "disk-computed", "mixed"} < set(result["texts"])
    rows = [row for row in result["rows"] if "MB" in str(row["part"])]
    whats = {weights: [row["what"] for row in rows if weights in str(row["part"])] for weights in ("bf16", "int4")}
    assert len(whats["bf16"]) == 4 and len(whats["int4"]) == 3
    for row in rows:
        if "accelerate" not in str(row["what"]):  # which need not be installed
            assert row["figure"] and row["beside"] and row["ratio"], row
    for part, wanted in PARTS.items():
        own = [row for row in result["rows"] if row["part"] == part]
        assert [what for what in wanted if not any(what in row["what"] for row in own)] == []
        without = ("which kernel", "hits beside")  # the latter: a CPU has no slots
        assert [row for row in own if not row["figure"] and not any(part in row["what"] for part in without)] == []
    judged = [row for row in result["rows"] if row["wanted"] == "the same tokens"]
    assert len(judged) == 3 and all(row["is_met"] for row in judged)
    profile = result["machine"]["profile"]
    assert set(profile["formats"]) == set(profile["device"]["formats"]) == {"bf16", "int4-g64"}


@pytest.mark.parametrize(
    ("shape", "weights", "gigabytes"),
    [("llama-3.1-8b", "bf16", 12), ("llama-3.3-70b", "int4-g64", 12), ("llama-3.1-8b", "bf16", 36)],
)
def test_a_model_is_as_large_as_it_shall_be_but_for_half_a_layer(shape: str, weights: str, gigabytes: int) -> None:
    raw_config = sized(shape, weights, gigabytes * 10**9)
    num_bytes = model_bytes(parse_config(raw_config, shape), RECIPES[weights])
    assert abs(num_bytes / gigabytes / 1e9 - 1) < 0.03


def test_an_interrupted_run_tells_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(parts: gpu.Parts, _seconds: float) -> None:
        parts._report.add([Row("products", "the first figure", note="so far")])
        raise KeyboardInterrupt

    for name in ("TMPDIR", "LOCALLLM_HOME", "LOCALLLM_CACHE"):  # which it sets, for its workers
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu.Parts, "products", interrupted)
    command = ["gpu", "--device", "cpu", "--small", "--parts", "products", "--out", str(tmp_path / "a" / "b")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    told = capsys.readouterr()
    assert ended.value.code == 130 and "the first figure" in told.out
    assert "interrupted" in told.err and str(tmp_path / "a" / "b" / "gpu.json") in told.err
    assert "the first figure" in (tmp_path / "a" / "b" / "gpu.json").read_text(encoding="utf-8")
