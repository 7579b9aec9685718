"""The cost of the weight formats: the tiny model's perplexity on a book that it has not seen, in every format.

    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt
    python -m benchmarks.quality heldout.txt [--windows 20]     # results/quality.json, docs/internals/quality.md
    python -m benchmarks.quality                                # only the conversion's table anew

All formats read the same windows side by side, computed in fp32, so that the weights are all that differs. Then the
same with the activations of every matrix in INT8, as the integer kernels see them; then the program as it is, in bf16.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import DOCS, known, machine, markdown_table, save, seconds, spread, write_section
from localllm.cache.kv_format import KV_FORMATS
from localllm.cache.paged_kv import PagedKV
from localllm.engine.residency import new_pages
from localllm.engine.runner import ModelRunner
from localllm.engine.step_types import Chunk
from localllm.hub.names import TINY_DIRECTORY
from localllm.kernels import reference, tile16
from localllm.kernels.sizes import INT8_GROUP
from localllm.models.architecture import ModelConfig
from localllm.models.block_layouts import block_layouts, model_bytes
from localllm.models.block_source import CheckpointBlocks
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.models.decoder import Decoder
from localllm.models.families import load_config
from localllm.models.load import load_decoder
from localllm.quant import hqq
from localllm.quant.dense import Dense
from localllm.quant.int4 import Int4
from localllm.quant.int8 import Int8
from localllm.quant.nf4 import NF4
from localllm.quant.recipe import RECIPES, Recipe
from localllm.quant.weight_format import WeightFormat
from localllm.text.tokenizer import Tokenizer

TEXT = "The Violet Fairy Book"
PAGE = DOCS / "internals" / "quality.md"
BEGIN, END = "<!-- tables: written by `python -m benchmarks.quality` -->", "<!-- end of the tables -->"
SHIPPED = ("bf16", "int8", "int4-g32", "int4-g64", "int4-g128")

Run = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedHqq(Int4):
    """HQQ with the published algorithm and its defaults in tile16, which ours has to beat. Whole tiles and groups."""

    @property
    def name(self) -> str:
        return f"int4-g{self.group}-published"

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        columns = weight.float().reshape(-1, self.group).T.contiguous()
        scale, bias = _published_fit(columns)
        codes = hqq.encode(columns, scale, bias).T.reshape(weight.shape).to(torch.uint8)
        groups = [tile16.pack_groups(values.view(len(weight), -1)) for values in (scale, bias)]
        return {"qweight": tile16.pack(codes), "scale": groups[0], "bias": groups[1]}


def _published_fit(columns: Tensor) -> hqq.Affine:
    """l_p norm 0.7, beta 10, kappa 1.01, 20 iterations, ended by the first that does not help the mean."""
    low, high = columns.amin(dim=0), columns.amax(dim=0)
    inverse = hqq.LEVELS / (high - low).clamp(min=1e-10)
    zero = best = -low * inverse
    least = math.inf
    for iteration in range(20):
        codes = (columns * inverse + zero).round_().clamp_(0, hqq.LEVELS)
        error = columns - (codes - zero) / inverse
        size = error.abs()
        if size.mean().item() >= least:
            break
        least, best = size.mean().item(), zero
        beta = 10 * 1.01**iteration
        shrunk = error.sign() * (size - size.clamp(min=1e-10).pow(-0.3) / beta).clamp(min=0)
        zero = (codes - (columns - shrunk) * inverse).mean(dim=0)
    return (1 / inverse).half(), (-best / inverse).half()


FORMATS: tuple[WeightFormat, ...] = (
    Int8(),
    NF4(),
    *(make for group in (32, 64, 128) for make in (Int4(group), Int4(group, "rtn"), PublishedHqq(group))),
)


@dataclass(frozen=True)
class Exactly(Dense):
    """The values of `means` in fp32, times activations in fp32, or in INT8 by groups of `activation_group`."""

    name: str = "fp32"
    means: WeightFormat = field(default_factory=Dense)
    activation_group: int | None = None

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return super().quantize(self.means.dequantize(self.means.quantize(weight), *weight.shape))

    def linear(self, x: Tensor, tensors: dict[str, Tensor], out_features: int, bias: Tensor | None) -> Tensor:
        if self.activation_group is not None:
            codes, scale = reference.int8_activations(x, self.activation_group)
            x = (codes * scale.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
        return super().linear(x, tensors, out_features, bias)


@dataclass
class Subject:
    """A model in some formats, and its distance from the base so far. about: the rest of its row."""

    about: Mapping[str, object]
    runner: ModelRunner
    kv: PagedKV
    surprises: list[Tensor] = field(default_factory=list)  # -log p of each token, a tensor a window
    kl: float = 0.0
    same_top1: int = 0

    def log_probabilities(self, window: list[int]) -> Tensor:
        self.kv.trim(0)
        logits = self.runner.forward([Chunk(window, self.kv, len(window), all_logits=True)])
        return logits[:-1].log_softmax(-1)

    def read(self, window: list[int], base: Tensor) -> Tensor:
        """base: the log-probabilities of the same window in the base. Returns its own."""
        own = self.log_probabilities(window)
        self.surprises.append(token_surprises(own, window))
        self.kl += functional.kl_div(own, base, reduction="sum", log_target=True).item()
        self.same_top1 += int((own.argmax(-1) == base.argmax(-1)).sum().item())
        return own

    def result(self, base: Tensor) -> dict[str, object]:
        """base: -log p of each token in the base."""
        surprise = torch.cat(self.surprises).double()
        return {
            **self.about,
            **compared(surprise, base),
            "kl_nats": self.kl / len(surprise),
            "top1_percent": 100 * self.same_top1 / len(surprise),
        }


def compared(surprise: Tensor, base: Tensor) -> dict[str, object]:
    """Return the perplexity, and its increase over that of the base. Both: -log p of the same tokens, in fp64."""
    difference = surprise - base
    return {
        "perplexity": math.exp(surprise.mean().item()),
        "increase_percent": 100 * math.expm1(difference.mean().item()),
        "standard_error_percent": 100 * standard_error(difference),
    }


def standard_error(values: Tensor) -> float:
    return values.std().item() / math.sqrt(values.numel())


def token_surprises(log_probabilities: Tensor, window: list[int]) -> Tensor:
    return -log_probabilities.gather(1, torch.tensor(window[1:]).unsqueeze(1)).squeeze(1)


class Subjects:
    """Makes them from the tiny model's checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def of(self, recipe: Recipe, activations: str) -> Subject:
        about = {
            "blocks": recipe.blocks.name,
            "embedding": recipe.embedding.name,
            "activations": activations,  # "exact", "int8", "product"
            "bytes": model_bytes(self.config, recipe),
        }
        decoder = self.decoder(recipe, activations)
        kv = PagedKV(new_pages(decoder, KV_FORMATS["bf16"]), self.config.max_position_embeddings)
        return Subject(about, ModelRunner(decoder), kv)

    def decoder(self, recipe: Recipe, activations: str) -> Decoder:
        loaded, dtype = recipe, torch.bfloat16
        if activations != "product":
            wrapped = [
                Exactly(means=weights, activation_group=_activation_group(weights) if activations == "int8" else None)
                for weights in (recipe.blocks, recipe.embedding, recipe.router)
            ]
            blocks, embedding, router = wrapped
            loaded, dtype = Recipe(recipe.name, blocks, embedding, router), torch.float32
        cpu, config = torch.device("cpu"), self.config
        with Checkpoint.open(TINY_DIRECTORY) as checkpoint:
            source = CheckpointBlocks(checkpoint, config, loaded)
            return load_decoder(source, config, loaded, dtype=dtype, device=cpu)

    def all(self) -> Iterator[Subject]:
        for weights in FORMATS:
            yield self.of(Recipe(weights.name, weights, Dense(), Dense("fp32")), "exact")
        whole = [weights for weights in FORMATS if "-rtn" not in weights.name and not isinstance(weights, PublishedHqq)]
        embeddings: tuple[WeightFormat, ...] = (Int8(), Int4())
        for weights, embedding in product((Dense(), *whole), embeddings):
            yield self.of(Recipe(weights.name, weights, embedding, Dense("fp32")), "exact")
        for name, activations in product(SHIPPED, ("int8", "product")):
            if (name, activations) != ("bf16", "int8"):
                yield self.of(RECIPES[name], activations)


def _activation_group(weights: WeightFormat) -> int:
    return weights.group if isinstance(weights, Int4) else INT8_GROUP


def cut_windows(token_ids: list[int], ctx: int, count: int | None) -> list[list[int]]:
    """Whole windows side by side; `count` of them spread evenly over the text, or all."""
    whole = len(token_ids) // ctx
    count = min(count or whole, whole)
    return [token_ids[begin : begin + ctx] for begin in (i * whole // count * ctx for i in range(count))]


def measure(text: str, num_windows: int | None) -> dict[str, Any]:
    config = load_config(TINY_DIRECTORY)
    token_ids = Tokenizer.load(TINY_DIRECTORY).encode(text, bos=True)
    make = Subjects(config)
    base, subjects = make.of(RECIPES["bf16"], "exact"), list(make.all())
    (surprise,) = read_windows(cut_windows(token_ids, config.max_position_embeddings, num_windows), [(base, subjects)])
    return {
        **about_text(config, surprise),
        "base": {"perplexity": math.exp(surprise.mean().item()), "bytes": base.about["bytes"]},
        "runs": [subject.result(surprise) for subject in subjects],
    }


def read_windows(windows: list[list[int]], groups: Sequence[tuple[Subject, Sequence[Subject]]]) -> list[Tensor]:
    """Read all windows by each base and what is compared with it; return the bases' -log p of each token."""
    for number, window in enumerate(windows, 1):
        for base, subjects in groups:
            log_probabilities = base.log_probabilities(window)
            base.surprises.append(token_surprises(log_probabilities, window))
            for subject in subjects:
                subject.read(window, log_probabilities)
        print(f"\rwindow {number} of {len(windows)}", end="", file=sys.stderr, flush=True)
    return [torch.cat(base.surprises).double() for base, _ in groups]


def about_text(config: ModelConfig, surprise: Tensor) -> dict[str, Any]:
    ctx = config.max_position_embeddings
    return {"schema_version": 1, "model": "tiny", "text": TEXT, "ctx": ctx, "predicted_tokens": len(surprise)}


def conversion(rounds: int = 5) -> Iterator[dict[str, object]]:
    """Squared error relative to the weights' own squares, and the time of a 4096 x 4096 matrix."""
    normal = torch.randn((4096, 4096), generator=torch.Generator().manual_seed(0))
    config = load_config(TINY_DIRECTORY)
    with Checkpoint.open(TINY_DIRECTORY) as checkpoint:
        source = CheckpointBlocks(checkpoint, config, RECIPES["fp32"])
        tensors = [tensor for layout in block_layouts(config)[1:-1] for tensor in source.tensors(layout).values()]
        tiny = [tensor.clone() for tensor in tensors if tensor.ndim == 2]
    for weights in FORMATS:
        timed = not isinstance(weights, PublishedHqq)
        times = [seconds(partial(weights.quantize, normal)) for _ in range(rounds + 1)][1:] if timed else []
        yield {
            "format": weights.name,
            "error_normal": _relative_error(weights, [normal[:512]]),
            "error_tiny": _relative_error(weights, tiny),
            "ns_a_weight": asdict(spread([1e9 * time / normal.numel() for time in times])) if timed else None,
        }


def _relative_error(weights: WeightFormat, matrices: list[Tensor]) -> float:
    met = [weights.dequantize(weights.quantize(matrix), *matrix.shape) for matrix in matrices]
    errors = sum((a - b).square().sum().item() for a, b in zip(met, matrices, strict=True))
    return float(errors / sum(matrix.square().sum().item() for matrix in matrices))


# The tables of docs/internals/quality.md


def tables(result: Mapping[str, Any]) -> str:
    runs, base = result["runs"], result["base"]
    parts = {
        "Blocks alone, embedding and head in bf16": _runs(runs, "exact", embeddings=("bf16",)),
        "Embedding and head": _runs(runs, "exact", embeddings=("int8", "int4-g64")),
        "As it is computed": _runs(runs, "int8", "product"),
        "Conversion": _conversions(result["conversion"]),
    }
    about = (
        f"{result['text']}: {result['predicted_tokens']:,} tokens, in windows of {result['ctx']} that each start "
        f"without context.\nbf16: perplexity {base['perplexity']:.3f}, {base['bytes'] / 1e6:.2f} MB.\n"
    )
    return "\n".join([about, *(f"### {title}\n\n{table}" for title, table in parts.items())])


def _runs(runs: Sequence[Run], *activations: str, embeddings: Sequence[str] = ()) -> str:
    how = {"exact": "", "int8": "INT8 activations", "product": "the program, in bf16"}
    computed = ["computed by"] if len(activations) > 1 else []
    rows = [
        [run["blocks"], run["embedding"], *([how[run["activations"]]] if computed else []),
         f"{run['bytes'] / 1e6:.2f}", f"{run['perplexity']:.3f}", increase(run), f"{run['kl_nats']:.5f}",
         f"{run['top1_percent']:.2f} %"]
        for run in runs
        if run["activations"] in activations and (not embeddings or run["embedding"] in embeddings)
    ]  # fmt: skip
    head = ["blocks", "embedding, head", *computed, "MB", "perplexity", "increase", "KL divergence", "same top-1"]
    return markdown_table(head, rows, left=2 + len(computed))


def increase(run: Run) -> str:
    return f"{run['increase_percent']:+.2f} % (±{run['standard_error_percent']:.2f})"


def _conversions(rows: Sequence[Run]) -> str:
    head = ("format", "squared error, normal weights", "tiny's weights", "ns a weight")
    cells = (
        (
            row["format"],
            f"{row['error_normal']:.6f}",
            f"{row['error_tiny']:.6f}",
            f"{row['ns_a_weight']['median']:.1f}" if row["ns_a_weight"] else "",
        )
        for row in rows
    )
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "text", type=Path, nargs="?", help="the held-out book; without it, perplexities of the last run"
    )
    parser.add_argument("--windows", type=int, help="so many, spread over the book (default: all)")
    arguments = parser.parse_args()
    if arguments.text is None:
        result = known("quality")
    else:
        result = measure(arguments.text.read_text(encoding="utf-8"), arguments.windows)
    result |= {"machine": machine(), "conversion": list(conversion())}
    save("quality", result)
    write_section(PAGE, BEGIN, END, tables(result))
    print(tables(result))


if __name__ == "__main__":
    main()
