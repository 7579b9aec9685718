"""The cost of the KV formats: the tiny model's perplexity on a book that it has not seen, with keys and values in each.

    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt
    python -m benchmarks.kv_quality heldout.txt [--windows 28]  # results/kv_quality.json, docs/internals/quality.md

The windows and the measures are those of `benchmarks.quality`. First everything but keys and values is computed in
fp32, then the program as it is, in bf16 with INT4 weights. Then keys get outliers, as those of large models have them,
without any change of what the model computes, and are rounded with the pages' rotation and without one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import machine, markdown_table, save, write_section
from benchmarks.quality import PAGE, Run, Subject, Subjects, about_text, cut_windows, increase, read_windows
from localllm.cache.kv_format import KV_FORMATS, KVFormat
from localllm.cache.paged_kv import PagedKV
from localllm.engine.residency import new_pages
from localllm.engine.runner import ModelRunner
from localllm.hub.names import TINY_DIRECTORY
from localllm.kernels import kv_page
from localllm.kernels.attention import attention
from localllm.kernels.kv_page import PAGE_TOKENS, Coding
from localllm.layers.attention import Attention
from localllm.layers.batch import Batch
from localllm.models.decoder import Block, Decoder
from localllm.models.families import load_config
from localllm.quant.recipe import RECIPES, Recipe
from localllm.text.tokenizer import Tokenizer

CODED = ("int8", "k8v4", "int4")
SHIPPED_WEIGHTS = "int4-g64"
FACTORS = (4, 8, 16, 32, 64)  # powers of two: a product of a scaled key and query has the bits that it had
NUM_PAIRS = 2  # of each head, that are outliers
CONTEXTS = (8192, 32768)  # whose memory is compared
BEGIN, END = "<!-- tables: written by `python -m benchmarks.kv_quality` -->", "<!-- end of the tables of KV formats -->"


@dataclass(frozen=True)
class Rounding:
    """A loss of bits of keys and values outside of pages."""

    keys: Coding
    values: Coding
    is_rotated: bool

    def of(self, x: Tensor, coding: Coding) -> Tensor:
        """x fp32 [T, KH, D], as it is read again."""
        turned = kv_page.rotated(x) if self.is_rotated else x
        read = kv_page.dequantize(*kv_page.quantize(turned, coding), coding)
        return kv_page.rotated(read) if self.is_rotated else read


class RoundedAttention(Attention):
    """Over windows that a forward has whole. A query sees what it would see of pages: the first and its own as they
    are, those between rounded."""

    def __init__(self, body: Attention, rounding: Rounding) -> None:
        super().__init__(body.config, body.layer, body.rotation, body.qkv_proj, body.o_proj, body.q_norm, body.k_norm)
        self.rounding = rounding

    def _mixed(self, qk: Tensor, v: Tensor, batch: Batch) -> Tensor:
        (segment,) = batch.segments
        assert segment.past == 0, "a window is one batch"
        q, k = qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]
        keys, values = (
            (x.transpose(0, 1), self.rounding.of(x, coding).transpose(0, 1))
            for x, coding in ((k, self.rounding.keys), (v, self.rounding.values))
        )
        mixed = [
            attention(
                q[begin : begin + PAGE_TOKENS], _seen(*keys, begin), _seen(*values, begin), scale=self.config.scale
            )
            for begin in range(0, len(q), PAGE_TOKENS)
        ]
        return torch.cat(mixed)


def _seen(exact: Tensor, rounded: Tensor, begin: int) -> Tensor:
    """Each [KH, T, D] -> [KH, S, D] of what queries of the page from `begin` on see."""
    own = exact[:, begin : begin + PAGE_TOKENS]
    if begin == 0:
        return own
    return torch.cat((exact[:, :PAGE_TOKENS], rounded[:, PAGE_TOKENS:begin], own), dim=1)


def rounded(decoder: Decoder, rounding: Rounding) -> Decoder:
    return dataclasses.replace(decoder, blocks=tuple(_rounded(block, rounding) for block in decoder.blocks))


def _rounded(block: Block, rounding: Rounding) -> Block:
    body = block.body
    return dataclasses.replace(block, body=RoundedAttention(body, rounding)) if isinstance(body, Attention) else block


def put_outliers(decoder: Decoder, factor: float, num_pairs: int = NUM_PAIRS) -> None:
    """Multiply pairs of features of every key head by `factor`, and divide those of its queries: RoPE turns both of a
    pair into each other, so no score changes. The decoder's weights are dense, and are changed."""
    choose = torch.Generator().manual_seed(0)
    for block in decoder.blocks:
        if isinstance(block.body, Attention):
            _put_outliers(block.body, factor, num_pairs, choose)


def _put_outliers(body: Attention, factor: float, num_pairs: int, choose: torch.Generator) -> None:
    config, half = body.config, body.config.rotary_dim // 2
    assert body.k_norm is None, "a norm would take the factor back"
    heads = body.qkv_proj.tensors["weight"].view(-1, config.head_dim, body.qkv_proj.in_features)
    group = config.num_heads // config.num_kv_heads
    for head in range(config.num_kv_heads):
        first = torch.randperm(half, generator=choose)[:num_pairs]
        features = torch.cat((first, first + half))
        heads[config.num_heads + head, features] *= factor
        for query in range(head * group, (head + 1) * group):
            heads[query, features] /= factor


class KVSubjects:
    """Makes them from the tiny model's checkpoint. group: "exact" and "shipped" have bf16 pages of their own to be
    compared with; "rounded" is compared with those of "exact"."""

    def __init__(self, make: Subjects) -> None:
        self.make = make

    def paged(self, group: str, recipe: Recipe, activations: str, kv_format: KVFormat) -> Subject:
        """A subject with the program's own pages."""
        about: dict[str, object] = {"group": group, "kv": kv_format.name}
        return self._subject(about, self.make.decoder(recipe, activations), kv_format)

    def rounded(self, kv_format: KVFormat, *, is_rotated: bool, factor: float = 1) -> Subject:
        """In fp32 but for keys and values. factor: of the keys' outliers."""
        decoder = self.make.decoder(RECIPES["bf16"], "exact")
        put_outliers(decoder, factor)
        rounding = Rounding(kv_format.keys, kv_format.values, is_rotated)
        about: dict[str, object] = {
            "group": "rounded",
            "kv": kv_format.name,
            "is_rotated": is_rotated,
            "factor": factor,
        }
        return self._subject(about, rounded(decoder, rounding), KV_FORMATS["bf16"])

    def _subject(self, about: dict[str, object], decoder: Decoder, kv_format: KVFormat) -> Subject:
        ctx = self.make.config.max_position_embeddings
        return Subject(about, ModelRunner(decoder, batch_rows=ctx), PagedKV(new_pages(decoder, kv_format), ctx))

    def groups(self) -> Iterator[tuple[Subject, list[Subject]]]:
        """A base, and what is compared with it."""
        exact, shipped = ("exact", RECIPES["bf16"], "exact"), ("shipped", RECIPES[SHIPPED_WEIGHTS], "product")
        coded = [KV_FORMATS[name] for name in CODED]
        yield (
            self.paged(*exact, KV_FORMATS["bf16"]),
            [
                *(self.paged(*exact, kv_format) for kv_format in coded),
                *(self.rounded(kv_format, is_rotated=False) for kv_format in coded),
                *(self.rounded(KV_FORMATS["int4"], is_rotated=False, factor=factor) for factor in FACTORS),
                *(
                    self.rounded(kv_format, is_rotated=True, factor=factor)
                    for factor, kv_format in product(FACTORS, coded)
                ),
            ],
        )
        yield self.paged(*shipped, KV_FORMATS["bf16"]), [self.paged(*shipped, kv_format) for kv_format in coded]


def measure(text: str, num_windows: int | None) -> dict[str, Any]:
    make = Subjects(load_config(TINY_DIRECTORY))
    token_ids = Tokenizer.load(TINY_DIRECTORY).encode(text, bos=True)
    groups = list(KVSubjects(make).groups())
    surprises = read_windows(cut_windows(token_ids, make.config.max_position_embeddings, num_windows), groups)
    found = list(zip(groups, surprises, strict=True))
    return {
        **about_text(make.config, surprises[0]),
        "bases": {str(base.about["group"]): math.exp(surprise.mean().item()) for (base, _), surprise in found},
        "runs": [subject.result(surprise) for (_, subjects), surprise in found for subject in subjects],
    }


def memory(contexts: Sequence[int] = CONTEXTS) -> list[dict[str, object]]:
    """Bytes beside those of bf16: of a page in the middle of a sequence, and of whole sequences. They are the same for
    every model whose heads have whole groups: a head's size, their number and that of layers are in both."""
    config = load_config(TINY_DIRECTORY)
    dense = KV_FORMATS["bf16"].sizes(config.kv_shapes, 2)
    rows: list[dict[str, object]] = []
    for name in CODED:
        sizes = KV_FORMATS[name].sizes(config.kv_shapes, 2)
        rows.append({"kv": name, "page": sizes.per_token / dense.per_token})
        for ctx in contexts:
            own, other = (ctx * each.per_token + each.per_sequence for each in (sizes, dense))
            rows[-1][str(ctx)] = own / other
    return rows


# The tables of docs/internals/quality.md


def tables(result: Mapping[str, Any]) -> str:
    bases = result["bases"]
    return "\n".join(
        [
            f"{result['text']}: {result['predicted_tokens']:,} tokens, in windows of {result['ctx']} that each start "
            "without context.",
            f"Perplexity with bf16 pages: {bases['exact']:.3f}. As the program computes with int4-g64 weights: "
            f"{bases['shipped']:.3f}, the baseline of those rows.",
            "",
            _formats(result["runs"], result["memory"]),
            "### Outliers in the keys",
            "",
            _outliers(result["runs"]),
        ]
    )


def removed(plain: float, rotated: float) -> float:
    """The share of a loss that the rotation removes."""
    return 1 - rotated / plain


def runs_of(runs: Sequence[Run], **what: object) -> list[Run]:
    return [run for run in runs if all(run.get(key) == value for key, value in what.items())]


def outlier_run(runs: Sequence[Run], kv: str, factor: int, *, is_rotated: bool) -> Run:
    (found,) = runs_of(runs, group="rounded", kv=kv, factor=factor, is_rotated=is_rotated)
    return found


def factors(runs: Sequence[Run]) -> list[int]:
    return sorted({run["factor"] for run in runs if run["group"] == "rounded" and run["factor"] > 1})


def _formats(runs: Sequence[Run], memory: Sequence[Run]) -> str:
    contexts = [key for key in memory[0] if key.isdecimal()]
    head = ["keys and values", "computed by", "of bf16: a page", *(f"{int(ctx):,} tokens" for ctx in contexts)]
    head += ["increase of perplexity", "KL divergence", "same top-1"]
    how = {"exact": "", "rounded": "without rotation", "shipped": "the program, in bf16"}
    sizes = {row["kv"]: [f"{row['page']:.3f}", *(f"{row[ctx]:.3f}" for ctx in contexts)] for row in memory}
    rows = (
        (
            run["kv"],
            how[group],
            *sizes[run["kv"]],
            increase(run),
            f"{run['kl_nats']:.6f}",
            f"{run['top1_percent']:.2f} %",
        )
        for group in how
        for run in runs
        if run["group"] == group and run.get("factor", 1) == 1
    )
    return markdown_table(head, rows, left=2)


def _outliers(runs: Sequence[Run]) -> str:
    head = ("outliers", "int4 without rotation: perplexity", "KL", "int4: perplexity", "KL", "removed of the KL",
            "k8v4: KL", "int8: KL")  # fmt: skip
    rows = []
    for factor in factors(runs):
        plain, int4 = (outlier_run(runs, "int4", factor, is_rotated=is_rotated) for is_rotated in (False, True))
        others = [outlier_run(runs, kv, factor, is_rotated=True) for kv in ("k8v4", "int8")]
        cells = [f"{factor} x", increase(plain), f"{plain['kl_nats']:.5f}", increase(int4), f"{int4['kl_nats']:.5f}"]
        cells += [f"{100 * removed(plain['kl_nats'], int4['kl_nats']):.0f} %"]
        rows.append([*cells, *(f"{run['kl_nats']:.6f}" for run in others)])
    return markdown_table(head, rows, left=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the held-out book")
    parser.add_argument("--windows", type=int, help="so many, spread over the book (default: all)")
    arguments = parser.parse_args()
    result = measure(arguments.text.read_text(encoding="utf-8"), arguments.windows)
    result |= {"machine": machine(), "memory": memory()}
    save("kv_quality", result)
    write_section(PAGE, BEGIN, END, tables(result))
    print(tables(result))


if __name__ == "__main__":
    main()
