"""What control groups leave of the memory: both versions, nested groups, and files that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.offload.planner.machine_memory import cgroup_free_bytes, cgroup_limit_bytes, memory_limits

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def group_v2(folder: Path, limit: int | str, used: int = 0, cache: int = 0, high: int | str = "max") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\nfile {2 * cache}\ninactive_file {cache}\nactive_file 0\n")


def group_v1(folder: Path, limit: int, used: int = 0, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file 0\ntotal_active_file {cache}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


@pytest.fixture
def self_cgroup(tmp_path: Path) -> Path:
    return tmp_path / "self_cgroup"


def test_the_limit_of_a_nested_group_is_found(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/user.slice/run-1.scope\n")
    group_v2(root / "user.slice", "max")
    group_v2(root / "user.slice" / "run-1.scope", 4 * GIB, used=3 * GIB, cache=GIB)
    assert cgroup_limit_bytes(root, self_cgroup) == 4 * GIB
    assert cgroup_free_bytes(root, self_cgroup) == 2 * GIB


def test_a_group_above_may_leave_less_than_the_own_limit(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/outer/inner\n")
    group_v2(root / "outer", 8 * GIB, used=7 * GIB)
    group_v2(root / "outer" / "inner", 4 * GIB, used=GIB)
    assert cgroup_limit_bytes(root, self_cgroup) == 4 * GIB
    assert cgroup_free_bytes(root, self_cgroup) == 1 * GIB


def test_a_group_above_may_have_the_smaller_limit(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/outer/inner\n")
    group_v2(root / "outer", 2 * GIB)
    group_v2(root / "outer" / "inner", 4 * GIB)
    assert cgroup_limit_bytes(root, self_cgroup) == 2 * GIB


def test_a_sibling_groups_limit_is_none_of_ours(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/ours\n")
    group_v2(root / "ours", "max")
    group_v2(root / "theirs", GIB)
    assert cgroup_limit_bytes(root, self_cgroup) is None


def test_where_the_kernel_slows_a_group_down_is_a_limit_too(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/slow\n")
    group_v2(root / "slow", 4 * GIB, high=3 * GIB)
    assert memory_limits(root, self_cgroup)[0].file == root / "slow" / "memory.high"
    assert cgroup_limit_bytes(root, self_cgroup) == 3 * GIB


def test_version_1_has_its_own_hierarchy_and_its_own_word_for_no_limit(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("5:cpu,cpuacct:/elsewhere\n4:memory:/a/b\n0::/\n")
    group_v1(root / "memory", NO_LIMIT_V1)
    group_v1(root / "memory" / "elsewhere", GIB)
    group_v1(root / "memory" / "a", 6 * GIB, used=4 * GIB, cache=GIB)
    group_v1(root / "memory" / "a" / "b", NO_LIMIT_V1)
    assert cgroup_limit_bytes(root, self_cgroup) == 6 * GIB
    assert cgroup_free_bytes(root, self_cgroup) == 3 * GIB


@pytest.mark.parametrize("line", ["4:memory:/docker/0a1b", "4:memory:/../../docker/0a1b"])
def test_a_container_that_sees_only_its_own_group_is_under_its_limit(root: Path, self_cgroup: Path, line: str) -> None:
    self_cgroup.write_text(f"{line}\n")
    group_v1(root / "memory", 2 * GIB, used=GIB)
    assert cgroup_limit_bytes(root, self_cgroup) == 2 * GIB
    assert cgroup_free_bytes(root, self_cgroup) == 1 * GIB


def test_no_path_leads_out_of_the_hierarchy(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/../outside\n")
    group_v2(root.parent / "outside", GIB)
    group_v2(root, "max")
    assert cgroup_limit_bytes(root, self_cgroup) is None


@pytest.mark.parametrize("text", [None, "", "no colons", "0::", "\xff"])
def test_without_a_list_of_groups_the_root_is_asked(root: Path, self_cgroup: Path, text: str | None) -> None:
    if text is not None:
        self_cgroup.write_bytes(text.encode("latin-1"))
    group_v2(root, 3 * GIB)
    assert cgroup_limit_bytes(root, self_cgroup) == 3 * GIB


def test_a_machine_without_control_groups_has_no_limit(root: Path, self_cgroup: Path) -> None:
    assert cgroup_limit_bytes(root, self_cgroup) is None
    assert cgroup_free_bytes(root, self_cgroup) is None


@pytest.mark.parametrize("broken", ["memory.stat", "memory.current"])
def test_a_file_that_cannot_be_read_makes_no_memory(root: Path, self_cgroup: Path, broken: str) -> None:
    self_cgroup.write_text("0::/\n")
    group_v2(root, 4 * GIB, used=3 * GIB, cache=GIB)
    (root / broken).write_text("gibberish")
    expected = {"memory.stat": 1 * GIB, "memory.current": 4 * GIB}[broken]
    assert cgroup_free_bytes(root, self_cgroup) == expected


def test_a_group_over_its_limit_leaves_nothing(root: Path, self_cgroup: Path) -> None:
    self_cgroup.write_text("0::/\n")
    group_v2(root, GIB, used=2 * GIB)
    assert cgroup_free_bytes(root, self_cgroup) == 0
