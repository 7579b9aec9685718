"""`localllm doctor`: the report, and what it finds out about the machine; each finding fires and does not fire."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm import repairs
from localllm.cli import checks_machine
from localllm.cli.checks_machine import check_address_space, check_disk_speed, check_huge_pages, check_memory
from localllm.cli.doctor import check_network, check_package, check_settings
from localllm.cli.findings import Finding, examined
from localllm.offload.measurements import measurement
from localllm.offload.planner import profile
from localllm.offload.planner.calibration import Term
from localllm.offload.planner.profile import FormatRates
from tests.cli_support import run_cli
from tests.fake_nvml import GIB, FakeCard, FakeNvml
from tests.test_machine_memory import group_v1, group_v2
from tests.thinning import every_other

NO_CARD = ["python", "torch", "gpu", "triton", "bitsandbytes", "llvmlite", "cpu", "memory", "addresses", "huge pages"]
NO_CARD += ["cache", "disk", "packed", "disk speed", "rates", "settings", "token", "network", "terminal"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(checks_machine, "_SPEED_BYTES", 8 << 20)
    return tmp_path


# The report


@pytest.mark.usefixtures("home")
def test_without_a_card_the_report_has_one_line_on_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([], refuses="NVML Shared Library Not Found").install(monkeypatch)
    report = run_cli("doctor", "--json").json
    assert list(report) == ["schema_version", "ok", "checks"]
    assert [row["name"] for row in report["checks"]] == NO_CARD
    assert all(list(row) == ["name", "status", "detail", "fix"] for row in report["checks"])


@pytest.mark.usefixtures("home")
def test_every_finding_that_is_not_ok_has_one_command_and_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(capability=(7, 5), used=12 * GIB, width=(4, 16))], cuda=12040).install(monkeypatch)
    result = run_cli("doctor", "--json")
    rows = {row["name"]: row for row in result.json["checks"]}
    assert (result.code, result.json["ok"]) == (1, False)
    assert {"driver", "capability", "vram", "link", "pinned"} < set(rows)
    assert (rows["driver"]["status"], rows["vram"]["status"], rows["link"]["status"]) == ("fail", "warn", "warn")
    assert all(bool(row["fix"]) == (row["status"] != "ok") and "\n" not in row["fix"] for row in rows.values())


@pytest.mark.usefixtures("home")
def test_a_cpu_build_of_torch_beside_a_card_fails_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    FakeNvml().install(monkeypatch)
    result = run_cli("doctor")
    assert result.code == 1 and "but this torch is a CPU build" in result.out.decode()
    assert "fix: pip install --force-reinstall 'torch>=2.11,<2.14'" in result.out.decode()


@pytest.mark.usefixtures("home")
def test_two_cards_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard(), FakeCard(uuid="GPU-second", width=(1, 16))]).install(monkeypatch)
    monkeypatch.setattr("localllm.cli.checks_torch.probe_triton", lambda _capability: "")
    rows = {row["name"]: row["status"] for row in run_cli("doctor", "--json").json["checks"]}
    assert (rows["vram 0"], rows["vram 1"], rows["link 0"], rows["link 1"]) == ("ok", "ok", "ok", "warn")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("missing", every_other(["torch", "psutil", "pynvml", "huggingface_hub"]))
def test_a_library_that_is_missing_ends_no_report(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    report = run_cli("doctor", "--json").json
    assert [row["name"] for row in report["checks"]] == NO_CARD


def test_a_check_that_falls_ill_is_a_finding() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("of a check")

    finding = examined(broken)
    assert (finding.status, finding.detail) == ("warn", "could not be examined: ZeroDivisionError: of a check")
    assert finding.fix == "localllm help failure"


# Memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    machine = SimpleNamespace(total=32 * GIB, available=20 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    return machine


def groups(tmp_path: Path, line: str) -> tuple[Path, Path]:
    (tmp_path / "self_cgroup").write_text(f"{line}\n")
    return tmp_path / "cgroup", tmp_path / "self_cgroup"


@pytest.mark.usefixtures("memory")
def test_memory_without_limits_is_the_machines(tmp_path: Path) -> None:
    assert check_memory(*groups(tmp_path, "0::/")) == Finding("ok", "20.0 GiB free of 32.0 GiB")


@pytest.mark.usefixtures("memory")
def test_a_nested_groups_limit_is_named_and_enough_is_enough(tmp_path: Path) -> None:
    root, own = groups(tmp_path, "0::/a/b")
    group_v2(root / "a" / "b", 8 * GIB, used=GIB)
    finding = check_memory(root, own)
    assert finding.status == "ok" and "the control group may use 8.0 GiB, 7.0 GiB of it free" in finding.detail


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("line", "file", "value"),
    [("4:memory:/a", "memory/a/memory.limit_in_bytes", "-1"), ("0::/a", "a/memory.max", "max")],
)
def test_a_group_without_room_is_given_more_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str, value: str
) -> None:
    root, own = groups(tmp_path, line)
    (group_v1 if value == "-1" else group_v2)((root / file).parent, 2 * GIB)
    monkeypatch.setattr(repairs, "is_container", lambda: False)
    finding = check_memory(root, own)
    assert (finding.status, finding.fix) == ("warn", f"echo {value} | sudo tee {root / file}")
    monkeypatch.setattr(repairs, "is_container", lambda: True)
    assert check_memory(root, own).fix.startswith("docker update --memory 16g")


@pytest.mark.usefixtures("memory")
def test_a_limit_beyond_the_machine_is_none(tmp_path: Path) -> None:
    root, own = groups(tmp_path, "0::/")
    group_v2(root, 64 * GIB)
    assert "control group" not in check_memory(root, own).detail


def test_a_machine_without_room_is_told_from_a_group_without(tmp_path: Path, memory: SimpleNamespace) -> None:
    memory.available = 2 * GIB
    root, own = groups(tmp_path, "0::/")
    group_v2(root, GIB)
    assert check_memory(root, own).fix == "localllm list --all"


def test_a_limited_address_space_is_a_finding() -> None:
    assert check_address_space((None, None)).fix == ""
    assert check_address_space((8 * GIB, None)).fix == "ulimit -v unlimited"
    assert check_address_space((8 * GIB, 8 * GIB)).fix == "sudo prlimit --pid $$ --as=unlimited"


def test_the_address_space_of_this_process_is_looked_up() -> None:
    resource = pytest.importorskip("resource")
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    assert (check_address_space().status == "ok") is (soft == resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never\n", "ok"), ("[always] madvise never", "ok"), ("always madvise [never]\n", "warn")],
)
def test_huge_pages_that_are_switched_off_are_a_finding(tmp_path: Path, text: str, status: str) -> None:
    (tmp_path / "enabled").write_text(text)
    fix = f"echo madvise | sudo tee {tmp_path / 'enabled'}" if status == "warn" else ""
    finding = check_huge_pages(tmp_path / "enabled")
    assert (finding.status, finding.fix) == (status, fix)
    assert check_huge_pages(tmp_path / "none").status == "ok"  # a system without them


# The disk


@pytest.mark.parametrize(("gbs", "status"), [(0.15, "warn"), (0.55, "warn"), (1.1, "ok"), (7.0, "ok")])
def test_a_disk_too_slow_to_stream_from_is_a_finding(gbs: float, status: str) -> None:
    finding = check_disk_speed(lambda _folder: (gbs, "O_DIRECT"))
    assert finding.status == status and f"{gbs:.2f} GB/s (O_DIRECT)" in finding.detail
    assert finding.fix == ("export LOCALLLM_CACHE=/a/folder/on/a/faster/disk" if status == "warn" else "")


def test_a_disk_without_room_is_not_measured() -> None:
    assert check_disk_speed(lambda _folder: None).status == "ok"


def test_the_disk_is_measured_where_weights_lie_and_nothing_stays(home: Path) -> None:
    measured = checks_machine.disk_speed(home / "home" / "cache" / "packed")
    assert measured is not None and measured[0] > 0
    assert not list(home.iterdir())


# The rest


def test_a_package_that_is_not_there_is_a_finding() -> None:
    assert check_package("no-such-package-of-anyones", "nothing").fix == "pip install no-such-package-of-anyones"
    assert check_package("llvmlite", "CPU kernels").status == "ok"


def test_a_stored_cap_beyond_the_machine_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RAM", "900000GiB")
    finding = check_settings()
    assert finding.detail.split(":")[0] == "LOCALLLM_RAM=900000.00GiB is more than this machine has"
    assert finding.status == "fail" and finding.fix.startswith("export LOCALLLM_RAM=")


def test_a_switch_that_forbids_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("LOCALLLM_OFFLINE", raising=False)
    assert check_network().status == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_network().fix == "unset HF_HUB_OFFLINE"


# What plans are predicted from


@pytest.fixture
def own_rates(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CACHE", str(home / "cache"))


def rates_of(*flags: str) -> dict[str, str]:
    return next(row for row in run_cli("doctor", "--json", *flags).json["checks"] if row["name"] == "rates")


@pytest.mark.usefixtures("own_rates")
def test_rates_that_cannot_be_are_measured_anew_by_the_command_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([], refuses="NVML Shared Library Not Found").install(monkeypatch)
    assert rates_of()["detail"].startswith("nothing is measured yet")
    monkeypatch.setattr(measurement, "_dram_gbs", lambda: 40.0)
    monkeypatch.setattr(measurement, "_disk_gbs", lambda _folder: 1.5)
    monkeypatch.setattr(measurement, "format_rates", lambda *_: FormatRates(30.0, 900.0))
    busy = profile.Profile(profile.machine_key(), 40.0, 90.0, {"int8": FormatRates(30.0, 900.0)})
    profile.keep(busy.scored("int8", Term("cpu", "step", "disk"), 3.0))
    doubted = rates_of()
    assert doubted["status"] == "warn" and doubted["detail"].endswith("that of disk")
    assert doubted["fix"] == "localllm doctor --measure"
    again = rates_of("--measure")
    assert (again["status"], again["fix"]) == ("ok", "")
    figures, _, date = again["detail"].partition("; measured ")
    assert figures == "memory 40 GB/s, disk 1.5 GB/s, int4-g64 30 GB/s"
    assert date == datetime.fromtimestamp(profile.kept_profile().taken["disk"].at_s).strftime("%Y-%m-%d %H:%M")
    assert rates_of() == again and profile.kept_profile().scores == {}


@pytest.mark.usefixtures("own_rates")
def test_rates_measured_beside_other_work_are_doubted() -> None:
    taken = {"memory": profile.Taken(1.8e9), "disk": profile.Taken(1.8e9, others=9.0)}
    profile.keep(profile.Profile(profile.machine_key(), 40.0, 1.5, taken=taken))
    doubted = rates_of()
    assert (doubted["status"], doubted["fix"]) == ("warn", "localllm doctor --measure")
    assert doubted["detail"].endswith(", while the machine was busy: disk")
