"""`localllm doctor`: what of this machine is ready, and one command for what is not.

Which checks there are, how their findings are printed, and the checks of the installation; what the others look at is
known to `checks_*`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

import typer

from localllm.cli import checks_machine as machine
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
from localllm.cli.context import cli_context
from localllm.cli.findings import Finding, examined, fail, ok, warn
from localllm.cli.options import option, takes
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.config import load_settings, user_directories
from localllm.errors import LocalLLMError
from localllm.present import is_file
from localllm.registry import load_registry
from localllm.runtime.error_origins import with_origins

Check = tuple[str, Callable[[], Finding]]


@takes(
    option("--measure", "Measure this machine's speeds again, from which plans are predicted. Takes a few seconds."),
    option("--json", "One JSON object: schema_version, checks, ok.", name="as_json"),
)
def doctor_command(context: typer.Context, measure: bool, as_json: bool) -> None:
    """Check this machine and say how to fix what is wrong.

    Checks Python and torch, the GPU and its driver, Triton (which compiles for it), memory and its limits, the disk and
    its speed, settings, network and terminal.
    """
    output = cli_context(context).output
    rows = []
    for name, check in all_checks(output, measure):
        finding = examined(check)
        rows.append({"name": name, **asdict(finding)})
        if as_json:
            continue
        output.line(f"{finding.status:<4}  {name:<12}  {finding.detail}")
        if finding.fix:
            output.line(f"      {'':<12}  fix: {finding.fix}")
    healthy = all(row["status"] != "fail" for row in rows)
    if as_json:
        output.json({"schema_version": SCHEMA_VERSION, "ok": healthy, "checks": rows}, indent=2)
    if not healthy:
        raise typer.Exit(1)


def all_checks(output: Output, measure: bool = False) -> Iterator[Check]:
    """The checks in the order of the report; made one by one, for torch takes a second to say what it is.

    measure: what plans are predicted from is measured anew.
    """
    yield "python", lambda: ok(f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    yield from _compute_checks(output)
    yield "bitsandbytes", lambda: check_package("bitsandbytes", "NF4 weights")
    yield "llvmlite", lambda: check_package("llvmlite", "CPU kernels")
    yield "cpu", machine.check_cpu
    yield "memory", machine.check_memory
    yield "addresses", machine.check_address_space
    yield "huge pages", machine.check_huge_pages
    yield "cache", machine.check_cache
    yield "disk", machine.check_disk
    yield "packed", machine.check_packed
    yield "disk speed", machine.check_disk_speed
    yield "rates", lambda: machine.check_rates(output.note if measure else None)
    yield "settings", check_settings
    yield "token", check_token
    yield "network", check_network
    yield "terminal", lambda: check_terminal(output)


def _compute_checks(output: Output) -> Iterator[Check]:
    """torch, and what there is to be said of each card: nothing where there is none."""
    from localllm.offload.planner.nvml import gpus

    cards = gpus()  # before torch takes memory of its own
    build = torch_build()
    trial_of = cache(try_link if build.devices else lambda _card: LinkTrial())
    yield "torch", lambda: check_torch(build)
    yield "gpu", lambda: check_gpu(cards, build.devices, rocm=build.rocm)
    if cards:
        yield "driver", lambda: check_driver(cards, build)
    yield "triton", lambda: check_triton(cards)
    for card in cards:
        number = f" {card.index}" if len(cards) > 1 else ""
        yield f"capability{number}", partial(check_capability, card, build)
        yield f"vram{number}", partial(check_vram, card)
        yield f"link{number}", partial(lambda card: check_link(card, trial_of(card)), card)
    if cards:
        yield "pinned", lambda: check_pinned(trial_of(cards[0]))
    if build.devices:
        yield "kernels", lambda: _check_kernels(output)


def _check_kernels(output: Output) -> Finding:
    with output.progress("kernels") as line:
        return check_kernels(lambda text: line.show(f"kernels: {text}"))


# The installation


def check_package(name: str, purpose: str) -> Finding:
    try:
        return ok(f"{version(name)} ({purpose})")
    except PackageNotFoundError:
        return warn(f"not installed ({purpose})", f"pip install {name}")


def check_settings() -> Finding:
    from localllm.engine.placement import require_cap

    file, resolved = user_directories().config / "config.toml", None
    try:
        resolved = load_settings()
        load_registry()
        require_cap(resolved.settings.ram)
    except LocalLLMError as error:
        if resolved is not None:
            with_origins(error, resolved)
        return fail(f"{error.what}: {error.why}", error.fix)
    return ok(f"{file}{'' if is_file(file) else ' (none: defaults)'}")


def check_token() -> Finding:
    """Tell whether there is a token, and never print it."""
    from localllm.hub.settings import found_token

    return ok("set" if found_token() else "none: open models only")


def check_network() -> Finding:
    switches = [name for name in ("LOCALLLM_OFFLINE", "HF_HUB_OFFLINE") if os.environ.get(name)]
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "HF_ENDPOINT") if os.environ.get(name)]
    if switches:
        return warn(f"{', '.join(switches)} is set: nothing can be pulled", f"unset {' '.join(switches)}")
    return ok(f"used by `pull` only{', through ' + ', '.join(proxies) if proxies else ''}")


def check_terminal(output: Output) -> Finding:
    streams = [("stdout", output.stdout_is_terminal), ("stderr", output.stderr_is_terminal)]
    on_terminal = [name for name, is_one in streams if is_one]
    where = f"{' and '.join(on_terminal)} on a terminal" if on_terminal else "no terminal"
    colours = "colours" if output.coloured else "no colours"
    return ok(f"{where}, TERM={os.environ.get('TERM', 'unset')}, {colours}")
