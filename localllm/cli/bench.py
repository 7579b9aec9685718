"""`localllm bench`: the speed of a model on this machine, beside what the machine can do at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat.text import one_line
from localllm.cli import options
from localllm.cli.context import CliContext, cli_context
from localllm.cli.load_progress import LoadLine, on_a_thread
from localllm.cli.options import flag_of, number, option, refuse_together, takes
from localllm.cli.output import Output, ProgressLine
from localllm.cli.selection import read_settings, select
from localllm.config import DEFAULT
from localllm.errors import Fix
from localllm.runtime.engine_loader import engine_config, refuse_idle
from localllm.runtime.presets import choose
from localllm.settings import MACHINE, OUTPUT, EngineConfig

if TYPE_CHECKING:
    from localllm.bench.report import BenchmarkReport
    from localllm.bench.target import BenchmarkTarget
    from localllm.bench.workload import Workload
    from localllm.models.architecture import ModelConfig

BENCH_EXAMPLES = """Examples:

\b
  localllm bench
  localllm bench mistral-7b --random-weights --weights int4
  localllm bench qwen3-8b --context 128 --context 4096 --json > today.json
  localllm bench --compare yesterday.json today.json
"""


_MEASURED = "What is measured"  # a heading in the help
_MOST_TOKENS = 1 << 30  # no cache holds as many; beyond, sizes leave the range of a float
_EXCLUSIVE = {"--random-weights --ram --vram": "such a model is made whole in memory, and nothing of it is streamed"}


@takes(
    options.MODEL,
    option(
        "--random-weights",
        "Random weights of its shape: nothing is downloaded.",
        group=_MEASURED,
        is_basic=True,
    ),
    "weights",
    "kv",
    number(
        "--prompt-tokens",
        "Length of the prompt, in tokens. Default: 512.",
        1,
        _MOST_TOKENS,
        "512",
        group=_MEASURED,
        is_basic=True,
    ),
    number(
        "--gen-tokens",
        "Tokens to generate in each round. Default: 128.",
        1,
        _MOST_TOKENS,
        "128",
        group=_MEASURED,
        is_basic=True,
    ),
    number(
        "--context",
        "Tokens in the context before the generated ones.\nDefault: as many as the prompt has. May be repeated.",
        0,
        _MOST_TOKENS,
        "512",
        kind=list[int],
        name="depth",
        group=_MEASURED,
        is_basic=True,
    ),
    number("--rounds", "Number of measured rounds. Default: 5.", 1, 1000, "5", group=_MEASURED, is_basic=True),
    option(
        "--ram",
        "Memory limit of program and model, such as 4GiB.\nThe buffers that measure the machine take 1.3 GiB more.",
        "SIZE",
        group=MACHINE,
        is_basic=True,
    ),
    EngineConfig,
    option(
        "--json",
        "Print one JSON object.\nIts keys: schema_version, machine, floors, runs.",
        group=OUTPUT,
        is_basic=True,
    ),
    option(
        "--compare",
        "Compare two files of --json, and measure nothing.",
        "A B",
        tuple[Path, Path],
        group=OUTPUT,
        is_basic=True,
    ),
)
def bench_command(context: typer.Context, **flags: Any) -> None:
    """Measure how fast a model is on this machine.

    Each speed is shown beside its limit on this machine, measured in the same minute: reading memory and the disk,
    copying to and on a GPU, multiplying matrices. Figures are medians of several rounds, with the slowest and fastest.
    """
    flags["context"] = flags.pop("depth")
    cli = cli_context(context)
    if flags["compare"] is not None:
        others = " ".join(flag_of(name) for name in flags if name not in ("compare", "model"))
        why = "it shows two files side by side, and measures nothing"
        fix = Fix.command("bench", "--compare", *flags["compare"])
        refuse_together({**flags, "MODEL": flags["model"]}, {f"--compare MODEL {others}": why}, fix)
        _compare(cli.output, *flags["compare"])
        return
    refuse_together(flags, _EXCLUSIVE, Fix.without("--ram" if flags["ram"] else "--vram"))
    from localllm.bench.workload import Workload

    prompt_tokens = flags["prompt_tokens"] or 512
    contexts = tuple(dict.fromkeys(flags["context"] or [prompt_tokens]))
    workload = Workload(prompt_tokens, flags["gen_tokens"] or 128, contexts, flags["rounds"] or 5)
    report = (_measure_random if flags["random_weights"] else _measure_installed)(cli, flags, workload)
    if flags["json"]:
        cli.output.json(asdict(report), indent=2)
        return
    from localllm.bench import table

    cli.output.line(table.headline(report))
    rounds = workload.rounds
    cli.output.line("one round" if rounds == 1 else f"medians of {rounds} rounds, with the slowest and the fastest")
    cli.output.line()
    cli.output.table(table.HEADER, table.rows(report))


def _measure_random(cli: CliContext, flags: Mapping[str, Any], workload: Workload) -> BenchmarkReport:
    """At any depth: random weights were trained for no context."""
    from localllm.models.shapes import find_shape

    cli.resolved, _ = choose(read_settings(cli, flags), flags["model"])
    settings = cli.resolved.settings
    shape = find_shape(settings.model)
    if settings.ram or settings.vram:
        cli.output.note("the settings ram and vram do not apply to random weights, which are measured whole in memory")
    line = cli.output.progress(f"making {shape.name}")

    def load(config: EngineConfig) -> BenchmarkTarget:
        from localllm.bench.target import random_target
        from localllm.engine.loader import Watcher

        watcher = Watcher(reading=line.update, measuring=line.show, noting=line.interject)
        return random_target(shape, config, workload, watcher)

    refuse_idle(cli.resolved, shape.config, shape.name)
    with line:
        return _measure(cli, shape.config, load, workload, line)


def _measure_installed(cli: CliContext, flags: Mapping[str, Any], workload: Workload) -> BenchmarkReport:
    from localllm.models.families import load_config

    selection = select(cli, flags["model"], flags)
    files = selection.files
    config = load_config(files.directory)
    workload.check(files.name, config)
    shown = LoadLine(cli, selection)

    def load(config: EngineConfig) -> BenchmarkTarget:
        from localllm.bench.target import installed_target
        from localllm.engine.loader import Watcher

        return installed_target(files, config, workload, Watcher(**shown.hearers))

    with shown.line:
        try:
            return _measure(cli, config, load, workload, shown.line)
        finally:
            shown.packing.leave()


def _measure(
    cli: CliContext,
    model: ModelConfig,
    load: Callable[[EngineConfig], BenchmarkTarget],
    workload: Workload,
    line: ProgressLine,
) -> BenchmarkReport:
    """Load and measure on one thread: the number of threads that compute is set for that alone."""

    def notify(text: str) -> None:
        if cli.output.animated:
            line.show(f"{text} ...")
        else:
            cli.output.note(text)

    def work() -> BenchmarkReport:
        from localllm.bench.run import run_benchmark
        from localllm.engine.memory import choose_device
        from localllm.hub.packed import packed_root

        assert cli.resolved is not None
        # What it does not take counts as off where a file or a variable has it.
        off = {"speculate": "off", "kv_offload": "off", "kv_evict": "off", "reuse": "prefix"}
        resolved = cli.resolved.overlaid({name: (value, DEFAULT) for name, value in off.items()})
        config = replace(engine_config(resolved, model, line.interject), ctx=workload.ctx)
        device = choose_device(config.device)
        return run_benchmark(lambda: load(config), workload, device=device, disk=packed_root(), notify=notify)

    return on_a_thread(work)


def _compare(output: Output, first: Path, second: Path) -> None:
    from localllm.bench import table
    from localllm.bench.report import read_report

    a, b = read_report(first), read_report(second)
    for side, path, report in (("A", first, a), ("B", second, b)):
        output.line(one_line(f"{side}: {path}: {table.headline(report)}"))
    output.line()
    output.table(table.COMPARED_HEADER, table.compared_rows(a, b))
