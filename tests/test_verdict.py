"""Whether a model would run here, from its shape alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config import load_settings
from localllm.offload.planner.profile import FormatRates, keep, kept_profile
from localllm.runtime.fit_check import Verdict, judge

RATES = FormatRates(20.0, 500.0)


@pytest.fixture
def unmeasured(own_folders: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))


@pytest.fixture
def measured(unmeasured: None) -> None:
    """A machine of which everything is known."""
    formats = dict.fromkeys(("int4-g64", "bf16", "bf12"), RATES)
    keep(replace(kept_profile(), dram_read_gbs=25.0, disk_read_gbs=2.0, formats=formats))


def judged(name: str, **settings: Any) -> Verdict:
    return judge(name, load_settings({"device": "cpu", **settings}), pytest.fail)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("name", "ram", "kind"),
    [("tiny", "2GiB", "fits"), ("qwen3-0.6b", "2GiB", "fits"), ("llama-3.1-8b", "3GiB", "offloads")],
)
def test_a_model_that_is_not_here_is_judged_by_its_shape(name: str, ram: str, kind: str) -> None:
    verdict = judged(name, ram=ram)
    assert verdict.kind == kind and verdict.tok_s is not None and verdict.ctx is not None


@pytest.mark.usefixtures("measured")
def test_what_does_not_fit_or_cannot_be_judged_says_why() -> None:
    assert judged("llama-3.3-70b", ram="1GiB").kind == "too large"
    assert "GiB" in judged("llama-3.3-70b", ram="1GiB").details
    assert judged("maker/unknown") == Verdict("unknown", why="its shape is known once it is here")
    assert "trained for at most 1024" in judged("tiny", ctx=4096).details


@pytest.mark.usefixtures("unmeasured")
def test_it_is_told_before_the_machine_is_measured_and_whoever_hears_may_stop_it() -> None:
    def say(text: str) -> None:
        raise InterruptedError(text)

    with pytest.raises(InterruptedError, match="measuring"):
        judge("qwen3-8b", load_settings({"device": "cpu"}), say)
