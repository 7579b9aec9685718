"""Keys and values in few bits are compared with exact ones once; where they change what the model says, wider ones."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.kv_quality import put_outliers
from localllm.bench.random_blocks import RandomBlocks
from localllm.bench.random_model import word_tokenizer
from localllm.cache.kv_format import KV_FORMATS
from localllm.engine.engine import Engine
from localllm.engine.events import FinishedEvent, PrefillEvent
from localllm.engine.kv_probe import (
    LAST,
    LIMIT_NATS,
    KVProbe,
    _divergence,
    _log_probabilities,
    probe,
    with_kv,
)
from localllm.engine.kv_verdicts import Asked, Verdict
from localllm.engine.loader import LoadedModel, Loading, Watcher
from localllm.engine.prefix_config import IN_POOLS, Computed, KVReuse
from localllm.engine.request import Request
from localllm.engine.runner import ModelRunner, StepCancelledError
from localllm.errors import DoesNotFitError
from localllm.kernels import cpu_linear
from localllm.models.config import ModelConfig
from localllm.models.decoder import Decoder
from localllm.models.families import parse_config
from localllm.models.load import load_decoder
from localllm.offload.planner.plan import JobShape
from localllm.quant.recipe import recipe
from tests import checkpoints
from tests.cli_support import run_cli, write_checkpoint
from tests.test_prefix_cache import CTX, SHAPE, VOCAB, ask, computed, greedy, tokens
from tests.test_prefix_cache import engine as random_engine

COMPUTED = Computed("test:outliers", "bf16")
HARMLESS, STRONG, BEYOND = 1, 64, 1024  # factors of the keys' outliers: INT4 of 64 fails, INT8 too of 1024


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def decoder(factor: float, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config, chosen = parse_config(SHAPE, "a test's config"), recipe("bf16")
    of = load_decoder(RandomBlocks(chosen), config, chosen, dtype=dtype, device=torch.device("cpu"))
    put_outliers(of, factor)
    return of


def engine(
    factor: float, kv: str = "int4", notes: list[str] | None = None, reuse: KVReuse = IN_POOLS, **options: Any
) -> Engine:
    """With a probe where there are `notes` to be taken."""
    asked = Asked(COMPUTED, torch.bfloat16, kv)
    looks = None if notes is None else KVProbe(asked, notes.append)
    return Engine(
        decoder(factor),
        word_tokenizer(VOCAB),
        ctx=CTX,
        kv=kv,
        reuse=reuse,
        computed=COMPUTED,
        kv_probe=looks,
        **options,
    )


def test_a_format_that_changes_little_stays_and_nothing_is_said() -> None:
    notes: list[str] = []
    of = engine(HARMLESS, notes=notes)
    answers, _ = ask(of, tokens(300, seed=1))
    assert (of.kv_format.name, notes) == ("int4", [])
    assert answers == ask(engine(HARMLESS), tokens(300, seed=1))[0]


@pytest.mark.parametrize(("factor", "kv", "kept"), [(STRONG, "int4", "k8v4"), (BEYOND, "k8v4", "bf16")])
def test_a_format_that_changes_what_the_model_says_gives_way_to_the_next_that_does_not(
    factor: int, kv: str, kept: str
) -> None:
    notes: list[str] = []
    of = engine(factor, kv, notes)
    answers, _ = ask(of, tokens(300, seed=1))
    assert of.kv_format.name == of.residency.kv_pages.format.name == kept
    (note,) = notes
    begin, end = f"{kv} keys and values change what this model says: KL 0.", f"more than 0.03; they are kept in {kept}"
    assert note.startswith(begin) and " nats on 64 positions of this prompt" in note and note.endswith(end)
    assert answers == ask(engine(factor, kept), tokens(300, seed=1))[0]


def test_what_is_reused_after_the_change_gives_what_would_have_been_computed(tmp_path: Path) -> None:
    reuse, first, second = KVReuse(directory=tmp_path / "kv"), tokens(300, seed=1), tokens(20, seed=2)
    of = engine(STRONG, notes=[], reuse=reuse)
    ask(of, tokens(200, seed=1))  # too short to be compared: known in INT4, and not found in the format that follows
    assert ask(of, first)[1] == [0]
    answers, cached = ask(of, [*first, *second])
    of.close()
    expected, _ = ask(engine(STRONG, "k8v4"), [*first, *second])
    assert cached == [256] and answers == expected
    again = engine(STRONG, "k8v4", reuse=reuse)  # from the disk
    assert ask(again, [*first, *second]) == (expected, [256])
    again.close()


def test_pages_of_the_old_format_give_their_memory_back_at_once(tmp_path: Path) -> None:
    of = engine(HARMLESS, reuse=KVReuse(directory=tmp_path / "kv"))
    old = weakref.ref(of.residency.kv_pages.groups[0].dense)
    gc.collect()
    gc.disable()
    try:
        of.residency.use_format(KV_FORMATS["int8"])
        of.kv_supply.renew(None)
        assert old() is None
    finally:
        gc.enable()


def test_a_disk_that_refuses_is_told_of_once_whatever_the_format(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no folder")
    told: list[str] = []
    of = engine(HARMLESS, reuse=KVReuse(directory=tmp_path / "kv", warn=told.append))
    for _ in range(2):
        ask(of, tokens(100, seed=1))
        assert of.prefix is not None and of.prefix.disk is not None and of.prefix.disk.flush(10)
        of.kv_supply.renew(None)
    assert len(told) == 1


def test_keys_and_values_come_back_to_the_card_with_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cpu", 0)  # equal to the host in all but its name
    of = engine(HARMLESS, "int8")
    monkeypatch.setattr(Decoder, "kv_devices", property(lambda _: [card] * 2))
    of.residency.use_format(KV_FORMATS["int8"])
    assert of.residency.give_way(torch.OutOfMemoryError("full"), 1) and of.residency.kv_pages.is_on_host
    of.residency.take(SimpleNamespace(batch_rows=512, blocks=()))
    assert set(of.residency.kv_pages.groups[0].dense.devices) == {card}


def test_short_prompts_are_not_compared_and_the_first_long_one_is() -> None:
    notes: list[str] = []
    of = engine(STRONG, notes=notes)
    ask(of, tokens(LAST - 1, seed=1))
    assert not notes and of.kv_format.name == "int4"
    ask(of, tokens(LAST, seed=1))
    assert len(notes) == 1
    ask(of, tokens(LAST, seed=2))
    assert len(notes) == 1


def test_a_format_never_changes_under_a_sequence() -> None:
    notes: list[str] = []
    of = engine(STRONG, notes=notes)
    of.submit(Request(tuple(tokens(20, seed=1)), greedy()))
    of.step()
    of.submit(Request(tuple(tokens(300, seed=2)), greedy()))
    while of.has_work:
        of.step()
    assert not notes
    ask(of, tokens(300, seed=3))
    assert len(notes) == 1


def test_a_request_can_be_cancelled_while_its_prompt_is_compared() -> None:
    notes: list[str] = []
    of = engine(STRONG, notes=notes)
    request_id = of.submit(Request(tuple(tokens(300, seed=1)), greedy()))

    def cancel(event: object) -> None:
        assert isinstance(event, PrefillEvent) and event.done == 0
        of.abort(request_id)

    (finished,) = of.step(cancel)
    assert isinstance(finished, FinishedEvent) and finished.finish_reason == "cancelled"
    assert not notes and not of.has_work
    ask(of, tokens(300, seed=1))
    assert len(notes) == 1


def test_where_memory_is_too_short_to_compare_the_answer_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    of, forward = engine(STRONG, notes=notes), ModelRunner.forward

    def failing(self: ModelRunner, chunks: Any, **options: Any) -> Any:
        if options.get("all_logits"):
            raise MemoryError
        return forward(self, chunks, **options)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    answers, _ = ask(of, tokens(300, seed=1))
    assert not notes and answers == ask(engine(STRONG), tokens(300, seed=1))[0]


def test_a_divergence_is_zero_for_dense_pages_and_grows_with_the_outliers() -> None:
    ids = tokens(300, seed=1)
    found = [probe(engine(factor, "int4").residency, ids, lambda: False) for factor in (HARMLESS, STRONG, BEYOND)]
    assert all(verdict is not None for verdict in found)
    low, middle, high = (verdict.nats for verdict in found if verdict is not None)
    assert 0 < low < LIMIT_NATS < middle < high < math.inf


def test_a_probe_stops_where_it_is_told_to_and_leaves_nothing() -> None:
    of = engine(STRONG)
    with pytest.raises(StepCancelledError):
        probe(of.residency, tokens(300, seed=1), lambda: True)
    of.residency.kv_pages.check_integrity()


@pytest.mark.skipif(not cpu_linear.is_available(), reason="no CPU kernel runs on this machine")
@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_native_steps_are_compared_as_others_and_answer_afterwards_as_before(model: str) -> None:
    """One step, that has dense pages and coded ones in turn."""
    prompt, never = tuple(tokens(300, seed=1)), lambda: False
    of = random_engine("int4", IN_POOLS, model)
    assert of.runner.cpu_step is not None
    before, _ = ask(of, tokens(100, seed=2))
    alone = [
        _log_probabilities(random_engine("int4", IN_POOLS, model).residency, KV_FORMATS[kv], prompt, never)
        for kv in ("bf16", "int4")
    ]
    verdict = probe(of.residency, prompt, never)
    assert verdict is not None and verdict.nats == _divergence(*alone) > 0
    of.residency.kv_pages.check_integrity()
    assert ask(of, prompt)[0] == [computed("int4", prompt, model)] and ask(of, tokens(100, seed=2))[0] == before


# What is kept


def test_what_was_found_is_kept_for_this_model_weights_dtype_and_format() -> None:
    asked = Asked(COMPUTED, torch.bfloat16, "int4")
    assert asked.verdict() is None
    ask(engine(STRONG, notes=[]), tokens(300, seed=1))
    verdict = asked.verdict()
    assert verdict is not None and verdict.kv == "k8v4" and verdict.nats > LIMIT_NATS
    for other in (
        {"kv": "k8v4"},
        {"dtype": torch.float32},
        {"computed": Computed("test:outliers", "int8")},
        {"computed": Computed("another", "bf16")},
    ):
        assert dataclasses.replace(asked, **other).verdict() is None


def test_of_a_model_that_no_other_process_knows_nothing_is_kept(own_cache: Path) -> None:
    Asked(Computed("", "bf16"), torch.bfloat16, "int4").keep(Verdict("int8", 0.5))
    assert not own_cache.exists()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 2, "verdicts": {KEY: {"kv": "k8v4", "nats": 1}}}',
        '{"version": 1, "verdicts": {KEY: {"kv": "k2v2", "nats": 1}}}',
        '{"version": 1, "verdicts": {KEY: {"kv": "k8v4", "nats": NaN}}}',
        '{"version": 1, "verdicts": {KEY: 3}}',
        '{"version": 1, "verdicts": 3}',
        "\x00",
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(own_cache: Path, damage: str) -> None:
    asked = Asked(COMPUTED, torch.bfloat16, "int4")
    own_cache.mkdir()
    (own_cache / "kv_probes.json").write_text(damage.replace("KEY", json.dumps(asked.key)))
    assert asked.verdict() is None
    asked.keep(Verdict("int8", 0.5))
    assert asked.verdict() == Verdict("int8", 0.5)
    assert [path.name for path in own_cache.iterdir()] == ["kv_probes.json"]


def test_an_infinite_divergence_is_kept_too() -> None:
    asked = Asked(COMPUTED, torch.bfloat16, "int4")
    asked.keep(Verdict("bf16", math.inf))
    assert asked.verdict() == Verdict("bf16", math.inf)


def test_a_narrower_format_is_no_verdict() -> None:
    asked = Asked(COMPUTED, torch.bfloat16, "int8")
    asked.keep(Verdict("int4", 0.5))
    assert asked.verdict() is None


# Whole models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on the disk whose keys have outliers, in the weights of their norms."""
    directory = tmp_path_factory.mktemp("outliers")
    checkpoints.write_checkpoint(directory, "qwen3")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in (("k_norm", 256.0), ("q_norm", 1 / 256)):
            if part in name:
                tensor[[3, 3 + len(tensor) // 2]] *= factor  # RoPE turns them into each other
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


PROMPT = tuple(byte % 250 for byte in range(7, 2107, 7))


def loaded(folder: Path, notes: list[str], **options: Any) -> Engine:
    options = {"kv": "int4", "ctx": 512, "probes_kv": True} | options
    return Engine.load(folder, device="cpu", weights="bf16", watcher=Watcher(noting=notes.append), **options)


def answer(of: Engine) -> None:
    for event in of.generate(PROMPT, greedy(2)):
        assert not isinstance(event, FinishedEvent) or event.error is None, event


def test_a_later_start_begins_in_the_format_that_was_good_and_says_so(folder: Path) -> None:
    notes: list[str] = []
    of = loaded(folder, notes)
    assert of.plan is not None and of.plan.shape.kv == "int4"
    before = of.plan.shape.kv_bytes_per_token
    answer(of)
    (said,), kept = notes, of.kv_format.name
    assert kept != "int4" and of.plan.shape.kv == kept and of.plan.shape.kv_bytes_per_token > before
    again = loaded(folder, notes)
    assert again.plan is not None and again.plan.shape.kv == again.kv_format.name == kept
    answer(again)
    assert len(notes) == 2 and notes[1].endswith(f", as an earlier prompt showed; they are kept in {kept}")
    assert notes[1].split(" nats")[0] == said.split(" nats")[0]


def test_who_measures_a_format_gets_that_format(folder: Path) -> None:
    notes: list[str] = []
    answer(loaded(folder, notes))
    of = loaded(folder, notes, probes_kv=False)
    answer(of)
    assert of.kv_format.name == "int4" and len(notes) == 1


def test_a_job_keeps_the_format_that_it_began_with(folder: Path) -> None:
    notes: list[str] = []
    of = loaded(folder, notes, job=JobShape(2, 300, 400))
    answer(of)
    assert of.kv_format.name == "int4" and not notes
    answer(loaded(folder, notes))
    assert loaded(folder, notes, job=JobShape(2, 300, 400)).kv_format.name != "int4"


def test_where_a_wider_format_does_not_fit_the_format_stays_and_the_person_is_told(folder: Path) -> None:
    notes: list[str] = []
    of = loaded(folder, notes, ctx=2048)
    assert of.plan is not None
    tight = dataclasses.replace(of.plan, limits={"ram": of.plan.total_bytes("ram") + 1000})
    of.plan = of.residency.plan = tight
    answer(of)
    (note,) = notes
    assert of.kv_format.name == "int4" and of.plan is tight
    assert " would take " in note and "more than there is" in note and note.endswith(" with a smaller --ctx")


def test_a_plan_with_another_format_is_the_plan_that_is_made_for_it(folder: Path) -> None:
    int4, int8 = (loaded(folder, [], kv=kv, probes_kv=False) for kv in ("int4", "int8"))
    assert int4.plan is not None and int8.plan is not None
    other = with_kv(int4.plan, int4.residency, int8.kv_format)
    assert other.shape.kv_bytes_per_token == int8.plan.shape.kv_bytes_per_token
    assert other.shape.kv_bytes_per_sequence == int8.plan.shape.kv_bytes_per_sequence
    assert other.ledger["ram"]["kv"] == int8.plan.ledger["ram"]["kv"]


def test_a_kept_verdict_that_does_not_fit_leaves_what_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(loaded(folder, []))
    load = Loading.load

    def refusing(self: Loading, config: ModelConfig) -> LoadedModel:
        if self.kv != "int4":
            raise DoesNotFitError("it does not fit", why="it is too wide", fix="--ctx 1")
        return load(self, config)

    monkeypatch.setattr(Loading, "load", refusing)
    notes: list[str] = []
    of = loaded(folder, notes)
    answer(of)
    (note,) = notes
    assert of.kv_format.name == "int4"
    assert "as an earlier prompt showed" in note and re.search(" does not fit: --kv .* with a smaller --ctx$", note)


def test_heads_that_no_group_divides_keep_dense_pages_and_who_asked_for_others_is_told(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "narrow-heads")
    told = run_cli("run", model, "-p", "the fox", "--max-tokens", "2", "--kv", "int8", "--raw")
    told_line = "keys and values stay in bf16: int8 codes groups of 32 features, a head here has 16"
    assert told.code == 0 and told.err.splitlines().count(told_line) == 1
    assert told_line not in run_cli("run", model, "-p", "the fox", "--max-tokens", "2", "--raw").err


def test_a_command_says_what_was_found(folder: Path) -> None:
    prompt = "the fox and the lantern " * 20
    run = run_cli("run", folder, "-p", prompt, "--raw", "--max-tokens", "2", "--kv", "int4", "--ctx", "1024")
    assert run.code == 0 and "int4 keys and values change what this model says: KL" in run.err
    measured = run_cli("run", folder, "-p", prompt, "--raw", "--max-tokens", "2", "--kv", "int4", "--ctx", "1024")
    assert measured.code == 0 and "as an earlier prompt showed" in measured.err
