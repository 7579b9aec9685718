"""Adapters on a card whose streams run late: the text is that of operators, wherever blocks are."""

from __future__ import annotations

from itertools import cycle, product

import pytest

from localllm.engine.events import TokenEvent
from localllm.engine.request import AdapterRef, Request
from localllm.layers.gpu_low_rank import RowAdapters
from tests.adapters import write_peft_adapter
from tests.checkpoints import write_checkpoint
from tests.engine_support import answered, steps
from tests.simulated_card.device import DEVICE, CardConfig
from tests.simulated_card.support import blocks, packed_in_formats
from tests.simulated_card.test_placements import wish
from tests.thinning import one_in

SCHEDULES = ["lazy", "copies-early", "copies-late", "random"]
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A packed model, and requests with one adapter, none, both, and the other."""
    folder = tmp_path_factory.mktemp("adapted")
    peer = write_checkpoint(folder / "model", "llama", layers=3, **SIZES)
    few = {"r": 9, "target_modules": ["q_proj", "down_proj"]}
    for number, options in enumerate(({}, few)):
        write_peft_adapter(folder / str(number), peer, seed=number, **options)
    refs = [AdapterRef(str(folder / str(number)), scale=1 - number / 4) for number in range(2)]
    requests = [
        Request(tuple(range(3, 3 + length)), wish(length % 7 + 3, length), adapters=own)
        for length, own in ((18, (refs[0],)), (5, ()), (70, (refs[1], refs[0])), (12, (refs[1],)))
    ]
    return packed_in_formats(folder / "model", folder)["int8"], requests


@pytest.fixture(scope="module")
def expected(adapted):
    """The texts on the CPU, where each adapter is in the model's dtype as it is on a card."""
    packed, requests = adapted
    with packed.opened() as placed:
        placed.place(blocks(packed, "resident"), 8)
        engine = packed.engine(placed)
        engine.runner.cpu_program = None
        return [answered(engine, request)[0].token_ids for request in requests]


@pytest.fixture
def added(monkeypatch):
    """The sites to which our kernels have added."""
    sites, add = list[str](), RowAdapters.add

    def counted(adapters, site, x, y):
        sites.append(site)
        add(adapters, site, x, y)

    monkeypatch.setattr(RowAdapters, "add", counted)
    return sites


@pytest.mark.parametrize(("schedule", "placement"), one_in(2, product(SCHEDULES, ["resident", "streamed", "mixed"])))
def test_the_text_is_that_of_operators_beside_any_other(schedule, placement, adapted, expected, added, simulated_card):
    packed, requests = adapted
    with simulated_card(CardConfig(schedule)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, placement), 8)
        engine = packed.engine(placed)
        program = engine.runner.gpu_program
        assert [heard.token_ids for heard in answered(engine, *requests)] == expected
        assert engine.runner.gpu_program is program is not None, "nothing was given up"
        assert {"head", "layers.0.attention.o_proj", "layers.2.mlp.down_proj"} <= {*added} or placement == "mixed"


@pytest.mark.parametrize("schedule", one_in(2, SCHEDULES))
def test_adapters_move_with_their_blocks_while_answers_are_written(schedule, adapted, expected, added, simulated_card):
    packed, requests = adapted
    with simulated_card(CardConfig(schedule, seed=1)), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "resident"), 8)
        engine, placements = packed.engine(placed), cycle(["streamed", "mixed", "resident"])
        texts = {engine.submit(request): list[int]() for request in requests}
        for number, event in enumerate(event for event in steps(engine) if isinstance(event, TokenEvent)):
            texts[event.request_id].append(event.token_id)
            if number % 5 == 4:
                engine.residency.move(blocks(packed, next(placements)))
        assert list(texts.values()) == expected and added


@pytest.mark.slow
def test_the_kernels_themselves_write_the_text_of_operators(adapted, expected, simulated_card):
    packed, requests = adapted
    with simulated_card(CardConfig("lazy"), "interpreted"), packed.opened(DEVICE) as placed:
        placed.place(blocks(packed, "mixed"), 8)
        texts = [heard.token_ids for heard in answered(packed.engine(placed), requests[0], requests[3])]
        assert texts == [expected[0], expected[3]]
