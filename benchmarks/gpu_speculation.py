"""What guesses give on the card, and cost where they are wrong: a process, `python -m benchmarks.gpu_speculation`.

The model of gpu_resident, first all on the card, then with every other MLP copied to it at each step; the rows are
those of benchmarks.speculation, by its oracle.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from benchmarks.gpu_resident import resident
from benchmarks.measure import paired
from benchmarks.peers_protocol import serve
from benchmarks.speculation import oracle_row
from benchmarks.speculation_engine import guess, ids, run
from benchmarks.speculation_never import Wrong
from localllm.engine.engine import Engine
from localllm.engine.memory import choose_device
from localllm.engine.speculative.config import OFF, Speculate

_CTX = 512
_SHARES = ((0.8, 4), (0.8, 8), (0.95, 8), (0.6, 4), (0.3, 2), (0.6, 8), (0.95, 4), (0.3, 8))  # the most telling first


class SpeculationRows:
    def rows(self, *, device: str, seconds: float, rounds: int, small: bool) -> dict[str, Any]:
        """As many as there is time for; of each placement the same."""
        until, found = time.monotonic() + seconds, []
        engine = resident(choose_device(device), _CTX, "int8", lambda _text: None, small=small)
        tokens, shares = (4, _SHARES[:1]) if small else (128, _SHARES)
        for placement in ("resident", "streamed"):
            if placement == "streamed":
                _stream_some(engine)
            half = time.monotonic() + (until - time.monotonic()) / (2 if placement == "resident" else 1)
            found.append(_wrong_row(engine, placement, rounds, tokens))
            for alpha, count in shares:
                if time.monotonic() < half:
                    found.append(oracle_row(engine, placement, alpha, count, rounds, tokens))
        return {"rows": [{key: _plain(value) for key, value in row.items()} for row in found]}


def _wrong_row(engine: Engine, placement: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Of the controller where every guess that is offered is wrong."""
    prompt = ids(64, engine.config.vocab_size, 1)
    guess(engine, OFF)
    expected = (*prompt, *run(engine, prompt, tokens).token_ids)
    guess(engine, Speculate("ngram"), Wrong({prompt: expected}, engine.config.vocab_size))
    guessing, plain, guessed = engine.speculation, list[float](), list[float]()
    run(engine, prompt, tokens)
    for _ in range(rounds):
        guess(engine, OFF)
        plain.append(run(engine, prompt, tokens).seconds)
        engine.speculation = guessing
        guessed.append(run(engine, prompt, tokens).seconds)
    return {"placement": placement, "alpha": 0.0, "k": 8, "speedup": paired(plain, guessed)}


def _stream_some(engine: Engine) -> None:
    """Every other MLP rests in the host's memory, and is copied to the card at each step."""
    blocks = []
    for number, block in enumerate(engine.residency.blocks):
        is_copied = block.name.endswith(".mlp") and number % 4 == 2
        blocks.append(replace(block, tier="ram", exec="gpu") if is_copied else block)
    engine.move(blocks)


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


if __name__ == "__main__":
    serve(SpeculationRows())
