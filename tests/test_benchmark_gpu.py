"""`python -m benchmarks.gpu` with a CPU for the card: every part gives its rows, with few packages installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.gpu_model import sized
from benchmarks.peers_protocol import REPOSITORY
from localllm.models.families import parse_config
from localllm.models.layout import model_bytes
from localllm.quant.recipe import RECIPES

MISSING = ("platformdirs", "textual", "httpx2", "bitsandbytes")  # what a machine with a GPU may lack


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of a run in which those packages cannot be imported, in no process."""
    site, out = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("out")
    lacks = f"import sys\nsys.modules.update(dict.fromkeys({MISSING!r}))\n"
    (site / "sitecustomize.py").write_text(lacks, encoding="utf-8")
    command = ["-m", "benchmarks.gpu", "--device", "cpu", "--small", "--rounds", "1", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCALLLM")}
    environment |= {"PYTHONPATH": f"{site}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], env=environment, cwd=REPOSITORY, check=True, timeout=300)
    found: dict[str, object] = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    return found


def test_every_placement_writes_the_text_of_the_cpu_alone(result: dict[str, dict[str, str]]) -> None:
    assert set(result["texts"].values()) == {"ok"}
    assert {"resident", "streamed", "computed", "split", "disk", "disk-computed", "mixed"} < set(result["texts"])


def test_every_row_has_its_figure_beside_what_it_is_measured_by(result: dict[str, list[dict[str, object]]]) -> None:
    rows = [row for row in result["rows"] if row["part"] != "texts"]
    by_format = {weights: [row["what"] for row in rows if weights in str(row["part"])] for weights in ("bf16", "int4")}
    assert len(by_format["bf16"]) == 4 and len(by_format["int4"]) == 3
    for row in rows:
        if "accelerate" not in str(row["what"]):  # which need not be installed
            assert row["figure"] and row["beside"] and row["ratio"], row


def test_the_machine_is_measured_for_both_formats(result: dict[str, dict[str, Any]]) -> None:
    profile = result["machine"]["profile"]
    assert set(profile["formats"]) == set(profile["device"]["formats"]) == {"bf16", "int4-g64"}


@pytest.mark.parametrize(("shape", "weights"), [("llama-3.1-8b", "bf16"), ("llama-3.3-70b", "int4-g64")])
@pytest.mark.parametrize("gigabytes", [12, 18, 36])
def test_a_model_is_as_large_as_it_shall_be_but_for_half_a_layer(shape: str, weights: str, gigabytes: int) -> None:
    raw_config = sized(shape, weights, gigabytes * 10**9)
    num_bytes = model_bytes(parse_config(raw_config, shape), RECIPES[weights])
    assert abs(num_bytes / gigabytes / 1e9 - 1) < 0.03
