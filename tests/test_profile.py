"""What a machine was measured to do, kept and doubted, and predictions that learn from what came true."""

from __future__ import annotations

import errno
import re
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from localllm.offload.measurements import measurement
from localllm.offload.measurements.measurement import format_rates
from localllm.offload.planner import other_work
from localllm.offload.planner import profile as profile_module
from localllm.offload.planner.calibration import Term
from localllm.offload.planner.machine import Rates
from localllm.offload.planner.profile import FormatRates, Profile, keep, kept_profile
from localllm.quant.recipe import RECIPES

DISK = Term("cpu", "step", "disk")
BLOCKS = RECIPES["int8"].blocks


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    return tmp_path


def test_a_profile_is_kept_and_found_again_on_the_same_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kept_profile()
    assert found.rates("int4-g64") is None
    measured = replace(found, disk_read_gbs=1.5, formats={"int4-g64": FormatRates(30.0, 900.0)})
    keep(measured.scored("int4-g64", DISK, 1.2))
    again = kept_profile()
    assert again.rates("int4-g64") == Rates(30.0, 900.0, 1.5)
    assert again.corrections("int4-g64").of(DISK) > 1
    assert again == measured.scored("int4-g64", DISK, 1.2)
    monkeypatch.setattr(profile_module, "_cpu_name", lambda: "another")
    assert kept_profile().formats == {}


@pytest.mark.parametrize("damage", ["", "[]", '{"machine": 3}', "{", '{"machine": "MACHINE", "formats": 3}', "\x00"])
def test_a_damaged_profile_is_measured_anew(own_cache: Path, damage: str) -> None:
    machine = kept_profile().machine
    (own_cache / "profile.json").write_text(damage.replace("MACHINE", machine))
    assert kept_profile() == Profile(machine)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "file" / "below"))
    keep(Profile("it"))


def test_predictions_that_are_off_correct_themselves() -> None:
    profile = Profile("it")
    for count in range(6):
        before = profile.corrections("int8").of(DISK)
        profile = profile.scored("int8", DISK, 1.9)
        assert profile.corrections("int8").of(DISK) > before or count > 2
    assert profile.corrections("int8").of(DISK) == pytest.approx(1.9)
    assert profile.band("int8", DISK) == 0.05 and profile.band("int8", DISK._replace(bound="memory")) == 0.25
    for _ in range(9):
        profile = profile.scored("int8", DISK, 1e9)
    assert profile.corrections("int8").of(DISK) <= 4.0


@pytest.mark.parametrize("ratio", [1e-3, 30.0, 1e9])
@pytest.mark.parametrize("runs", [0, 1, 4, 20])
def test_a_run_that_was_disturbed_moves_a_correction_little_and_not_for_long(ratio: float, runs: int) -> None:
    profile = Profile("it")
    for _ in range(runs):
        profile = profile.scored("int8", DISK, 1.5)
    before = profile.corrections("int8").of(DISK)
    disturbed = profile.scored("int8", DISK, ratio)
    assert disturbed.corrections("int8").of(DISK) == pytest.approx(before, rel=0.26)
    if runs >= 4:
        assert disturbed.corrections("int8").of(DISK) == pytest.approx(before)
    after = disturbed.scored("int8", DISK, 1.5).scored("int8", DISK, 1.5)
    assert 1.0 < after.corrections("int8").of(DISK) <= 1.6


def test_the_runs_of_one_format_and_of_one_kind_say_nothing_of_another() -> None:
    profile = Profile("it")
    for _ in range(5):
        profile = profile.scored("int8", DISK, 2.0)
    for other in (DISK._replace(where="gpu"), DISK._replace(where="both"), DISK._replace(bound="memory")):
        assert profile.corrections("int8").of(other) == 1.0
    assert profile.corrections("int4-g64").of(DISK) == 1.0
    # A disk that no prompt has waited for yet is as it is for a step.
    assert profile.corrections("int8").of(DISK._replace(phase="prompt")) == 2.0
    for ratio, expected in ((2.0, 2.0), (1.0, 2.0 / 1.25)):  # one that came true, and one that did not
        of_prompts = profile.scored("int8", DISK._replace(phase="prompt"), ratio).corrections("int8")
        assert of_prompts.of(DISK) == 2.0
        assert of_prompts.of(DISK._replace(phase="prompt")) == pytest.approx(expected)


@pytest.mark.parametrize("figure", ["0", "-1", "NaN", "Infinity", '"3"'])
@pytest.mark.parametrize("name", ["disk_read_gbs", "dram_read_gbs", "matrix_gbs", "compute_gops"])
def test_a_kept_figure_that_is_none_is_measured_anew(own_cache: Path, name: str, figure: str) -> None:
    keep(replace(kept_profile(), disk_read_gbs=1.5, dram_read_gbs=40.0, formats={"int8": FormatRates(30.0, 900.0)}))
    path = own_cache / "profile.json"
    assert kept_profile().rates("int8") == Rates(30.0, 900.0, 1.5)
    path.write_text(re.sub(rf'"{name}": [0-9.]+', f'"{name}": {figure}', path.read_text()))
    assert kept_profile() == Profile(kept_profile().machine)


@pytest.mark.parametrize(
    ("figure", "first", "named"),
    [
        ("_dram_gbs", 0.01, "memory"),
        ("_disk_gbs", 90.0, "disk"),
        ("format_rates", FormatRates(0.5, 900.0), "int8 matrices"),
        ("format_rates", FormatRates(30.0, 1.0), "int8 matrices"),
    ],
)
def test_a_rate_that_cannot_be_is_measured_again_once_and_doubted_where_it_comes_out_so_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, figure: str, first: object, named: str
) -> None:
    right = {"_dram_gbs": 40.0, "_disk_gbs": 1.5, "format_rates": FormatRates(30.0, 900.0)}
    for seconds_right in (True, False):
        (own_cache / "profile.json").unlink(missing_ok=True)
        samples = {name: [value] * 2 for name, value in right.items()}
        samples[figure] = [right[figure] if seconds_right else first, first]
        for name, values in samples.items():
            monkeypatch.setattr(measurement, name, lambda *_, values=values: values.pop())
        profile = measurement.measured(kept_profile(), "int8", BLOCKS, torch.bfloat16, lambda _text: None)
        assert samples[figure] == [] and sorted(map(len, samples.values())) == [0, 1, 1]
        assert profile.doubtful == (() if seconds_right else (named,))
        assert kept_profile() == profile  # and it is not measured a third time


class FakeMachine:
    """Of four processors, which others use as a test says. Each figure takes two seconds to be measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = self.load = self.waiting = 0.0
        self.matrix_gbs, self.spread = 30.0, 0.02
        self.said: list[str] = []
        self._at_s = self._all_s = 0.0
        monkeypatch.setattr(other_work, "counted", self._counted)
        monkeypatch.setattr(other_work, "load", lambda: self.load)
        monkeypatch.setattr(other_work, "waiting", lambda: self.waiting)
        monkeypatch.setattr(psutil, "cpu_count", lambda *_: 4)
        monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0 + self._at_s)
        monkeypatch.setattr(measurement, "_dram_gbs", lambda: 40.0)
        monkeypatch.setattr(measurement, "_disk_gbs", lambda _folder: 1.5)
        monkeypatch.setattr(measurement, "format_rates", lambda *_: FormatRates(self.matrix_gbs, 900.0, 0, self.spread))

    def _counted(self) -> other_work.Counted:
        self._at_s += 2.0
        self._all_s += 2.0 * (4.0 + self.others)
        return other_work.Counted(self._at_s, self._all_s, 4.0 * self._at_s)

    def start(self) -> Profile:
        """What a program finds that needs the rates of int8."""
        self.said.clear()
        return measurement.measured(kept_profile(), "int8", BLOCKS, torch.bfloat16, self.said.append)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


ALL = ["measuring the memory", "measuring the disk", "measuring int8 matrices"]


def test_what_is_measured_beside_other_work_is_kept_with_its_date_and_doubted(machine: FakeMachine) -> None:
    machine.others, machine.matrix_gbs = 1.0, 12.0
    profile = machine.start()
    assert machine.said == ALL and profile == kept_profile()
    assert profile.doubtful == profile.busy == ("disk", "int8 matrices", "memory") and profile.impossible == ()
    assert profile.measured_at_s == 1_800_000_004.0
    assert profile.taken["disk"].others == pytest.approx(1.0)
    assert profile.rates("int8") == Rates(12.0, 900.0, 1.5)  # until there are better ones


def test_what_is_measured_on_a_quiet_machine_is_not_measured_again(machine: FakeMachine) -> None:
    machine.others = 0.2  # what a system does for itself
    assert machine.start().doubtful == ()
    assert machine.start() == kept_profile() and machine.said == []


@pytest.mark.parametrize(("load", "waiting"), [(1.5, 0.0), (0.1, 40.0)])
def test_what_is_doubted_is_measured_again_by_the_first_start_on_a_quiet_machine(
    machine: FakeMachine, load: float, waiting: float
) -> None:
    machine.others, machine.matrix_gbs = 2.0, 12.0
    keep(machine.start().scored("int8", DISK, 3.0))
    machine.others, machine.matrix_gbs, machine.load, machine.waiting = 0.0, 30.0, load, waiting
    busy = machine.start()
    assert machine.said == [] and busy.rates("int8") == Rates(12.0, 900.0, 1.5) and busy.scores
    machine.load = machine.waiting = 0.0
    quiet = machine.start()
    assert machine.said == ALL and quiet.doubtful == () and quiet.rates("int8") == Rates(30.0, 900.0, 1.5)
    assert quiet.scores == {}  # which were of the figures before
    assert machine.start() == quiet and machine.said == []


def test_only_what_is_doubted_is_measured_again(machine: FakeMachine) -> None:
    machine.spread = 0.8
    assert machine.start().busy == ("int8 matrices",)
    machine.spread = 0.02
    assert machine.start().doubtful == () and machine.said == ["measuring int8 matrices"]


def test_a_machine_that_is_never_still_does_not_measure_at_each_start(machine: FakeMachine) -> None:
    machine.spread = 0.8
    said = []
    for _ in range(10):
        assert machine.start().doubtful == ("int8 matrices",)
        said.append(len(machine.said))
    assert said == [3, 1, 1, 1] + [0] * 6


def test_the_figures_of_one_format_tell_nothing_of_another(machine: FakeMachine) -> None:
    machine.spread = 0.8
    profile = machine.start()
    assert profile.of("int8") == profile and profile.of("int4-g64").busy == ()
    assert profile.of("int4-g64").measured_at_s == profile.taken["memory"].at_s


FIGURES = {"disk_read_gbs": ["nothing"], "at_s": ["1e300", "null"], "others": ["-1", "null"], "spread": ["null"]}
FIGURES["times"] = ['"x"']


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FIGURES.items() for value in values])
def test_a_kept_file_of_another_time_is_measured_anew(
    machine: FakeMachine, own_cache: Path, name: str, value: str
) -> None:
    machine.start()
    path = own_cache / "profile.json"
    changed = re.sub(rf'"{name}": [0-9.]+', f'"{name}": {value}', path.read_text())
    for text in (changed, path.read_text().replace('"taken"', '"before"')):
        path.write_text(text)
        assert kept_profile() == Profile(kept_profile().machine)
        assert machine.start().rates("int8") is not None and machine.said == ALL


def test_a_format_is_measured_with_how_far_its_samples_are_apart() -> None:
    found = format_rates(BLOCKS, torch.bfloat16, torch.device("cpu"))
    assert found.matrix_gbs > 0 and found.compute_gops > 0 and found.workspace_bytes == 0 and found.spread >= 0


def test_the_system_tells_how_much_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    before = other_work.Counted(10.0, 1000.0, 50.0)
    assert other_work.others(before, other_work.Counted(12.0, 1006.0, 54.0)) == pytest.approx(1.0)
    assert other_work.others(before, other_work.Counted(10.01, 1006.0, 54.0)) == 0.0  # too short to tell
    assert other_work.others(before, other_work.Counted(12.0, 1000.0, 54.0)) == 0.0  # where nobody counts
    assert other_work.load() >= 0.0 and 0.0 <= other_work.waiting() <= 100.0
    monkeypatch.setattr(psutil, "cpu_count", lambda *_: 64)
    assert other_work.is_much(4.0) and not other_work.is_much(3.0)


def test_a_profile_that_cannot_be_written_to_its_end_leaves_nothing_behind(own_cache: Path) -> None:
    keep(Profile("before"))
    before = (own_cache / "profile.json").read_text()

    with mock.patch.object(Path, "replace", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        keep(Profile("after"))
    assert [path.name for path in own_cache.iterdir()] == ["profile.json"]
    assert (own_cache / "profile.json").read_text() == before
