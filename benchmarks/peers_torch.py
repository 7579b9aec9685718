"""The sides that compute with torch: localllm through its Engine, and transformers. Workers: `... peers_torch SIDE`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers_protocol import UnavailableError, serve
from localllm import hub
from localllm.bench.target import installed_target, matrix_bytes, random_target
from localllm.bench.workload import Workload
from localllm.engine.events import FinishedEvent, TokenEvent
from localllm.engine.loader import Watcher
from localllm.engine.request import SamplingParams
from localllm.models.families import parse_config
from localllm.models.shapes import Shape
from localllm.offload.measurements.roofline import MemoryFloor
from localllm.settings import EngineConfig

READS = 8  # of the floor's buffer: a quarter of a second in all, so that one moment's disturbance is not the figure


class Localllm:
    """Requests through the Engine, as a front end makes them: sampling and detokenizing are in the time."""

    def load(
        self, *, shape: dict[str, Any], threads: int, weights: str, context: int, file: str = ""
    ) -> dict[str, Any]:
        """file: a GGUF file of the shape, whose own codes are computed with; "": random weights."""
        workload, started = Workload(context - 1, 0, (0,), 1), time.perf_counter()
        if file:
            os.environ["LOCALLLM_CACHE"] = str(Path(file).parent / "cache")
            config = EngineConfig(device="cpu", threads=threads)
            target = installed_target(hub.locate(file), config, workload, Watcher())
        else:
            shape_of = Shape("the benchmark's shape", parse_config(shape, "the benchmark's shape"), shape)
            config = EngineConfig(device="cpu", weights=weights, threads=threads)
            target = random_target(shape_of, config, workload)
        self.engine = target.engine
        self.floor: MemoryFloor | None = None
        return {
            "title": f"localllm {target.engine.weights}",
            "load_s": time.perf_counter() - started,
            "weight_bytes_per_token": matrix_bytes(self.engine.model),
            "version": f"torch {torch.__version__}",
            "cpu_features": torch.backends.cpu.get_cpu_capability(),
        }

    def prefill(self, *, tokens: int) -> float:
        started = time.perf_counter()
        (drawn,) = self._generate(tokens, 1)
        return drawn - started

    def decode(self, *, tokens: int, depth: int) -> float:
        """The first token comes of the prompt, so one more is drawn than is timed."""
        drawn = self._generate(depth, tokens + 1)
        return drawn[-1] - drawn[0]

    def dram_read(self) -> float:
        """GB/s of reading a buffer far larger than the caches, as `localllm bench` measures it."""
        self.floor = self.floor or MemoryFloor()
        return statistics.median(self.floor.dram_read_gbs() for _ in range(READS))

    def _generate(self, prompt_tokens: int, num_tokens: int) -> list[float]:
        """When each token was drawn."""
        prompt = torch.randint(0, self.engine.model.config.vocab_size, (prompt_tokens,)).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        drawn = []
        for event in self.engine.generate(prompt, sampling):
            if isinstance(event, TokenEvent):
                drawn.append(time.perf_counter())
            elif isinstance(event, FinishedEvent) and event.error is not None:
                raise event.error
        assert len(drawn) == num_tokens
        return drawn


class Transformers:
    """AutoModelForCausalLM with its defaults on a CPU: bf16, scaled dot product attention, a cache that grows."""

    def load(self, *, shape: dict[str, Any], threads: int) -> dict[str, Any]:
        try:
            import transformers
        except ImportError as error:
            raise UnavailableError(
                f"transformers cannot be imported ({error})", 'pip install "transformers>=5.20,<6"'
            ) from error
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        try:
            config = transformers.AutoConfig.for_model(**shape)
        except ValueError as error:
            raise UnavailableError(f"transformers does not know the model type {shape['model_type']}") from error
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model = model.to_empty(device="cpu").eval()
        self.model.tie_weights()  # which are two matrices since
        for parameter in self.model.parameters():
            parameter.data.normal_(std=0.02)
        # `to_empty` leaves buffers without values: those of RoPE are made anew, others change no choice of experts.
        for buffer in self.model.buffers():
            buffer.zero_()
        if rotary := getattr(self.model.model, "rotary_emb", None):
            self.model.model.rotary_emb = type(rotary)(config)
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "weight_bytes_per_token": _read_bytes(self.model),
        }

    @torch.inference_mode()
    def prefill(self, *, tokens: int) -> float:
        prompt = self._prompt(tokens)
        started = time.perf_counter()
        self.model(prompt, logits_to_keep=1, use_cache=True)
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, *, tokens: int, depth: int) -> float:
        clock = _Clock()
        self.model.generate(
            self._prompt(depth),
            max_new_tokens=tokens + 1,
            min_new_tokens=tokens + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
        )
        _prompt, first, *rest = clock.drawn
        assert len(rest) == tokens
        return rest[-1] - first

    def _prompt(self, tokens: int) -> torch.Tensor:
        return torch.randint(0, self.model.config.vocab_size, (1, tokens))


def _read_bytes(model: Any) -> int:
    """Return the bytes of the parameters that a token reads: of experts those of a token; of the embedding none, unless
    it is the head."""
    total = 0
    for name, parameter in model.named_parameters():
        if parameter is model.get_input_embeddings().weight and not model.config.tie_word_embeddings:
            continue
        chosen = model.config.num_experts_per_tok / len(parameter) if ".experts." in name else 1
        total += int(parameter.nbytes * chosen)
    return total


class _Clock:
    """A streamer of transformers: it is given the prompt, then each token."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.drawn.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


if __name__ == "__main__":
    serve({"localllm": Localllm, "transformers": Transformers}[sys.argv[1]]())
