"""Decode and prefill in bf16 beside transformers and the DRAM floor, in the shape of TinyLlama-1.1B, random weights.

    python -m benchmarks.baseline [--rounds 5] [--prompt-tokens 512] [--gen-tokens 32]

Every figure is taken in turn with the others in one process; the ratio counts, not the absolute time. The floor of
decode is the time in which the bytes of one token (all matrices but the input embedding) can be read from memory.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.measure import interleaved, machine, paired, save, seconds, spread
from localllm.bench.subject import Subject, matrix_bytes, random_subject
from localllm.engine.events import TokenEvent
from localllm.engine.request import SamplingParams
from localllm.models.families import parse_config
from localllm.models.shapes import Shape, shipped_shapes
from localllm.offload.planner.roofline import MemoryFloor
from localllm.quant.recipe import recipe

NAME = "tinyllama-1.1b"
SHAPE = shipped_shapes()[NAME]
DECODE_PROMPT = 128


class Ours:
    def __init__(self, subject: Subject) -> None:
        self.engine = subject.engine

    def generate(self, prompt: list[int], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        events = list(self.engine.generate(prompt, sampling))
        assert sum(isinstance(event, TokenEvent) for event in events) == num_tokens

    def prefill(self, prompt: list[int]) -> None:
        self.generate(prompt, 1)


class Transformers:
    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(**{key: value for key, value in SHAPE.items() if key != "model_type"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = model.to_empty(device="cpu").eval()
        for parameter in self.model.parameters():
            parameter.data.normal_(std=0.02)
        # `to_empty` leaves the rotary buffers without values; they are not parameters, and are made anew.
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> None:
        out = self.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == len(prompt) + num_tokens

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> None:
        self.model(torch.tensor([prompt]), logits_to_keep=1, use_cache=True)


def measure(rounds: int, prompt_tokens: int, gen_tokens: int) -> dict[str, object]:
    config = parse_config(SHAPE, f"the shape of {NAME}")
    device, ctx = torch.device("cpu"), config.max_position_embeddings
    subject = random_subject(Shape(NAME, config, {}), recipe("bf16"), torch.bfloat16, device, ctx)
    ours, peer = Ours(subject), Transformers()
    short = torch.randint(0, config.vocab_size, (DECODE_PROMPT,)).tolist()
    long = torch.randint(0, config.vocab_size, (prompt_tokens,)).tolist()
    memory = MemoryFloor()

    def decode_rate(side: Ours | Transformers) -> float:
        """The time of many tokens less that of few: what is left is decode alone, for both sides alike."""
        few = seconds(lambda: side.generate(short, 4))
        many = seconds(lambda: side.generate(short, 4 + gen_tokens))
        return gen_tokens / (many - few)

    values = interleaved(
        {
            "dram_read_gbs": memory.dram_read_gbs,
            "decode_tok_s": lambda: decode_rate(ours),
            "transformers_decode_tok_s": lambda: decode_rate(peer),
            "prefill_tok_s": lambda: prompt_tokens / seconds(lambda: ours.prefill(long)),
            "transformers_prefill_tok_s": lambda: prompt_tokens / seconds(lambda: peer.prefill(long)),
        },
        rounds,
    )
    token_bytes = matrix_bytes(subject.engine.model)
    floor = [gbs * 1e9 / token_bytes for gbs in values["dram_read_gbs"]]
    figures = {name: spread(samples) for name, samples in {**values, "decode_floor_tok_s": floor}.items()}
    return {
        "machine": machine(),
        "model": f"{NAME} shape, random weights, bf16",
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "rounds": rounds,
        "bytes_per_token": token_bytes,
        **figures,
        "decode_vs_transformers": paired(values["decode_tok_s"], values["transformers_decode_tok_s"]),
        "decode_vs_floor": paired(values["decode_tok_s"], floor),
        "prefill_vs_transformers": paired(values["prefill_tok_s"], values["transformers_prefill_tok_s"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=32)
    arguments = parser.parse_args()
    result = measure(arguments.rounds, arguments.prompt_tokens, arguments.gen_tokens)
    for name, value in result.items():
        print(f"{name:28} {value}")
    print("saved", save("baseline", result))


if __name__ == "__main__":
    main()
