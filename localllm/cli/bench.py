"""`localllm bench`: how fast a model is on this machine, beside what the machine can do at most."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from localllm.chat.text import one_line
from localllm.cli import options
from localllm.cli.front import Front, front_of
from localllm.cli.output import Output, ProgressLine
from localllm.cli.packing import Packing
from localllm.cli.selection import select
from localllm.cli.settings import read_settings
from localllm.config import Settings
from localllm.errors import LocalLLMError, UsageError
from localllm.runtime.vram import vram_cap

if TYPE_CHECKING:
    import torch

    from localllm.bench.report import Report
    from localllm.bench.subject import Caps, Subject
    from localllm.bench.workload import Workload
    from localllm.hub import ModelFiles
    from localllm.models.config import ModelConfig
    from localllm.quant.recipe import Recipe

Result = TypeVar("Result")
EXAMPLES = """Examples:

\b
  localllm bench
  localllm bench mistral-7b --random-weights --weights int4
  localllm bench qwen3-8b --context 128 --context 4096 --output today.json
  localllm bench --compare yesterday.json today.json
"""


def bench_command(
    context: typer.Context,
    model: options.Model = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the model's shape: nothing need be downloaded.")
    ] = False,
    weights: options.Weights = None,
    kv: options.KV = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", metavar="N", help="Length of the prompt. Default: 512.")
    ] = None,
    gen_tokens: Annotated[
        int | None, typer.Option("--gen-tokens", metavar="N", help="Tokens to generate in a round. Default: 128.")
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Tokens that come before the generated ones; may be repeated. Default: as many as the prompt has.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help="How often all is measured. Default: 5.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            "--ram",
            metavar="SIZE",
            help="Most memory for the program and the model, 4GiB; 1.3 GiB come on top for what it is compared with.",
        ),
    ] = None,
    vram: options.Vram = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: schema_version, machine, floors, runs.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write that object to FILE.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Show two such files side by side, and measure nothing."),
    ] = None,
) -> None:
    """Measure how fast a model is on this machine.

    Each rate stands beside what bounds it, measured in the same minute: reading memory and disk, copying to and on a
    GPU, multiplying matrices. Medians of several rounds, with the slowest and the fastest.
    """
    flags = dict(locals())
    front = front_of(context)
    if compare is not None:
        _refuse_beside_compare(flags)
        _compare(front.output, *compare)
        return
    from localllm.bench.workload import Workload

    workload = Workload.asked(
        Workload.prompt_tokens if prompt_tokens is None else prompt_tokens,
        Workload.gen_tokens if gen_tokens is None else gen_tokens,
        depth or (),
        Workload.rounds if rounds is None else rounds,
    )
    if output is not None:
        _require_writable(output)
    target = _random_target(front, model, flags) if random_weights else _installed_target(front, model, flags)
    if not random_weights:  # those were trained for no context at all: speed can be measured at any depth
        workload.check(target.name, target.config)
    report = _measure(front, target, workload)
    if output is not None:
        _save(report, output)
    if as_json:
        front.output.json(report.fields())
    else:
        _show(front.output, report)


@dataclass(frozen=True)
class _Target:
    """What is to be measured. files: None where its weights are random."""

    name: str
    config: ModelConfig
    settings: Settings
    files: ModelFiles | None
    raw_config: Mapping[str, Any]  # as config.json has it


@dataclass(frozen=True)
class _Setup:
    """What of the settings torch has a say in."""

    device: torch.device
    dtype: torch.dtype
    recipe: Recipe
    caps: Caps


def _random_target(front: Front, word: str | None, flags: Mapping[str, Any]) -> _Target:
    from localllm.models.shapes import find_shape

    settings = read_settings(front, flags).settings
    shape = find_shape(settings.model if word is None else word)
    return _Target(shape.name, shape.config, settings, None, shape.raw_config)


def _installed_target(front: Front, word: str | None, flags: Mapping[str, Any]) -> _Target:
    from localllm.models.families import load_config

    selection = select(front, word, flags)
    files = selection.files
    return _Target(files.name, load_config(files.directory), selection.settings, files, {})


def _measure(front: Front, target: _Target, workload: Workload) -> Report:
    from localllm.bench.random_folder import random_folder, remove_abandoned

    packing = Packing(front, f"packing {target.name}", again="the same command", is_first_use=True)
    held = contextlib.ExitStack()
    with front.output.progress(f"{'loading' if target.files else 'making'} {target.name}") as line:
        try:
            setup = _on_a_thread(lambda: _set_up(front, target, workload, line))
            remove_abandoned()
            is_streamed = target.files is None and setup.caps.are_given  # blocks are streamed from files
            folder = held.enter_context(random_folder()) if is_streamed else None
            return _on_a_thread(lambda: _run(front.output, target, setup, workload, packing, line, folder))
        except BaseException:
            packing.leave()
            raise
        finally:
            # To delete gigabytes takes longer than a process that was told to end is waited for.
            with front.interrupts.stopping(lambda: None):
                held.close()


def _set_up(front: Front, target: _Target, workload: Workload, line: ProgressLine) -> _Setup:
    """Imports torch. Refuses what cannot run, before the disk is read or written."""
    from localllm.bench.subject import Caps, require_plan, require_room
    from localllm.engine.memory import choose_device, choose_dtype
    from localllm.engine.planner import has_card
    from localllm.engine.weights import choose_recipe
    from localllm.hub.packed import packed_recipes
    from localllm.models.shapes import Shape
    from localllm.quant.recipe import recipe

    settings, config = target.settings, target.config
    device, dtype = choose_device(settings.device), choose_dtype(settings.dtype)
    assert front.resolved is not None
    vram = vram_cap(front.resolved, line.interject, has_gpu=has_card(device))
    packed = packed_recipes(target.files) if target.files else ()
    chosen = recipe(choose_recipe(settings.weights, config, packed, dtype))
    caps = Caps(settings.ram, vram, workload.kv_tokens, settings.kv)
    if target.files is None and caps.are_given:  # it is loaded as any model is
        workload.check(target.name, config)
    if target.files is not None or caps.are_given:
        shape = Shape(target.name, config, target.raw_config)
        chosen = require_plan(shape, target.files, chosen, dtype, device, workload.ctx, caps, line.show)
    else:
        require_room(config, chosen, dtype, device, caps)
    return _Setup(device, dtype, chosen, caps)


def _run(
    output: Output,
    target: _Target,
    setup: _Setup,
    workload: Workload,
    packing: Packing,
    line: ProgressLine,
    folder: Path | None,
) -> Report:
    """All on one thread: the number of threads is set for that one alone. folder: for a random model's files."""
    import torch

    from localllm.bench.random_model import write_random_model
    from localllm.bench.run import run_benchmark
    from localllm.bench.subject import installed_subject, pack_ahead, random_subject
    from localllm.hub.packed import packed_root
    from localllm.models.shapes import Shape
    from localllm.quant.bf12 import NotCompactError
    from localllm.quant.recipe import RECIPES

    settings, files, config = target.settings, target.files, target.config
    device, dtype, chosen, caps = setup.device, setup.dtype, setup.recipe, setup.caps
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if files is not None:
        try:
            pack_ahead(files, config, chosen, packing.update, packing.wait, caps.ram_bytes)
        except NotCompactError:  # bf16 was asked for
            chosen = RECIPES["bf16"]
        packing.end()
    elif folder is not None:
        files = write_random_model(folder, target.name, target.raw_config, chosen, line.update)

    def load() -> Subject:
        if files is not None:
            is_random = target.files is None
            return installed_subject(
                files, chosen, dtype, device, workload.ctx, line.update, caps, name=target.name, is_random=is_random
            )
        shape = Shape(target.name, config, target.raw_config)
        return random_subject(shape, chosen, dtype, device, workload.ctx, line.update, caps.kv)

    def say(text: str) -> None:
        if output.animated:
            line.show(f"{text} ...")
        else:
            output.note(text)

    return run_benchmark(load, workload, device=device, disk=packed_root(), say=say)


def _on_a_thread(work: Callable[[], Result]) -> Result:
    """What `work` returns, or raises. This thread only waits, so that a signal reaches it in the middle of a step."""

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    future: Future[Result] = Future()
    Thread(target=run, name="bench", daemon=True).start()
    return future.result()


def _refuse_beside_compare(flags: Mapping[str, Any]) -> None:
    """Raises UsageError naming what was typed beside --compare: it measures nothing, and prints no JSON."""
    names = {"model": "MODEL", "depth": "--context", "as_json": "--json"}
    for name, value in flags.items():
        if name not in ("context", "compare") and value not in (None, False, []):
            flag = names.get(name, "--" + name.replace("_", "-"))
            why = "two files that are there already are shown side by side"
            fix = shlex.join(["localllm", "bench", "--compare", *map(str, flags["compare"])])
            raise UsageError(f"--compare and {flag} cannot go together", why=why, fix=fix)


def _compare(output: Output, first: Path, second: Path) -> None:
    from localllm.bench import compare

    a, b = compare.read_result(first), compare.read_result(second)
    for side, path in (("A", first), ("B", second)):
        output.line(one_line(f"{side}: {path}"))
    output.line()
    output.table(compare.HEADER, compare.table(a, b))
    output.line()
    for line in compare.plot(a, b, output.columns):
        output.line(line)


def _show(output: Output, report: Report) -> None:
    from localllm.bench import table

    output.line(table.headline(report))
    rounds = report.runs[0].rounds
    output.line("one round" if rounds == 1 else f"medians of {rounds} rounds, with the slowest and the fastest")
    output.line()
    output.table(table.HEADER, table.rows(report))


def _require_writable(path: Path) -> None:
    """Raises UsageError before the minutes of a measurement are spent."""
    file = Path("bench.json")
    try:
        if path.is_dir():
            why, file = "it is a folder", path / file
        elif path.exists() and not path.is_file():
            why = "it is not a file"
        elif not path.parent.is_dir():
            why = "the folder is not there"
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            why = "the folder may not be written to"
        else:
            return
    except OSError as error:  # a name too long, a folder that may not be entered
        why = error.strerror or str(error)
    raise UsageError(f"--output is {path}", why=why, fix=f"--output {shlex.quote(str(file))}")


def _save(report: Report, path: Path) -> None:
    try:
        report.save(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise LocalLLMError(f"{path} could not be written", why=why, fix=f"df -h {path.parent}") from None
