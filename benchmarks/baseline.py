"""Decode and prefill in bf16 beside transformers and the DRAM floor, in the shape of TinyLlama-1.1B, random weights.

    python -m benchmarks.baseline [--rounds 5] [--prompt-tokens 512] [--gen-tokens 32]

Every figure is taken in turn with the others in one process; the ratio counts, not the absolute time. The floor of
decode is the time in which the bytes of one token (all matrices but the input embedding) can be read from memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Spread, dram_read_gbs, interleaved, machine, save, seconds, spread
from benchmarks.random_model import random_decoder
from localllm.engine.engine import Engine
from localllm.engine.events import TokenEvent
from localllm.engine.request import SamplingParams
from localllm.engine.tokenizer import Tokenizer
from localllm.models.config import ModelConfig
from localllm.models.families import parse_config
from localllm.models.layout import model_bytes
from localllm.quant.dense import Dense
from localllm.quant.recipe import Recipe

TINYLLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
DECODE_PROMPT = 128


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """One word an id: the engine must turn ids into text here as for any model."""
    vocab = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    description: dict[str, Any] = {"version": "1.0", "model": model, "added_tokens": [], "normalizer": None}
    description |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
        return Tokenizer.load(Path(directory))


class Ours:
    def __init__(self, config: ModelConfig) -> None:
        tokenizer = word_tokenizer(config.vocab_size)
        self.engine = Engine(random_decoder(config), tokenizer, ctx=config.max_position_embeddings)

    def generate(self, prompt: list[int], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        events = list(self.engine.generate(prompt, sampling))
        assert sum(isinstance(event, TokenEvent) for event in events) == num_tokens

    def prefill(self, prompt: list[int]) -> None:
        self.generate(prompt, 1)


class Transformers:
    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(**{key: value for key, value in TINYLLAMA.items() if key != "model_type"})
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
    config = parse_config(TINYLLAMA, "TinyLlama-1.1B's shape")
    ours, peer = Ours(config), Transformers()
    short = torch.randint(0, config.vocab_size, (DECODE_PROMPT,)).tolist()
    long = torch.randint(0, config.vocab_size, (prompt_tokens,)).tolist()
    buffer = torch.empty(1 << 28).normal_()  # 1 GiB

    def decode_rate(side: Ours | Transformers) -> float:
        """The time of many tokens less that of few: what is left is decode alone, for both sides alike."""
        few = seconds(lambda: side.generate(short, 4))
        many = seconds(lambda: side.generate(short, 4 + gen_tokens))
        return gen_tokens / (many - few)

    values = interleaved(
        {
            "dram_read_gbs": lambda: dram_read_gbs(buffer),
            "decode_tok_s": lambda: decode_rate(ours),
            "transformers_decode_tok_s": lambda: decode_rate(peer),
            "prefill_tok_s": lambda: prompt_tokens / seconds(lambda: ours.prefill(long)),
            "transformers_prefill_tok_s": lambda: prompt_tokens / seconds(lambda: peer.prefill(long)),
        },
        rounds,
    )
    bf16 = Recipe("bf16", Dense(), Dense())
    token_bytes = model_bytes(config, bf16) - config.vocab_size * config.hidden_size * 2
    floor = [gbs * 1e9 / token_bytes for gbs in values["dram_read_gbs"]]
    figures = {name: spread(samples) for name, samples in {**values, "decode_floor_tok_s": floor}.items()}
    return {
        "machine": machine(),
        "model": "tinyllama-1.1b shape, random weights, bf16",
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "rounds": rounds,
        "bytes_per_token": token_bytes,
        **figures,
        "decode_vs_transformers": paired(values["decode_tok_s"], values["transformers_decode_tok_s"]),
        "decode_vs_floor": paired(values["decode_tok_s"], floor),
        "prefill_vs_transformers": paired(values["prefill_tok_s"], values["transformers_prefill_tok_s"]),
    }


def paired(ours: list[float], other: list[float]) -> Spread:
    """The ratio within each round: what disturbs the machine for a while disturbs both sides."""
    return spread([a / b for a, b in zip(ours, other, strict=True)])


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
