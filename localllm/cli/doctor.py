"""`localllm doctor`: what of this machine is ready, and one command for what is not.

Which checks there are, and how their findings are printed; what they look at is known to `checks_*`. They are imported
when the command runs: its flags are known to every start of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from localllm.cli.check_result import Check, Finding
from localllm.cli.context import cli_context
from localllm.cli.output import SCHEMA_VERSION, Output


def doctor_command(
    context: typer.Context,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure anew what plans are predicted from; takes some seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: schema_version, checks, ok.")] = False,
) -> None:
    """Check this machine, and say what helps.

    Python and torch, the GPU and its driver, Triton (which compiles for it), memory and its limits, the disk and its
    speed, settings, network and terminal.
    """
    output = cli_context(context).output
    rows = []
    for check in all_checks(output, measure):
        finding = check.finding()
        rows.append({"name": check.name, **asdict(finding)})
        if not as_json:
            _print(output, check.name, finding)
    healthy = all(row["status"] != "fail" for row in rows)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "ok": healthy, "checks": rows}, indent=2)
    if not healthy:
        raise typer.Exit(1)


def all_checks(output: Output, measure: bool = False) -> Iterator[Check]:
    """In the order of the report; made one by one, for torch takes a second to say what it is. measure: anew."""
    from localllm.cli import checks_setup as setup

    yield Check("python", setup.check_python)
    yield from _compute_checks()
    yield Check("bitsandbytes", lambda: setup.check_package("bitsandbytes", "NF4 weights"))
    yield Check("llvmlite", lambda: setup.check_package("llvmlite", "CPU kernels"))
    yield from _machine_checks(output.note if measure else None)
    yield Check("settings", setup.check_settings)
    yield Check("token", setup.check_token)
    yield Check("network", setup.check_network)
    yield Check("terminal", lambda: setup.check_terminal(output))


def _compute_checks() -> Iterator[Check]:
    """torch, and what there is to be said of each card: nothing where there is none."""
    from functools import cache, partial

    from localllm.cli.checks_gpu import (
        LinkTrial,
        check_gpu,
        check_kernels,
        check_link,
        check_pinned,
        check_vram,
        try_link,
    )
    from localllm.cli.checks_torch import check_capability, check_driver, check_torch, check_triton, torch_build
    from localllm.offload.planner.nvml import gpus

    cards = gpus()  # before torch takes memory of its own
    build = torch_build()
    trial_of = cache(try_link if build.devices else lambda _card: LinkTrial())
    yield Check("torch", lambda: check_torch(build))
    yield Check("gpu", lambda: check_gpu(cards, build.devices))
    if cards:
        yield Check("driver", lambda: check_driver(cards, build))
    yield Check("triton", lambda: check_triton(cards))
    for card in cards:
        number = f" {card.index}" if len(cards) > 1 else ""
        yield Check(f"capability{number}", partial(check_capability, card, build))
        yield Check(f"vram{number}", partial(check_vram, card))
        yield Check(f"link{number}", partial(lambda card: check_link(card, trial_of(card)), card))
    if cards:
        yield Check("pinned", lambda: check_pinned(trial_of(cards[0])))
    if build.devices:
        yield Check("kernels", check_kernels)


def _machine_checks(measuring: Callable[[str], None] | None) -> Iterator[Check]:
    """measuring: hears of it where what plans are predicted from is measured anew."""
    from localllm.cli import checks_machine as machine

    yield Check("cpu", machine.check_cpu)
    yield Check("memory", machine.check_memory)
    yield Check("addresses", machine.check_address_space)
    yield Check("huge pages", machine.check_huge_pages)
    yield Check("cache", machine.check_cache)
    yield Check("disk", machine.check_disk)
    yield Check("packed", machine.check_packed)
    yield Check("disk speed", machine.check_disk_speed)
    yield Check("rates", lambda: machine.check_rates(measuring))


def _print(output: Output, name: str, finding: Finding) -> None:
    output.line(f"{finding.status:<4}  {name:<12}  {finding.detail}")
    if finding.fix:
        output.line(f"      {'':<12}  fix: {finding.fix}")
