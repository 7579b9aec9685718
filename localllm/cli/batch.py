"""`localllm run --batch`: the prompts of a file, checked before any is answered, become one job.

Knows what decides a job's texts, and so which interrupted job it goes on with. How it is answered: job.py.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import typer

from localllm.chat.text import format_seconds
from localllm.cli.batch_input import TOLD, LineRules, Problems, Prompts, read_prompts
from localllm.cli.context import CliContext
from localllm.cli.job import SEEDS, Job
from localllm.cli.journal import open_journal
from localllm.cli.load_progress import loading
from localllm.cli.options import DEFAULT_MAX_TOKENS, extra_sampling
from localllm.cli.output import ProgressLine
from localllm.cli.prompt import argument_text
from localllm.cli.source import Encoder
from localllm.config import format_figure
from localllm.engine.request import Request
from localllm.errors import ContextOverflowError, Fix, LocalLLMError, SchemaError, UsageError
from localllm.hub.packed import source_id
from localllm.hub.repo_cache import TOKENIZERS
from localllm.offload.planner.plan import JobShape
from localllm.runtime.engine_loader import Opening
from localllm.runtime.plan_request import DEFAULT_PARALLEL
from localllm.runtime.selection import Selection
from localllm.text.grammar.grammar import Grammar
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.engine.engine import Engine

_BYTES_A_TOKEN = 3  # of a prompt's line; English text has 4 to 5
_SAME_NUMBERS = {"bf12": "bf16"}  # in other bytes
_WINDOW = 2  # times what is answered at once is handed to the engine: it never waits, and little is held
# What makes text of ids and ids of text, beside the weights.
_TEXT_FILES = (
    *chain.from_iterable(TOKENIZERS), "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def run_batch(cli: CliContext, selection: Selection, flags: Mapping[str, Any], grammar: Grammar | None) -> None:
    """Answers every line of a file. Raises what is wrong with lines or with the engine; typer.Exit(1) if one failed;
    SchemaError with --strict if one has not the form of `grammar`."""
    parallel = flags["parallel"] or DEFAULT_PARALLEL
    rules = _line_rules(selection, flags, grammar)
    prompts = read_prompts(flags["batch"], rules, cli.output)
    longest_answer = rules.sampling.max_tokens or DEFAULT_MAX_TOKENS
    with loading(cli, selection, Opening(_job_shape(prompts, longest_answer, parallel))) as load:
        encoder = Encoder.of(cli, selection, is_raw=rules.raw, has_form=grammar is not None)
        lengths, highest_ids = _measure(prompts, encoder, load.shown.line)
        engine = cast("Engine", load.wait())
        _require_room(prompts, lengths, highest_ids, encoder, engine)
        engine.adapters.check(selection.adapters())
        key = _job_key(selection, rules, prompts, engine)
        with open_journal(key, len(prompts), secrets.randbelow(SEEDS), fresh=flags["fresh"]) as journal:
            job = Job(cli, selection, prompts, encoder, journal)
            job.run(load.handle, window=_WINDOW * parallel)
            _report(cli, selection, job, engine if flags["stats"] else None, strict=flags["strict"])
    if job.tally.num_failed:
        raise typer.Exit(1)
    if job.tally.num_incomplete and flags["strict"]:
        why = 'they were cut before they were whole; "complete" of each line says which'
        raise SchemaError(_incomplete_text(job), why=why, fix=Fix.flag("--max-tokens", 4 * longest_answer))


def _incomplete_text(job: Job) -> str:
    return f"{job.tally.num_incomplete} of {len(job.prompts)} answers do not have the form that was asked for"


def _line_rules(selection: Selection, flags: Mapping[str, Any], grammar: Grammar | None) -> LineRules:
    """Return what the command line and the settings say about every line. Raises UsageError."""
    sampling = replace(selection.sampling(extra_sampling(flags)), seed=selection.settings.seed)
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=DEFAULT_MAX_TOKENS)
    system = selection.settings.system
    return LineRules(
        model=selection.files.name,
        sampling=sampling,
        raw=flags["raw"],
        system=argument_text(system, "--system") if system else None,
        system_is_typed=flags["system"] is not None,
        grammar=grammar,
    )


def _job_shape(prompts: Prompts, longest_answer: int, parallel: int) -> JobShape:
    """Return the shape by which memory is shared out, estimated before anything is encoded."""
    sizes = [len(line) for line in prompts.lines]
    mean, longest = (size // _BYTES_A_TOKEN + longest_answer for size in (sum(sizes) // len(sizes), max(sizes)))
    return JobShape(min(parallel, len(prompts)), mean, longest)


def _measure(prompts: Prompts, encoder: Encoder, line: ProgressLine) -> tuple[array[int], array[int]]:
    """Encode every prompt once; return its number of tokens, and the highest id that it needs the model to have.

    Raises UsageError for those that the template or the tokenizer refuses.
    """
    problems = Problems()
    lengths, highest_ids = array("q"), array("q")
    for index, number in enumerate(prompts.numbers):
        if index and index % 1000 == 0:  # 0.2 s
            line.show(f"checking the prompts: {index} of {len(prompts)}")
        prompt = prompts[index]
        try:
            ids = encoder.encode(prompt.source)
        except LocalLLMError as error:
            problems.add(number, error)
            continue
        lengths.append(len(ids))
        highest_ids.append(max((*ids, *prompt.sampling.logit_bias), default=0))
    prompts.refuse(problems)
    return lengths, highest_ids


def _require_room(
    prompts: Prompts, lengths: array[int], highest_ids: array[int], encoder: Encoder, engine: Engine
) -> None:
    """Raises UsageError or ContextOverflowError for prompts that this engine cannot answer."""
    problems = Problems()
    too_long = []
    for index, (length, highest_id) in enumerate(zip(lengths, highest_ids, strict=True)):
        if length >= engine.ctx:
            too_long.append(f"line {prompts.numbers[index]} has {length} tokens")
        elif length == 0 or highest_id >= engine.config.vocab_size:
            line = prompts[index]
            try:
                engine.check(Request(encoder.encode(line.source), line.sampling))
            except UsageError as error:
                problems.add(prompts.numbers[index], error)
    prompts.refuse(problems)
    if too_long:
        longest, possible = max(lengths), engine.config.longest_context
        fixes = engine.fixes_for(min(possible, longest + DEFAULT_MAX_TOKENS)) if longest < possible else []
        rest = f", and {len(too_long) - TOLD} more" if len(too_long) > TOLD else ""
        raise ContextOverflowError(
            f"{len(too_long)} of {len(prompts)} prompts do not fit into the context of {engine.ctx} tokens",
            why=f"{', '.join(too_long[:TOLD])}{rest}; nothing was cut",
            fix=fixes or "shorten them",
        )


def _job_key(selection: Selection, rules: LineRules, prompts: Prompts, engine: Engine) -> str:
    """A name for all that decides the texts of a job: what has another name is another job."""
    files, texts = selection.files, hashlib.blake2b(digest_size=32)
    more = sorted(files.directory.glob("additional_chat_templates/*.jinja"))
    for path in (*(files.directory / name for name in _TEXT_FILES), *more):
        texts.update(path.read_bytes() if path.is_file() else b"")
        texts.update(path.name.encode())
    told = hashlib.blake2b(digest_size=32)
    for line in prompts.lines:
        told.update(line + b"\n")
    decisive = {
        "localllm": __version__,
        "model": source_id(files),
        "texts": texts.hexdigest(),
        "weights": _SAME_NUMBERS.get(engine.weights, engine.weights),
        "dtype": str(engine.model.dtype),
        "kv": engine.kv_format.name,
        "attend": selection.settings.attend,
        "kv_evict": selection.settings.kv_evict,
        "reuse": selection.settings.reuse,
        "device": engine.model.device.type,
        "ctx": selection.settings.ctx,
        "think": selection.settings.think,
        "rules": asdict(rules),
        "adapters": [engine.adapters.identity(ref) for ref in selection.adapters()],
        "prompts": told.hexdigest(),
    }
    return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()


def _report(cli: CliContext, selection: Selection, job: Job, engine: Engine | None, *, strict: bool) -> None:
    """Print how a job ended; with `engine`, its statistics too. strict: an error says which answers have no form."""
    tally, output, total = job.tally, cli.output, len(job.prompts)
    if tally.num_cut_by_max_tokens and selection.settings.max_tokens is None:
        cut = f"{tally.num_cut_by_max_tokens} of {total} answers were cut at {DEFAULT_MAX_TOKENS} tokens"
        output.warn(f"{cut}: the most that --batch gives where nobody says (--max-tokens N)")
    if tally.num_cut_by_context:
        output.warn(f"{tally.num_cut_by_context} of {total} answers were cut: their context is full (--ctx N)")
    if tally.num_silent:
        output.warn(
            f"{tally.num_silent} of {total} answers are empty: they ended before anything was said (--max-tokens N)"
        )
    if tally.num_incomplete and not strict:
        output.warn(f"{_incomplete_text(job)}: they were cut before they were whole")
    if tally.num_failed:
        kept = "the other answers are kept, and the same command tries again"
        output.warn(f"{tally.num_failed} of {total} prompts failed; {kept}")
    took = f"{tally.elapsed_s:.1f} s" if tally.elapsed_s < 60 else format_seconds(tally.elapsed_s)
    rate = "" if tally.tokens_per_s is None else f" at {format_figure(tally.tokens_per_s)}/s"
    tokens = f"{tally.completion_tokens} tokens{rate} in {took}"
    output.note(f"{job.num_answers - job.num_before} of {total} prompts answered, {tokens}")
    if engine is not None:
        seed = selection.settings.seed
        seeds = f"{job.first_seed} + index" if seed is None else str(seed)
        most = f"at most {engine.scheduler.limits.max_sequences} at once"
        drafted = f"{tally.accepted} of {tally.drafted} drafted tokens accepted, " if tally.drafted else ""
        output.note(f"prompts {tally.prompt_tokens} tokens, {drafted}{most}, load {engine.load_s:.2f} s, seed {seeds}")
