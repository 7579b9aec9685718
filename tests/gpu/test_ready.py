"""Whether a card computes by our kernels: what is asked of it, what its check says, and what is kept of that."""

from __future__ import annotations

import io
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompilationError
from triton.runtime.errors import OutOfResources

from localllm import repairs
from localllm.cli import checks_gpu
from localllm.cli.checks_gpu import check_kernels
from localllm.engine.kernel_check import note_device, scope_of
from localllm.kernels.gpu import check, check_attention, check_case, check_cases, gemm, ready
from localllm.kernels.gpu.activations import Codes
from localllm.kernels.gpu.attention import PREFILL_ROWS
from localllm.kernels.gpu.launch import KernelLaunch
from localllm.kernels.gpu.product_end import Gate
from localllm.kernels.gpu.ready import ALL, BRIEF, CheckScope, Ways
from localllm.kernels.packed_matrix import PackedMatrix
from localllm.kernels.sizes import Glu, Weights
from localllm.layers.config import QueryGrowth
from localllm.models.shapes import find_shape
from localllm.quant.recipe import RECIPES
from tests.thinning import every_other

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
INT4 = Weights(4, 64)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """capability: of a card that is not here; says: its check, each time that it runs, after `steps`; hangs: it says
    nothing more; scopes: in which it was run."""
    told = SimpleNamespace(capability=(8, 6), says="", steps=(), hangs=False, scopes=[])

    def run_within(command: list[str], *_: Any, hear: Any, **limits: float) -> SimpleNamespace:
        assert limits["cpu_s"] == math.inf  # what compiles on all cores uses any other up in no time
        told.scopes.append(CheckScope(tuple(command[4:])))
        for step in told.steps:
            hear(f"{ready.PROGRESS} {step}")
        if told.hangs:
            raise TimeoutError(f"{limits['wait_s']:.0f} seconds")
        return SimpleNamespace(
            returncode=int(bool(told.says)), stdout=f"so far: 1 of 2 compared\n{told.says}", stderr=""
        )

    properties = SimpleNamespace(name="a card", major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: told.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ready, "run_within", run_within)
    monkeypatch.setattr(ready, "_failures", {})
    monkeypatch.setattr(checks_gpu, "no_gpu", lambda: None)
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    ready.why_not.cache_clear()
    yield told
    ready.why_not.cache_clear()


def in_another_process() -> None:
    ready._failures.clear()
    ready.why_not.cache_clear()


def anew() -> str:
    """As another process would ask."""
    in_another_process()
    return ready.why_not(CARD)


def test_a_check_is_made_once(card):
    assert anew() == "" and anew() == "" and card.scopes == [BRIEF]
    ready.check_once(CARD, pytest.fail)
    assert len(card.scopes) == 1


def test_a_plan_before_any_model_checks_in_brief(card):
    ready.check_once(CARD, lambda _text: None)
    assert anew() == "" and card.scopes == [BRIEF]


def test_a_wrong_kernel_is_remembered_and_a_want_of_memory_is_not(card):
    card.says = "torch.OutOfMemoryError: CUDA out of memory"
    assert "out of memory" in anew() and "out of memory" in anew() and len(card.scopes) == 2
    assert "out of memory" in ready.why_not(CARD) and len(card.scopes) == 2  # in one process it is asked once
    card.says = "WRONG: gemv of int8, error 1.0e+00, at most 2e-06"
    assert anew().startswith("WRONG: gemv") and anew().startswith("WRONG: gemv") and len(card.scopes) == 3


@pytest.mark.parametrize(
    "says",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "not compared: _gemm: PTXASError: `ptxas` failed with error code 1",
    ],
)
def test_a_check_that_ends_in_another_way_is_tried_again_an_hour_later(says, card, monkeypatch):
    card.says = says
    assert anew() == anew() == card.says and len(card.scopes) == 1
    card.says, now = "", time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert anew() == "" and anew() == "" and len(card.scopes) == 2


def test_a_compilation_that_is_given_up_is_tried_at_the_next_start(card):
    """What was compiled is kept by Triton, so that this one gets further. A kernel that hangs the card is not."""
    card.hangs, card.steps = True, ("41 of 81 compiled",)
    assert "compiled for too long" in anew() and "300 seconds" in anew() and len(card.scopes) == 2
    assert "compiled for too long" in ready.why_not(CARD) and len(card.scopes) == 2
    card.steps = ("81 of 81 compiled", "0 of 161 compared", "17 of 161 compared")
    assert "17 of 161 compared, then nothing" in anew() and "17 of 161" in anew() and len(card.scopes) == 3


def test_whoever_loads_a_model_hears_how_far_it_is(card):
    card.steps = ("1 of 2 compiled", "2 of 2 compiled", "5 of 5 compared")
    heard: list[str] = []
    note_device(CARD, [BRIEF], heard.append, pytest.fail)
    begin = "checking the kernels on this graphics card, once"
    assert heard == [begin, *(f"{begin}: {step}" for step in card.steps)]


def test_whoever_hears_of_it_may_end_it_and_nothing_is_kept_then(card):
    def stop(text: str) -> None:
        raise InterruptedError(text)

    card.steps = ("1 of 2 compiled",)
    with pytest.raises(InterruptedError):
        ready.check_once(CARD, stop)
    assert anew() == "" and len(card.scopes) == 1


def uses(**changes: Any) -> CheckScope:
    config = find_shape("gemma-2-2b").config
    layers = tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in config.layers)
    config = replace(config, layers=layers)
    return scope_of(config, RECIPES["int4-g32"], "k8v4", torch.bfloat16)


def test_a_model_is_checked_in_the_ways_in_which_it_is_computed(card):
    """Once in each, and one that is wrong is enough: `doctor` has them tried anew."""
    sizes = check.sizes_of(json.loads(uses().arguments[1]))
    assert sizes.groups == (None, 32)
    assert [(heads.keys, heads.values, heads.window, heads.softcap) for heads in sizes.attention] == [
        ("int8", "int4", None, 5.0), ("int8", "int4", 300, 5.0)
    ]  # fmt: skip
    for scope in (uses(), uses(num_heads=16), uses()):
        in_another_process()
        ready.check_once(CARD, lambda _text: None, scope)
    assert card.scopes == [uses(), uses(num_heads=16)] and anew() == ""
    card.says = "WRONG: attention"
    ready.check_once(CARD, lambda _text: None, uses(num_heads=2))
    assert anew() == "WRONG: attention" and len(card.scopes) == 3
    card.says = ""
    ready.check(CARD)
    assert anew() == "" and card.scopes[3:] == [ALL]
    for scope in (uses(), uses(num_heads=2)):
        in_another_process()
        ready.check_once(CARD, lambda _text: None, scope)
    assert card.scopes[4:] == [uses(num_heads=2)]


def test_gpt_oss_is_checked_with_sinks_biases_of_experts_and_clamped_gates():
    config = find_shape("gpt-oss-20b").config
    sizes = check.sizes_of(json.loads(scope_of(config, RECIPES["int4-g32"], "int8", torch.bfloat16).arguments[1]))
    assert [(heads.window, heads.has_sinks, heads.has_growth) for heads in sizes.attention] == [
        (None, True, False), (300, True, False)
    ]  # fmt: skip
    assert sizes.glus == (Glu("quick_gelu", limit=7.0, up_offset=1.0),) and sizes.expert_biases == (True,)
    grows = uses(growth=QueryGrowth(0.1, 1024))
    assert all(heads.has_growth for heads in check.sizes_of(json.loads(grows.arguments[1])).attention)


def test_what_operators_compute_of_gemma_4_is_not_checked():
    """Its heads have two shapes, and its experts norms of their own."""
    config = find_shape("gemma-4-26b-a4b").config
    ways = json.loads(scope_of(config, RECIPES["int4-g32"], "int8", torch.bfloat16).arguments[1])
    assert check.sizes_of(ways).attention == () and "routers" not in ways


def test_a_model_whose_feed_forwards_no_kernel_knows_is_checked_without_them():
    config = find_shape("gemma-2-2b").config
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, activation="xielu")) for layer in config.layers
    )
    scope = scope_of(replace(config, layers=layers), RECIPES["int8"], "int8", torch.bfloat16)
    sizes = check.sizes_of(json.loads(scope.arguments[1]))
    cases = list(check_cases._products(CPU, INT4, replace(TINY, glus=sizes.glus, row_counts=(7,))))
    assert cases and all(case.is_right and not case.name.startswith("a gate") for case in cases)


def test_what_failed_in_a_process_is_not_tried_again_in_it(card, monkeypatch):
    """Nor kept for others: it may have been of this one."""
    monkeypatch.setattr(ready, "_failures", {})
    assert anew() == ""
    ready.give_up(CARD, "RuntimeError: out of resource")
    assert ready.why_not(CARD) == "RuntimeError: out of resource"
    monkeypatch.setattr(ready, "_failures", {})
    assert anew() == "" and len(card.scopes) == 1


def test_a_fault_of_the_card_is_kept_until_something_is_another_version(card, monkeypatch):
    """Whatever a check says: it was a model in which they ended."""
    assert anew() == ""
    ready.keep_fault(CARD, "with a model they ended in a fault of the GPU")
    assert anew() == "with a model they ended in a fault of the GPU" and ready.check(CARD) == ""
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: now + 3e8)
        assert anew() == "with a model they ended in a fault of the GPU"
    in_another_process()
    ready.check_once(CARD, pytest.fail)
    finding = check_kernels()
    assert finding.status == "warn" and "with a model" in finding.detail
    assert finding.fix == f"rm {ready.kept_file()}"
    ready.kept_file().unlink()
    assert anew() == ""
    ready.keep_fault(CARD, "with a model they ended in a fault of the GPU")
    monkeypatch.setattr(ready, "_triton", lambda: "another")
    assert anew() == ""


def test_other_kernels_are_checked_anew(card, monkeypatch):
    anew()
    monkeypatch.setattr(ready, "_source", lambda: "another")
    assert anew() == "" and len(card.scopes) == 2


def test_another_card_driver_or_torch_is_checked_anew(card, monkeypatch):
    properties = SimpleNamespace(name="another card", major=8, minor=6)
    others: list[tuple[Any, str, Any]] = [
        (torch._C, "_cuda_getDriverVersion", lambda: 13010),
        (torch, "__version__", "2.99"),
        (torch.cuda, "get_device_properties", lambda _device: properties),
    ]
    assert anew() == "" and len(card.scopes) == 1
    for number, (place, name, value) in enumerate(others, 2):
        monkeypatch.setattr(place, name, value, raising=False)
        assert anew() == anew() == "" and len(card.scopes) == number


def test_what_was_not_compared_is_the_reason_unless_something_was_wrong(card):
    """Whatever was said behind it."""
    card.says = "not compared: _gemm: PTXASError\nok: gemv, error 0\nsomething else"
    assert anew() == "not compared: _gemm: PTXASError"
    ready.kept_file().unlink()
    card.says = "WRONG: gemv\nnot compared: _gemm: PTXASError\nsomething else"
    assert anew() == "WRONG: gemv"


@pytest.mark.parametrize("damaged", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_file_is_as_none(card, tmp_path, damaged):
    (tmp_path / "gpu_kernels.json").write_text(damaged, encoding="utf-8")
    assert anew() == "" and anew() == "" and len(card.scopes) == 1
    kept = list(json.loads((tmp_path / "gpu_kernels.json").read_text(encoding="utf-8")).values())
    assert kept[-1]["found"] == ""


def test_cards_that_are_too_old_and_machines_without_triton_are_told(card, monkeypatch):
    card.capability = (7, 0)
    assert "of compute capability 7.0, they need" in anew()
    card.capability = (8, 6)
    monkeypatch.setattr(ready, "_triton", lambda: "")
    assert anew() == "triton is not installed" and len(card.scopes) == 0
    assert "NVIDIA" in ready.missing(torch.device("cpu"))


@pytest.mark.parametrize(("lacking", "command"), [("a C compiler", "install -y gcc"), ("Python's headers", "-dev")])
def test_without_a_compiler_the_kernels_are_used_and_if_they_fail_it_is_named(lacking, command, card, monkeypatch):
    """Our own launcher is checked as they are."""
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *_: "/usr/bin/apt-get" if name == "apt-get" else which(name))
    monkeypatch.delenv("CC", raising=False)
    if lacking == "a C compiler":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(ready.sysconfig, "get_paths", lambda _scheme: {"include": "nowhere"})
    assert anew() == "" and len(card.scopes) == 1
    card.says = "WRONG: gemv of int8, error nan, at most 2e-06"
    ready.check(CARD)
    said: list[str] = []
    note_device(CARD, [BRIEF], pytest.fail, said.append)
    assert len(said) == 1 and f"own launcher needs {lacking}" in said[0] and command in said[0]


def test_a_compiler_is_named_neither_beside_another_reason_nor_where_one_is_set(card, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert ready.lacks_for_triton() == "a C compiler"
    card.capability, said = (6, 1), list[str]()
    note_device(CARD, [BRIEF], pytest.fail, said.append)
    assert len(said) == 1 and "6.1" in said[0] and "launcher" not in said[0]
    monkeypatch.setenv("CC", "/a/compiler")
    assert ready.lacks_for_triton() != "a C compiler"


def test_one_line_says_that_operators_compute(card):
    said: list[str] = []
    for device in (CARD, CARD, CPU):
        note_device(device, [BRIEF], lambda _text: None, said.append)
    assert said == [] and len(card.scopes) == 1
    card.capability = (6, 1)
    ready.why_not.cache_clear()
    note_device(CARD, [BRIEF], lambda _text: None, said.append)
    assert len(said) == 1 and said[0].startswith("torch's operators compute") and "6.1" in said[0]


def test_the_doctor_checks_anew(card):
    assert check_kernels().status == check_kernels().status == "ok" and len(card.scopes) == 2
    card.says = "WRONG: something"
    assert check_kernels().status == "warn" and "WRONG: something" in check_kernels().detail
    card.capability = (6, 1)
    assert check_kernels().status == "ok" and "not used" in check_kernels().detail


def test_the_doctor_tries_all_ways_and_tells_how_far_it_is(card):
    card.steps = ("1 of 2 compiled",)
    heard: list[str] = []
    assert check_kernels(heard.append).status == "ok" and card.scopes == [ALL] and heard == ["1 of 2 compiled"]


def test_the_doctor_names_what_mends_a_triton_that_compiles_nothing(card):
    card.says = "not compared: _gemm: PTXASError: `ptxas` failed with error code 1"
    finding = check_kernels()
    assert finding.status == "warn" and "_gemm" in finding.detail and finding.fix == repairs.TRITON


@pytest.mark.slow
@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(
    "sizes",
    [
        check_cases.SMALL,
        replace(check_cases.SMALL, attention=check_attention.ATTENTION, groups=(32, 64, 128)),
        replace(check_cases.SMALL, attention=(), groups=check_cases.CODED),
    ],
    ids=["one", "all", "other programs' files"],
)
def test_every_kernel_is_right_in_the_interpreter(sizes):
    """The check itself; and it finds what is wrong."""
    torch.manual_seed(0)
    found = list(check_cases.cases(torch.device("cpu"), sizes))
    assert len(found) > 40 and [case.line() for case in found if not case.is_right] == []


ONE_HEAD = check_attention.Heads("int8", "int4", 64, 1, 1)  # the interpreter takes as long for each


@pytest.mark.parametrize("broken", ["gemv", "rows", "drawn"])
def test_the_check_finds_a_kernel_that_does_nothing(broken, monkeypatch):
    nothing = SimpleNamespace(run=lambda: None)
    some: Any
    if broken == "gemv":
        monkeypatch.setattr(check_cases.gemv, "gemv", lambda *_, **__: nothing)
        some = check_cases._products(CPU, INT4, check_cases.SMALL)
    elif broken == "rows":
        monkeypatch.setattr(check_cases.activations, "to_floats", lambda *_, **__: nothing)
        some = check_cases._between(CPU, check_cases.SMALL)
    else:
        monkeypatch.setattr(check_cases.sample, "sample", lambda *_: [])
        some = check_cases._drawn(CPU)
    assert any(not case.is_right for case in some)


TINY = replace(check_cases.SMALL, row_counts=(1,), attention=())


def test_the_check_finds_products_that_are_a_little_wrong(monkeypatch):
    """By a hundredth of a percent, as floats and as codes."""
    right = gemm.gemm

    def wrong(x: Codes, matrix: PackedMatrix, y: Tensor | Gate, *rest: Any, **options: Any) -> list[Any]:
        result = y.codes.scale if isinstance(y, Gate) else y
        return [*right(x, matrix, y, *rest, **options), SimpleNamespace(run=lambda: result.mul_(1.0001))]

    monkeypatch.setattr(gemm, "gemm", wrong)
    cases = list(check_cases._products(CPU, INT4, TINY))
    assert {case.name for case in cases if not case.is_right} >= {
        "gemm in 1 of int4-g64-bias, 1 rows", "gemm in 4 of int4-g64-bias, 1 rows",
        "a gate of int4-g64-bias, 7 rows, 0 programs: bits",
    }  # fmt: skip


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize("factor", every_other([1.000001, 1.0]))
def test_the_check_finds_a_prompt_whose_bits_are_not_those_of_steps(factor, monkeypatch):
    attend = check_attention.attend

    def scaled(q: Tensor, out: Tensor, *rest: Any, **options: Any) -> list[Any]:
        is_prompt = options["rows"] == PREFILL_ROWS
        end = SimpleNamespace(run=lambda: out.mul_(factor if is_prompt else 1.0))
        return [*attend(q, out, *rest, **options), end]

    monkeypatch.setattr(check_attention, "attend", scaled)
    *others, bits = check_attention.attention_cases(CPU, check_attention.Heads("int8", "int4", 64, 2, 1))
    assert all(case.is_right for case in others)
    assert bits.name.endswith("bits of steps") and bits.is_right == (factor == 1)


@pytest.mark.parametrize("wrong", [{"scale": 0.13}, {"window": 10}, {"sinks": None}, {}])
def test_the_check_finds_attention_that_is_a_little_wrong(wrong, monkeypatch):
    """A scale of 0.13 instead of 0.125, a window where there is none, and no sinks where there are some."""
    torch.manual_seed(0)
    attend, heads = check_attention.attend, replace(ONE_HEAD, has_sinks=True, has_growth=True)
    monkeypatch.setattr(check_attention, "attend", lambda *rest, **options: attend(*rest, **{**options, **wrong}))
    case = next(check_attention.attention_cases(CPU, heads))
    assert case.is_right == (not wrong)


def test_the_check_finds_codes_of_attention_that_are_a_little_wrong(monkeypatch):
    """They are what the next matrix of a usual model is given."""
    attend = check_attention.attend

    def wrong(q: Tensor, out: Tensor | Codes, *rest: Any, **options: Any) -> list[Any]:
        ends = [SimpleNamespace(run=lambda: out.scale.mul_(1.0001))] if isinstance(out, Codes) else []
        return [*attend(q, out, *rest, **options), *ends]

    heads = ONE_HEAD
    for is_wrong in (False, True):
        if is_wrong:
            monkeypatch.setattr(check_attention, "attend", wrong)
        floats, codes = itertools.islice(check_attention.attention_cases(CPU, heads, (INT4,)), 2)
        assert floats.is_right and codes.is_right is not is_wrong and codes.name.endswith("codes for int4-g64-bias")


def test_codes_of_other_files_are_checked_as_the_model_has_them():
    ways = Ways(groups=[64, None, *map(asdict, check_cases.CODED)], attention=[], glus=[])
    assert check.sizes_of(json.loads(CheckScope.of(ways).arguments[1])).groups == (64, None, *check_cases.CODED)


def test_the_brief_check_has_what_a_usual_model_launches():
    launches, _ = check.launches_of(CPU, check.BRIEF)
    merged = {(each.constants["CODE_GROUP"], each.constants["CODE_BITS"]) for each in launches if each.name == "_merge"}
    gated = {
        (each.constants["GROUP"], each.constants["CODE_BITS"], each.constants["GLU"])
        for each in launches
        if each.name == "_gemm" and each.constants["GLU"]
    }
    assert merged == {(0, 0), (64, 4), (64, 8)} and gated == {(64, 4, Glu("silu")), (64, 8, Glu("silu"))}


def test_a_kernel_that_a_card_does_not_take_is_left_and_the_others_are_checked(card, monkeypatch):
    """Its models find that out when they are loaded."""

    def refuses(*_: Any, **__: Any) -> None:
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(check_attention, "attend", refuses)
    found = list(check_cases.cases(CPU, replace(check_cases.SMALL, groups=())))
    left = [case for case in found if case.error is None]
    assert len(left) == 1 and all(case.is_right for case in found) and len(found) > 10
    assert left[0].line().startswith("left: attention of int8/int4 pages") and "shared memory" in left[0].line()


FEW = replace(check_cases.SMALL, groups=(), attention=(ONE_HEAD,))


def end_of_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """(exit code, lines without those of how far it is) of the program, with a few cases of the interpreter."""
    monkeypatch.setattr(check, "_device", lambda _name: CPU)
    monkeypatch.setattr(check, "BRIEF", FEW)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    with pytest.raises(SystemExit) as ended:
        check.main(["cuda:0", "--brief"])
    lines = capsys.readouterr().out.splitlines()
    return bool(ended.value.code), [line for line in lines if not line.startswith(ready.PROGRESS)]


def test_all_is_compiled_before_the_first_kernel_runs_and_each_step_is_told(monkeypatch):
    """And what was said of one that does not compile is the reason why nothing of it was compared."""
    sizes, told, run = replace(check_cases.SMALL, groups=(), attention=()), list[str](), KernelLaunch._run

    def compile_all(launches: list[KernelLaunch], progress: Any) -> dict[str, str]:
        assert {launch.name for launch in launches} >= {"_embed", "_winner"}
        progress(1, 2)
        return {"_embed": "PTXASError: ptxas: not found"}

    def runs(launch: KernelLaunch) -> None:
        assert told[0] == "1 of 2 compiled"
        if launch.name == "_embed":
            raise CompilationError("", None, "another reason")
        run(launch)

    monkeypatch.setattr(check, "is_interpreted", lambda: False)
    monkeypatch.setattr(check, "compile_all", compile_all)
    monkeypatch.setattr(KernelLaunch, "_run", runs)
    outcome = check.checked(CPU, sizes, told.append)
    count = len(outcome.cases)
    assert told == ["1 of 2 compiled", *(f"{done} of {count} compared" for done in range(count + 1))]
    assert outcome.uncompared == ["not compared: _embed: PTXASError: ptxas: not found"]


def test_what_ran_before_a_case_that_was_left_counts_for_no_other(monkeypatch):
    def some(_device: torch.device, _sizes: check_cases.CheckSizes) -> Iterator[check_case.Case]:
        for name, error in (("first", None), ("second", 0.0)):
            KernelLaunch(SimpleNamespace(fn=SimpleNamespace(__name__=name)), (1,), {}).run()
            yield check_case.Case(f"a case of the {name}", error, 0)

    monkeypatch.setattr(check, "cases", some)
    monkeypatch.setattr(KernelLaunch, "_run", lambda _launch: None)
    outcome = check.checked(CPU, TINY, lambda _text: None)
    assert outcome.uncompared == ["not compared: first: a case of the first"]


def test_what_was_wrong_is_said_last():
    cases = [check_case.Case(name, error, 0.5) for name, error in (("a", 1.0), ("b", 0.0), ("c", None))]
    begins = [line.split(":")[0] for line in check.Outcome(cases, ["not compared: d"]).lines()]
    assert begins == ["ok", "left", "not compared", "WRONG"]


def test_what_takes_longest_to_compile_is_first():
    launches, _ = check.launches_of(CPU, replace(FEW, groups=(None,)))
    names = [launch.name for launch in launches]
    assert names.index("_attend") < names.index("_gemv")


def test_a_step_of_a_check_leaves_its_program_at_once(monkeypatch):
    """Whoever reads it from the pipe gives up where nothing comes."""

    class Pipe(io.StringIO):
        arrived = ""

        def flush(self) -> None:
            self.arrived = self.getvalue()

    def checked(_device: torch.device, _sizes: check_cases.CheckSizes, tell: Any) -> check.Outcome:
        tell("1 of 2 compiled")
        assert pipe.arrived == f"{ready.PROGRESS} 1 of 2 compiled\n"
        return check.Outcome([], [])

    pipe = Pipe()
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setattr(check, "_device", lambda _name: CPU)
    monkeypatch.setattr(check, "checked", checked)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    with pytest.raises(SystemExit):
        check.main(["cuda:0", "--brief"])


def test_a_card_on_which_nothing_could_be_compared_is_not_right(monkeypatch, capsys):
    """As where ptxas is broken: each case is left, and none is wrong."""

    def fails(_launch: KernelLaunch) -> None:
        raise CompilationError("", None, "ptxas: not found")

    monkeypatch.setattr(KernelLaunch, "_run", fails)
    failed, lines = end_of_the_check(monkeypatch, capsys)
    named = {line.split()[2].rstrip(":") for line in lines if line.startswith(ready.UNCOMPARED)}
    assert failed and lines[-1].startswith(ready.UNCOMPARED) and "ptxas" in lines[-1]
    assert named >= {"_to_codes", "_to_floats", "_embed", "_rope_store", "_attend", "_merge", "_winner"}


@pytest.mark.usefixtures("products_row_by_row")
def test_a_kernel_that_no_case_compared_is_named_beside_others_that_are_right(monkeypatch, capsys):
    launch = KernelLaunch._run

    def run(self: KernelLaunch) -> None:
        if self.name == "_merge":
            raise OutOfResources(200_000, 101_376, "shared memory")
        launch(self)

    assert end_of_the_check(monkeypatch, capsys)[0] is False
    monkeypatch.setattr(KernelLaunch, "_run", run)
    failed, lines = end_of_the_check(monkeypatch, capsys)
    assert failed and any(line.startswith("ok:") for line in lines)
    uncompared = [line.split(": ")[1] for line in lines if line.startswith(ready.UNCOMPARED)]
    assert sorted(uncompared) == ["_attend", "_merge", "_rope_store"]  # as what they compute is compared together
    assert "shared memory" in lines[-1]
