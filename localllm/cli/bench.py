"""`localllm bench`: the speed of a model on this machine, beside what the machine can do at most."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat.text import one_line
from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.load_progress import PackingProgress, on_a_thread
from localllm.cli.options import flag_of, number, option, takes
from localllm.cli.output import Output, ProgressLine
from localllm.cli.selection import read_settings, select
from localllm.errors import Fix, LocalLLMError, UsageError
from localllm.runtime.engine_loader import engine_config
from localllm.settings import EngineConfig, Settings

if TYPE_CHECKING:
    from localllm.bench.report import BenchmarkReport
    from localllm.bench.target import BenchmarkTarget, TargetSetup
    from localllm.bench.workload import Workload
    from localllm.hub import ModelFiles
    from localllm.models.shapes import Shape

BENCH_EXAMPLES = """Examples:

\b
  localllm bench
  localllm bench mistral-7b --random-weights --weights int4
  localllm bench qwen3-8b --context 128 --context 4096 --output today.json
  localllm bench --compare yesterday.json today.json
"""


_MOST_TOKENS = 1 << 30  # no cache holds as many; beyond, sizes leave the range of a float


@takes(
    options.MODEL,
    option("--random-weights", "Use random weights of the model's shape; nothing is downloaded."),
    "weights",
    "kv",
    number("--prompt-tokens", "Length of the prompt. Default: 512.", 1, _MOST_TOKENS, "512"),
    number("--gen-tokens", "Tokens to generate in each round. Default: 128.", 1, _MOST_TOKENS, "128"),
    number(
        "--context",
        "Tokens in the context before the generated ones; may be repeated. Default: as many as the prompt has.",
        0,
        _MOST_TOKENS,
        "512",
        kind=list[int],
        name="depth",
    ),
    number("--rounds", "Number of measured rounds. Default: 5.", 1, 1000, "5"),
    option(
        "--ram",
        "Memory limit for the program and the model, 4GiB. The buffers that measure the machine take 1.3 GiB more.",
        "SIZE",
    ),
    EngineConfig,
    option("--json", "One JSON object: schema_version, machine, floors, runs.", name="as_json"),
    option("--output", "Write the JSON object to FILE.", "FILE", Path),
    option("--compare", "Compare two such files instead of measuring.", "A B", tuple[Path, Path]),
)
def bench_command(context: typer.Context, **flags: Any) -> None:
    """Measure how fast a model is on this machine.

    Each rate stands beside what bounds it, measured in the same minute: reading memory and disk, copying to and on a
    GPU, multiplying matrices. Medians of several rounds, with the slowest and the fastest.
    """
    cli = cli_context(context)
    if flags["compare"] is not None:
        _refuse_beside_compare(flags)
        _compare(cli.output, *flags["compare"])
        return
    from localllm.bench.workload import Workload

    lengths = ("prompt_tokens", "gen_tokens", "rounds")
    prompt, generated, rounds = (getattr(Workload, name) if flags[name] is None else flags[name] for name in lengths)
    workload, output = Workload.of(prompt, generated, flags["depth"] or (), rounds), flags["output"]
    if output is not None:
        _require_writable(output)
    bench = _chosen(cli, flags["model"], flags, workload)
    if not flags["random_weights"]:  # random ones were trained for no context: their speed can be measured at any depth
        workload.check(bench.shape.name, bench.shape.config)
    report = bench.measure()
    if output is not None:
        try:
            report.save(output)
        except OSError as error:
            why = error.strerror or str(error)
            raise LocalLLMError(f"{output} could not be written", why=why, fix=f"df -h {output.parent}") from None
    if flags["as_json"]:
        cli.output.json(report.fields())
        return
    from localllm.bench import table

    cli.output.line(table.headline(report))
    rounds = report.runs[0].rounds
    cli.output.line("one round" if rounds == 1 else f"medians of {rounds} rounds, with the slowest and the fastest")
    cli.output.line()
    cli.output.table(table.HEADER, table.rows(report))


def _chosen(cli: CliContext, word: str | None, flags: Mapping[str, Any], workload: Workload) -> _Bench:
    if flags["random_weights"]:
        from localllm.models.shapes import find_shape

        settings = read_settings(cli, flags).settings
        return _Bench(cli, find_shape(settings.model if word is None else word), settings, None, workload)
    from localllm.models.families import load_config
    from localllm.models.shapes import Shape

    selection = select(cli, word, flags)
    files = selection.files
    shape = Shape(files.name, load_config(files.directory), {})
    return _Bench(cli, shape, selection.settings, files, workload)


@dataclass(frozen=True)
class _Bench:
    """files: None where the weights are random."""

    cli: CliContext
    shape: Shape
    settings: Settings
    files: ModelFiles | None
    workload: Workload

    def measure(self) -> BenchmarkReport:
        from localllm.bench.random_folder import random_folder, remove_abandoned

        packing = PackingProgress(self.cli, f"packing {self.shape.name}", again="the same command", is_first_use=True)
        held = contextlib.ExitStack()
        label = f"{'loading' if self.files else 'making'} {self.shape.name}"
        with self.cli.output.progress(label) as line:
            try:
                setup = on_a_thread(lambda: self._set_up(line))
                remove_abandoned()
                needs_files = self.files is None and setup.is_capped  # blocks are streamed from files
                folder = held.enter_context(random_folder()) if needs_files else None
                return on_a_thread(lambda: self._run(setup, packing, line, folder))
            except BaseException:
                packing.leave()
                raise
            finally:
                # Deleting gigabytes takes longer than a process that was asked to end is waited for.
                with self.cli.interrupts.stopping(lambda: None):
                    held.close()

    def _set_up(self, line: ProgressLine) -> TargetSetup:
        """Import torch, and refuse what cannot run before the disk is read or written."""
        from localllm.bench.target import TargetSetup, planned_recipe, require_memory
        from localllm.engine.device import dtype_name
        from localllm.engine.memory import choose_device, choose_dtype
        from localllm.engine.weights import choose_recipe
        from localllm.hub.packed import packed_recipes
        from localllm.quant.recipe import recipe

        settings, shape, workload = self.settings, self.shape, self.workload
        device, dtype = choose_device(settings.device), choose_dtype(settings.dtype)
        assert self.cli.resolved is not None
        vram = engine_config(self.cli.resolved, line.interject).vram
        packed = packed_recipes(self.files) if self.files else ()
        chosen = recipe(choose_recipe(settings.weights, shape.config, packed, dtype_name(settings.dtype)))
        setup = TargetSetup(chosen, dtype, device, workload.ctx, workload.kv_tokens, settings.kv, settings.ram, vram)
        if self.files is None and not setup.is_capped:
            require_memory(shape.config, setup)
            return setup
        if self.files is None:  # it is loaded as any model is, within its context
            workload.check(shape.name, shape.config)
        return replace(setup, recipe=planned_recipe(shape, self.files, setup, line.show))

    def _run(
        self, setup: TargetSetup, packing: PackingProgress, line: ProgressLine, folder: Path | None
    ) -> BenchmarkReport:
        """Measure on this thread, for which alone the number of threads is set. folder: of a random model's files."""
        import torch

        from localllm.bench.random_model import write_random_model
        from localllm.bench.run import run_benchmark
        from localllm.bench.target import installed_target, pack_ahead, random_target
        from localllm.hub.packed import packed_root

        files, shape = self.files, self.shape
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        if files is not None:
            setup = replace(setup, recipe=pack_ahead(files, shape.config, setup, packing.update, packing.wait))
            packing.end()
        elif folder is not None:
            files = write_random_model(folder, shape.name, shape.raw_config, setup.recipe, line.update)

        def load() -> BenchmarkTarget:
            if files is None:
                return random_target(shape, setup, line.update)
            return installed_target(files, setup, line.update, name=shape.name, is_random=self.files is None)

        def notify(text: str) -> None:
            if self.cli.output.animated:
                line.show(f"{text} ...")
            else:
                self.cli.output.note(text)

        return run_benchmark(load, self.workload, device=setup.device, disk=packed_root(), notify=notify)


def _refuse_beside_compare(flags: Mapping[str, Any]) -> None:
    """Raises UsageError naming what was typed beside --compare, which measures nothing and prints no JSON."""
    names = {"model": "MODEL", "depth": "--context", "as_json": "--json"}
    for name, value in flags.items():
        if name != "compare" and value not in (None, False, []):
            flag = names.get(name, flag_of(name))
            why = "it shows two files side by side, and measures nothing"
            fix = shlex.join(["localllm", "bench", "--compare", *map(str, flags["compare"])])
            raise UsageError(f"--compare and {flag} cannot go together", why=why, fix=fix)


def _compare(output: Output, first: Path, second: Path) -> None:
    from localllm.bench import table
    from localllm.bench.report import read_report

    a, b = read_report(first), read_report(second)
    for side, path in (("A", first), ("B", second)):
        output.line(one_line(f"{side}: {path}"))
    output.line()
    output.table(table.COMPARED_HEADER, table.compared_rows(a, b))


def _require_writable(path: Path) -> None:
    """Raises UsageError before the minutes of a measurement are spent."""
    checks = (
        (path.is_dir, "it is a folder"),
        (lambda: path.exists() and not path.is_file(), "it is not a file"),
        (lambda: not path.parent.is_dir(), "the folder is not there"),
        (lambda: not os.access(path.parent, os.W_OK | os.X_OK), "the folder may not be written to"),
    )
    try:
        why = next((why for is_wrong, why in checks if is_wrong()), "")
        file = path / "bench.json" if path.is_dir() else Path("bench.json")
    except OSError as error:  # a name too long, a folder that may not be entered
        why, file = error.strerror or str(error), Path("bench.json")
    if why:
        raise UsageError(f"--output is {path}", why=why, fix=Fix.flag("--output", str(file)))
