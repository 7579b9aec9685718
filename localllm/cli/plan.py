"""`localllm plan`: where a model's blocks would rest, and how fast it would be, before a byte moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from localllm.chat import plan_text
from localllm.cli import options
from localllm.cli.context import cli_context
from localllm.cli.options import choice, option, refuse_together, takes
from localllm.cli.output import SCHEMA_VERSION, Output
from localllm.cli.selection import read_settings
from localllm.config import DEFAULT, format_bytes
from localllm.errors import Fix
from localllm.runtime.error_origins import with_origins
from localllm.runtime.plan_request import considered
from localllm.runtime.presets import choose
from localllm.settings import MACHINE, EngineConfig

if TYPE_CHECKING:
    from localllm.cli.context import CliContext
    from localllm.config import ResolvedSettings
    from localllm.engine.model_plan import Planned
    from localllm.offload.planner.model_shape import ModelShape
    from localllm.offload.planner.plan import Plan

PLAN_EXAMPLES = """Examples:

\b
  localllm plan mistral-7b
  localllm plan llama-3.1-8b --ram 4GiB --ctx 4096
  localllm plan qwen3-8b --weights bf16 --json
  localllm plan llama-3.3-70b --gpu rtx-4090 --ram 64GiB
  localllm plan qwen3-8b --gpu all
"""
_BAR_COLUMNS = 30
_MAP_COLUMNS = 64


def _complete_cards(incomplete: str) -> list[str]:
    from localllm.offload.planner.card_sheets import ALL, NONE, card_sheets

    return [name for name in (*card_sheets(), ALL, NONE) if name.startswith(incomplete.casefold())]


@takes(
    options.MODEL,
    "weights",
    "kv",
    "speculate",
    "draft_tokens",
    EngineConfig,
    choice(
        "--goal",
        "One answer fast, or many. Default: latency.\n"
        "latency: one answer as fast as possible. throughput: `run --batch` with 32 prompts of 1024 tokens.",
        "latency",
        "throughput",
        default="latency",
        group=MACHINE,
        is_basic=True,
    ),
    option(
        "--gpu",
        "Estimate for a card that is not here; repeat it to compare.\n"
        "It is by the card's data sheet. CPU and disk are "
        "this machine's, and --ram is then the memory of that machine, of which nine tenths may be used. May be "
        "repeated to compare cards. all: every known card. none: the CPU alone.",
        "CARD",
        list[str],
        completion=_complete_cards,
        group=MACHINE,
        is_basic=True,
    ),
    options.AS_JSON,
)
def plan_command(context: typer.Context, **flags: Any) -> None:
    """Show where a model would be placed and how fast it would run.

    Nothing is downloaded or loaded: the model's shape is enough. The machine is measured once, which takes a few
    seconds. Later runs correct the predictions.
    """
    cli = cli_context(context)
    chosen, _ = choose(read_settings(cli, flags), flags["model"])
    # Documents that are reused take nothing that a plan counts, and no flag of it says so.
    cli.resolved = resolved = chosen.overlaid({"reuse": ("prefix", DEFAULT)})
    name = resolved.settings.model
    if flags["gpu"]:
        _plan_cards(cli, name, resolved, flags)
        return
    with cli.output.progress("planning") as line:
        planned = considered(name, resolved, flags["goal"], line.show, line.interject).advised()
    if flags["as_json"]:
        if planned.refusal is not None:
            with_origins(planned.refusal, resolved)
        cli.output.json({"schema_version": SCHEMA_VERSION, **_fields(planned)}, indent=2)
        if planned.refusal is not None:
            raise typer.Exit(planned.refusal.exit_code)
        return
    if planned.refusal is not None:
        raise planned.refusal
    _show(cli.output, planned)


def _plan_cards(cli: CliContext, name: str, resolved: ResolvedSettings, flags: Mapping[str, Any]) -> None:
    from localllm.cli.plan_cards import CardRow, card_fields, show_cards
    from localllm.offload.planner.card_sheets import chosen_cards
    from localllm.runtime.other_machines import considered_elsewhere, estimates

    why = "--gpu plans for a machine that is not here; the CPU alone is --gpu none"
    refuse_together(flags, {"--gpu --device": why}, Fix.without("--device"))
    cards = chosen_cards(flags["gpu"])
    if resolved.settings.device == "cpu" and any(card is not None for card in cards):
        cli.output.note(f"device = cpu ({resolved.origins['device'].where}) is left aside: --gpu names a card")
    with cli.output.progress("planning") as line:
        rows = []
        for found in considered_elsewhere(name, resolved, flags["goal"], cards, line.show, line.interject):
            planned = found.considered.advised() if len(cards) == 1 else found.considered.planned
            basis = estimates([(found.card, planned.shape.weights)])
            rows.append(CardRow(found.card, replace(planned, estimates=[*basis, *planned.estimates])))
    refusals = [row.planned.refusal for row in rows if row.planned.refusal is not None]
    is_refused = len(refusals) == len(rows)
    if flags["as_json"]:
        for refusal in refusals:
            with_origins(refusal, resolved)
        fields = [{"card": card_fields(card, each.shape.weights), **_fields(each)} for card, each in rows]
        cli.output.json({"schema_version": SCHEMA_VERSION, "cards": fields}, indent=2)
        if is_refused:
            raise typer.Exit(refusals[0].exit_code)
    elif is_refused:
        raise refusals[-1]
    elif len(rows) == 1:
        _show(cli.output, rows[0].planned)
    else:
        show_cards(cli.output, rows)


def _fields(planned: Planned) -> dict[str, Any]:
    plan, shape = planned.plan, planned.shape
    fields: dict[str, Any] = {"fits": plan is not None, "model": shape.name, "weights": shape.weights, "kv": shape.kv}
    fields["parameters"] = {"total": shape.num_weights, "active": shape.num_active_weights}
    at_s = planned.measured_at_s
    measured = {
        "at": None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds"),
        "while_busy": list(planned.measured_busy),
    }
    said = {"advice": planned.advice, "estimates": list(planned.estimates), "measured": measured}
    if plan is None:
        assert planned.refusal is not None
        error = {"what": planned.refusal.what, "why": planned.refusal.why, "fix": planned.refusal.fix}
        empty: dict[str, Any] = {"ctx": None, "blocks": [], "token_bytes": None, "experts": None, "ledger": {}}
        empty |= {"states": None, "limits": {}, "predicted": None, "bound_by": None, "speculation": []}
        return {**fields, **empty, **said, "error": error}
    assert planned.decode_tok_s is not None and planned.ttft_s is not None
    return {
        **fields,
        "ctx": plan.ctx,
        "sequences": plan.sequences,
        "blocks": [
            {"name": block.name, "bytes": block.num_bytes, "tier": block.tier, "exec": block.exec}
            for block in plan.blocks
        ],
        "token_bytes": {"all": shape.token_bytes, "disk": plan.streamed_bytes},
        "experts": _experts(plan),
        "states": _states(shape),
        "ledger": {tier: dict(plan.ledger.get(tier, {})) for tier in ("vram", "ram", "disk")},
        "limits": dict(plan.limits),
        "prefill": {
            "batch_rows": plan.batch_rows,
            "pass_tokens": plan.pass_tokens,
            "prompt_tokens": plan.prompt_tokens,
        },
        "predicted": {"decode_tok_s": asdict(planned.decode_tok_s), "ttft_s": asdict(planned.ttft_s)},
        "bound_by": plan.bound_by,
        "speculation": [
            {
                "drafter": found.drafter,
                "alpha": found.alpha,
                "skipped_blocks": found.skipped,
                "draft_tokens": found.gain and found.gain.count,
                "tok_s": found.gain and found.gain.tok_s,
                "speedup": found.gain and found.gain.speedup,
                "why_not": found.why_not,
            }
            for found in planned.speculation
        ],
        **said,
    }


def _states(shape: ModelShape) -> dict[str, int] | None:
    """Return what the layers of a hybrid keep in place of keys and values; None for any other model."""
    if not shape.state_layers:
        return None
    return {"layers": shape.state_layers, "snapshot_bytes": shape.snapshot_bytes}


def _experts(plan: Plan) -> dict[str, Any] | None:
    """Return the experts of a mixture, all layers together; None for any other model."""
    if plan.experts is None:
        return None
    return {
        "total": plan.experts.total,
        "active": sum(experts.active for _, experts in plan.shape.mixtures),
        "in_memory": plan.experts.in_memory,
        "memory": plan.experts.tier,
        "expected_hits": plan.hit_rate,
        "learnt_from_tokens": plan.learnt_tokens,
    }


def _show(output: Output, planned: Planned) -> None:
    plan = planned.plan
    assert plan is not None and planned.decode_tok_s is not None and planned.ttft_s is not None
    shape = plan.shape
    output.line(
        f"{shape.name}: {format_bytes(shape.num_bytes)} of {shape.weights} weights, {plan.ctx} tokens of context"
    )
    for words in filter(None, (plan_text.mixture(shape), plan_text.hybrid(shape))):
        output.line(words)
    output.line()
    _show_ledger(output, plan)
    _show_map(output, plan)
    rate, wait = planned.decode_tok_s, planned.ttft_s
    together = f" of {plan.sequences} sequences together" if plan.sequences > 1 else ""
    behind = f" behind {plan.prompt_tokens} tokens" if plan_text.long_texts(plan) else ""
    output.line(f"decode       {plan_text.band(rate)} tok/s{behind}{together}, bound by {plan_text.bound(plan)}")
    output.line(f"first token  {plan_text.duration(wait)}, after a prompt of {plan.prompt_tokens} tokens")
    for number, found in enumerate(planned.speculation):
        output.line(f"{'drafts' if number == 0 else '':<11}  {plan_text.drafting(found)}")
    if measured := plan_text.measured(planned):
        output.line(f"measured     {measured}")
    for estimate in planned.estimates:
        output.line(f"estimated    {estimate}")
    for number, advice in enumerate(planned.advice):
        output.line(f"{'better' if number == 0 else '':<11}  {advice}")


def _show_ledger(output: Output, plan: Plan) -> None:
    for tier, name in plan_text.MEMORIES.items():
        limit = plan.limits.get(tier)
        if limit is None:
            continue
        output.line(f"{name:<11}  {format_bytes(plan.total_bytes(tier))} of {format_bytes(limit)}")
        for owner, count in plan.ledger[tier].items():
            bar = "#" * max(1, round(_BAR_COLUMNS * count / limit))
            output.line(f"  {owner:<11}{format_bytes(count):>10}  {bar}")
    if plan.streamed_bytes:
        output.line(f"disk         {plan_text.read_from_disk(plan)}")
    if long_texts := plan_text.long_texts(plan):
        output.line(f"long texts   {long_texts}")
    if plan.experts:
        parts = filter(None, (plan_text.experts_in_memory(plan.experts), plan_text.expected_hits(plan)))
        output.line(f"experts      {'; '.join(parts)}")
    output.line()


def _show_map(output: Output, plan: Plan) -> None:
    """A sign a block, in the order of a forward."""
    for begin in range(0, len(plan.blocks), _MAP_COLUMNS):
        row = plan.blocks[begin : begin + _MAP_COLUMNS]
        kinds = map(plan_text.kind, row)
        parts = [(kind.sign, kind.tone) for kind in kinds]
        output.toned_line([("blocks       " if begin == 0 else " " * 13, "plain"), *parts])
    for kind, count in plan_text.counted(plan).items():
        output.toned_line([(" " * 13, "plain"), (kind.sign, kind.tone), (f" {count} {kind.meaning}", "plain")])
    output.line()
