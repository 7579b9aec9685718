"""The plan of a machine with a GPU: nothing beyond its limits, and never slower than one kind of placement alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.engine.placement import model_shape
from localllm.errors import DoesNotFitError, Fix
from localllm.models.families import parse_config
from localllm.models.shapes import shipped_shapes
from localllm.offload.placement import GRAPH_ROOMS
from localllm.offload.planner.calibration import Corrections, Term
from localllm.offload.planner.card_placements import CardPlacements, _Amount
from localllm.offload.planner.costs import Costs, Work
from localllm.offload.planner.machine import Card, CardMemory, CardRates, Machine, Memory, Rates
from localllm.offload.planner.model_shape import ExpertShape, ModelShape, Packing
from localllm.offload.planner.plan import GIB, JobShape, Plan, cap
from localllm.offload.planner.search import Search
from localllm.offload.streaming.ring import ring_bytes
from localllm.quant.recipe import RECIPES

RATES = Rates(matrix_gbs=45.0, compute_gops=1200.0, disk_gbs=3.0)
CARD = CardRates(matrix_gbs=400.0, compute_gops=40_000.0, link_gbs=24.0, launch_s=5e-6, hop_s=60e-6)
CONTEXT, NODE_BYTES = 500 << 20, 64 << 10


def registry_shape(name: str) -> ModelShape:
    config = parse_config(shipped_shapes()[name], name)
    return model_shape(config, RECIPES["int4-g64"], "bf16", name)


SHAPES = {name: registry_shape(name) for name in ("llama-3.1-8b", "llama-3.3-70b", "qwen3-0.6b", "mistral-7b")}
# No registered model has the larger blocks in its attention, or but one layer; a checkpoint may.
_MISTRAL = SHAPES["mistral-7b"].blocks
SHAPES["wide attention"] = replace(
    SHAPES["mistral-7b"],
    blocks=tuple(replace(block, num_bytes=_MISTRAL[(index + 1) % 2].num_bytes) for index, block in enumerate(_MISTRAL)),
)
SHAPES["one layer"] = replace(SHAPES["mistral-7b"], blocks=_MISTRAL[:2])


def test_what_attention_leaves_for_its_last_step_is_in_the_ledger() -> None:
    """Of a card's step of the most rows, by the length of the context; as the step makes room for it."""
    pytest.importorskip("triton")
    from localllm.kernels.gpu.attention_merge import new_parts
    from localllm.layers.gpu_tables import FEW_ROWS, TableShape, table_pages

    config = parse_config(shipped_shapes()["llama-3.1-8b"], "it")
    shape = model_shape(config, RECIPES["int4-g64"], "bf16", "it", "cuda")
    for ctx, sequences, most in ((200, 1, 200), (257, 2, 3712), (8192, 8, 8192), (100_000, 1, 3712)):  # most: that stay
        shape = replace(shape, table_tokens=most)
        with_them, without = (
            CardPlacements(one, search("llama-3.1-8b", 70.0).machine)._vram_owners(
                _Amount(ctx, sequences, ctx * sequences, 512, 512, config.num_layers)
            )["activations"]
            for one in (shape, replace(shape, section_bytes=0))
        )
        tables = TableShape(FEW_ROWS, FEW_ROWS, FEW_ROWS, table_pages(min(ctx, most), FEW_ROWS), 1)
        parts = new_parts(tables.sections, FEW_ROWS, config.attentions[0].num_heads, config.attentions[0].head_dim)
        assert with_them - without == sum(part.nbytes for part in (parts.mixed, parts.peaks, parts.totals))


def search(
    name: str,
    vram: float,
    ram: float = 32.0,
    ctx: int | None = None,
    job: JobShape | None = None,
    *,
    shape: ModelShape | None = None,
    rates: Rates = RATES,
    card_rates: CardRates = CARD,
) -> Search:
    """vram, ram: GiB."""
    card = CardMemory(int(vram * GIB), CONTEXT, 64 << 20, 80 * GIB, 80 * GIB, NODE_BYTES)
    memory = Memory(int(ram * GIB), GIB, 64 * GIB, 64 * GIB)
    machine = Machine(memory, rates, Card(card, card_rates))
    return Search(shape or SHAPES[name], machine, ctx, job)


def test_graphs_have_an_owner_and_those_of_a_draft_model_too() -> None:
    """As many as are kept, with a node for each launch; none where nothing is captured."""
    of = search("llama-3.1-8b", 24)
    node_bytes = of.best().ledger["vram"]["graphs"]
    assert node_bytes == GRAPH_ROOMS * (2 * 32 * 6.5 + 8) * NODE_BYTES
    drafting = replace(of, shape=replace(of.shape, draft_bytes=GIB, draft_blocks=32))
    assert drafting.best().ledger["vram"]["graphs"] == GRAPH_ROOMS * (3 * 32 * 6.5 + 8) * NODE_BYTES
    assert of.machine.card is not None
    memory = replace(of.machine.card.memory, graph_node_bytes=0)
    without = replace(of, machine=replace(of.machine, card=replace(of.machine.card, memory=memory)))
    assert "graphs" not in without.best().ledger["vram"]


def test_a_mixtures_launches_are_counted_where_it_has_more_than_an_mlp() -> None:
    """In what its graphs take, and in how long a step of our kernels is."""
    of = search("llama-3.1-8b", 24, card_rates=replace(CARD, is_fused=True))
    experts = ExpertShape(count=8, active=2, num_bytes=1 << 20, shared_launches=4)
    blocks = [replace(block, experts=experts if index % 2 else None) for index, block in enumerate(of.shape.blocks)]
    shape = replace(of.shape, blocks=tuple(blocks))
    plan = replace(of, shape=shape).best()
    assert plan.ledger["vram"]["graphs"] == GRAPH_ROOMS * (2 * 32 * 6.5 + 3 * 32 * 5 + 8) * NODE_BYTES
    few, more = (
        replace(plan.costs, shape=each, card=replace(CARD, is_fused=True, launch_s=1.0)) for each in (of.shape, shape)
    )
    assert more._device_s(1) - few._device_s(1) == pytest.approx(32 * 5, abs=0.1)


QWEN3_30B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [3], "rope_theta": 1e6,
}  # fmt: skip
FUSED = replace(CARD, is_fused=True, launches=4.5, launch_s=1.5e-6)


def mixture_search(vram: float, ram: float = 32.0, card_rates: CardRates = FUSED) -> Search:
    """One of its layers has no experts."""
    shape = model_shape(parse_config(QWEN3_30B, "it"), RECIPES["int4-g64"], "bf16", "it", "cuda")
    return search("it", vram, ram, shape=shape, card_rates=card_rates)


@pytest.mark.parametrize("vram", [4, 8, 12])
def test_experts_have_as_many_slots_as_there_is_room_for_beside_all_else(vram: int) -> None:
    of = mixture_search(vram)
    plan = of.best()
    check(plan)
    slotted = [block for block in plan.blocks if block.is_slotted]
    assert {block.name for block in slotted} == {block.name for block, _ in of.shape.mixtures} and len(slotted) == 47
    (slots,) = {block.experts.slots for block in slotted if block.experts}
    assert plan.ledger["vram"]["experts"] == sum(slots * experts.num_bytes for _, experts in of.shape.mixtures)
    one_more = sum(experts.num_bytes for _, experts in of.shape.mixtures)
    assert one_more > plan.limits["vram"] - plan.total_bytes("vram") >= 0
    others = [block for block in plan.blocks[1:] if not block.is_slotted]
    assert all(block.tier == "vram" for block in others) and plan.many_rows == 17
    assert plan.costs.work.passing_bytes >= of.shape.expert_bytes


def test_more_slots_make_steps_shorter_and_fewer_than_all_of_them_take_longer_than_none_beside() -> None:
    seconds = [mixture_search(vram).best().decode_s for vram in (3, 4, 6, 8, 24)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[-1]


def test_experts_that_the_hosts_memory_cannot_hold_are_refused_with_numbers_and_what_helps() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        mixture_search(6, ram=12).best()
    assert "experts rest in memory" in refused.value.why and "all experts 14." in refused.value.why
    assert Fix.flag("--device", "cpu") in refused.value.fixes


def test_operators_have_no_slots() -> None:
    assert not any(block.is_slotted for block in mixture_search(8, card_rates=CARD).best().blocks)


def check(plan: Plan) -> None:
    """Every byte is in the ledger once, and no limit is passed."""
    shape = plan.shape
    assert [block.name for block in plan.blocks] == [b.name for b in (shape.embed, *shape.blocks, shape.head)]
    for tier in ("vram", "ram"):
        assert plan.total_bytes(tier) <= plan.limits[tier], tier
    held = {tier: [block for block in plan.blocks if block.tier == tier] for tier in ("vram", "ram", "disk")}
    slots = sum(block.experts.slots * block.experts.num_bytes for block in held["ram"] if block.experts)
    device_bytes = sum(block.device_bytes + block.slotted_bytes for block in held["ram"]) - slots
    rest = sum(block.num_bytes - block.device_bytes for block in held["ram"] if block.exec == "split")
    assert plan.ledger["vram"].get("weights", 0) == sum(block.num_bytes for block in held["vram"]) + device_bytes
    assert plan.ledger["ram"].get("weights", 0) == sum(block.num_bytes for block in held["ram"]) + rest
    assert plan.ledger["disk"]["weights"] == sum(block.num_bytes for block in held["disk"])
    passing = [block for block in plan.blocks[1:] if block.tier != "vram" and block.name != "head"]
    # In a step of a few tokens.
    by_few = [block for block in passing if block.exec == "gpu" and not block.is_slotted]
    ring = max(ring_bytes([block.num_bytes for block in some]) for some in (passing, by_few))
    assert plan.ring_bytes == ring == plan.ledger["vram"].get("staging", 0)
    on_device = [block.exec == "gpu" for block in plan.blocks[1:-1:2]]
    kv_bytes = shape.kv_bytes(plan.kv_tokens, plan.sequences)
    assert plan.ledger["vram"].get("kv", 0) == pytest.approx(kv_bytes * sum(on_device) / len(on_device), abs=1)
    assert (plan.ledger["vram"].get("kv", 0) + plan.ledger["ram"].get("kv", 0)) == pytest.approx(kv_bytes, abs=1)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    vram=st.floats(0.6, 30),
    ram=st.floats(2, 64),
    ctx=st.sampled_from([None, 256, 4096]),
    sequences=st.sampled_from([1, 8]),
)
def test_a_plan_stays_within_both_memories_or_says_what_would_do(
    name: str, vram: float, ram: float, ctx: int | None, sequences: int
) -> None:
    job = None if sequences == 1 else JobShape(sequences, 300, 600)
    of = search(name, vram, ram, ctx, job)
    try:
        plan = of.best()
    except DoesNotFitError as error:
        assert "iB" in error.why
        if error.fix.startswith("--vram"):
            least = replace(of.with_vram(of.least_vram_bytes() + (16 << 20)), job=None)
            check(least.with_ram(64 * GIB).best())
        return
    check(plan)


@pytest.mark.parametrize("vram", [2.5, 4, 6, 8, 12])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.3-70b"])
def test_a_plan_is_as_fast_as_streaming_alone_and_as_the_host_alone(name: str, vram: float) -> None:
    """Where the host is too slow to help, and where the link is, other plans are made; the best is never worse."""
    best = search(name, vram, ram=48.0, ctx=2048).best()
    streaming = search(name, vram, ram=48.0, ctx=2048, rates=replace(RATES, compute_gops=1e-3)).best()
    computing = search(name, vram, ram=48.0, ctx=2048, card_rates=replace(CARD, link_gbs=1e-3)).best()
    for other in (streaming, computing):
        check(other)
        work = other.costs.work
        again = Costs(other.shape, RATES, CARD, work, other.pass_tokens)
        assert best.decode_s <= 1.02 * again.decode_s(best.prompt_tokens)


def test_what_fits_stays_on_the_device_and_more_memory_never_makes_it_slower() -> None:
    whole = search("llama-3.1-8b", 12).best()
    assert whole.is_whole and whole.ring_bytes == 0 and whole.bound_by == "memory"
    rates = [search("llama-3.3-70b", vram, ram=64, ctx=2048).best().decode_tok_s for vram in (4, 6, 8, 12, 16, 24, 48)]
    assert rates == sorted(rates) and rates[-1] > 5 * rates[0]


def test_keys_and_values_go_to_the_host_where_a_long_context_leaves_no_room() -> None:
    plan = search("llama-3.1-8b", 4, ctx=65536).best()
    check(plan)
    assert plan.ledger["ram"]["kv"] > plan.ledger["vram"].get("kv", 0)
    assert {"cpu", "gpu"} == {block.exec for block in plan.blocks[1:] if block.exec != "split"}


def test_a_prompt_is_copied_once_for_all_its_tokens() -> None:
    plan = search("llama-3.1-8b", 4, ctx=4096).best()
    assert 2 <= plan.many_rows <= 512 and plan.costs.prompt_s(2048) < 4 * plan.costs.prompt_s(512)
    assert plan.costs.prompt_s(512) < 512 * plan.costs.decode_s(256) / 20


def test_a_prompt_waits_for_what_is_copied_where_the_device_computes_everything() -> None:
    """Also where the host computes nothing, and where more tokens are read than pass at once."""
    shape = SHAPES["llama-3.1-8b"]
    work = Work(0, 0, 0, 3_600_000_000, 64, 2_400_000_000, 2_400_000_000, 0, 1.0)
    costs = Costs(shape, RATES, replace(CARD, link_gbs=2.4), work, 256)
    assert costs.prompt_s(256) == pytest.approx(1.0, rel=0.01)
    assert costs.prompt_s(512) == pytest.approx(2.0, rel=0.01)
    assert replace(costs, work=replace(work, disk_bytes=6_000_000_000)).prompt_s(256) == pytest.approx(2.0, rel=0.01)


def test_a_step_costs_the_longest_of_what_goes_on_side_by_side() -> None:
    shape = SHAPES["llama-3.1-8b"]
    work = Work(900_000_000, 0, 0, 2_000_000_000, 20, 1_200_000_000, 2_100_000_000, 10, 1.0)
    card = replace(CARD, launch_s=0.0, hop_s=1e-4)
    costs = Costs(shape, RATES, card, work, 2048)
    serial = 2 / 400 + 0.9 / 45 + 10e-4 + 0.7e-3
    assert costs.decode_s(0) == pytest.approx(max(serial, 1.2 / 24), rel=1e-6) and costs.bound_by() == "link"
    faster = replace(costs, card=replace(card, link_gbs=240.0))
    assert faster.decode_s(0) == pytest.approx(max(serial, 2.1 / 45), rel=1e-6)
    assert replace(costs, work=replace(work, copied_bytes=0)).decode_s(0) == pytest.approx(serial, rel=1e-6)
    assert replace(costs, work=replace(work, disk_bytes=900_000_000)).bound_by() == "disk"
    corrected = replace(costs, corrections=Corrections({Term("both", "step", "link"): 1.5}))
    assert corrected.decode_s(0) == pytest.approx(1.5 * 1.2 / 24)


def check_best(of: Search) -> None:
    check(replace(of).best())  # of a search that remembers no plan


def least_cpu_s(work: Callable[[], object]) -> float:
    """Of three times: what else this machine does, and how fast it is, count for both sides alike."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)


def test_every_model_of_the_registry_is_planned_while_python_counts_to_two_million() -> None:
    """Which takes 42 ms where the largest plan takes 22: 50 were to be the most there."""
    most_s = least_cpu_s(lambda: sum(1 for _ in range(2_000_000)))
    searches = {name: replace(search("mistral-7b", 8), shape=registry_shape(name)) for name in shipped_shapes()}
    for name, of in searches.items():
        assert least_cpu_s(partial(check_best, of)) < most_s, name


def test_too_little_memory_beside_the_device_names_what_takes_it_and_the_least_that_would_do() -> None:
    of = search("llama-3.1-8b", 3, ram=1.2, ctx=2048)
    with pytest.raises(DoesNotFitError, match="memory beside the GPU") as caught:
        of.best()
    assert "the program 1.00 GiB" in caught.value.why and "the embedding" in caught.value.why
    least = of.least_ram_bytes()
    assert caught.value.fix.split(", or ")[0] == f"--ram {cap(least)}"
    check(of.with_ram(least).best())


def test_what_must_be_packed_first_needs_the_hosts_memory_for_that() -> None:
    of = search("llama-3.1-8b", 6, ram=4.0, ctx=2048)
    unpacked = replace(of, shape=replace(of.shape, packing=Packing(4 * GIB, "localllm quantize it")))
    assert of.best() and unpacked.least_ram_bytes() == 5 * GIB
    with pytest.raises(DoesNotFitError, match=r"cannot be packed in 4.00 GiB") as caught:
        unpacked.best()
    assert caught.value.fix == "--ram 5GiB, or localllm quantize it"
    check(unpacked.with_ram(5 * GIB).best())


def test_a_context_that_does_not_fit_is_named_among_what_takes_the_memory_and_so_is_one_that_fits() -> None:
    of = search("llama-3.1-8b", 3, ram=6, ctx=131072)
    with pytest.raises(DoesNotFitError) as caught:
        of.best()
    assert "131072 tokens of context" in caught.value.why
    shorter = caught.value.fix.split(", or --ctx ")[1]
    check(replace(of, ctx=int(shorter)).best())


def test_a_card_that_is_slower_than_the_host_is_left_alone() -> None:
    """As where there is no kernel for a format: the host then computes all that it can."""
    slow = search("llama-3.1-8b", 24, card_rates=replace(CARD, matrix_gbs=5.0)).best()
    check(slow)
    assert all(block.exec == "cpu" for block in slow.blocks)


def test_what_the_device_computes_alone_is_corrected_apart_from_what_the_host_helps_with() -> None:
    shape = SHAPES["llama-3.1-8b"]
    shared = Work(900_000_000, 0, 0, 2_000_000_000, 20, 0, 900_000_000, 10, 1.0)
    corrections = Corrections({Term("gpu", "step", "memory"): 3.0, Term("gpu", "prompt", "compute"): 3.0})
    plain, corrected = (Costs(shape, RATES, CARD, shared, 2048, given) for given in (Corrections(), corrections))
    assert corrected.decode_s(100) == plain.decode_s(100) and corrected.prompt_s(900) == plain.prompt_s(900)
    plain, corrected = (replace(costs, work=replace(shared, host_bytes=0, hops=0)) for costs in (plain, corrected))
    assert corrected.decode_s(100) == pytest.approx(3 * plain.decode_s(100))
    assert corrected.prompt_term(900) == Term("gpu", "prompt", "compute")
    assert corrected.prompt_s(900) > 2.5 * plain.prompt_s(900)
