"""Train localllm's built-in tiny model, from the old tales and the story grammar to a checkpoint directory.

    python tools/train_tiny.py --tales DIR --work DIR --minutes 65 --output localllm/tiny
    python tools/train_tiny.py --tales DIR --work DIR --minutes 65 --experts --output DIR  # one with experts
    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt

The learning rate follows the elapsed time, so that it reaches zero just when the budget of minutes is spent; run the
same command again to go on after an interruption. Everything but the timing follows from --seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tale_texts import load_tales, rare_nouns
from tiny_data import (
    END_OF_TEXT,
    IGNORED,
    IM_END,
    IM_START,
    Mixture,
    RowMaker,
    load_or_train_tokenizer,
    make_conversations,
    special_ids,
)
from tiny_model import WITH_EXPERTS, Layer, TinyConfig, TinyLM, dropped_blocks, hint_loss, middle_blocks
from tokenizers import Tokenizer
from torch import Tensor

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAMPLING: dict[str, object] = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@dataclass(frozen=True)
class Recipe:
    """Settings of the training; lengths in tokens, `*_part` as parts of the time budget."""

    minutes: float
    seed: int
    tokens_per_step: int = 2048
    short_length: int = 512
    long_length: int = 1024
    long_part: float = 0.15
    peak_lr: float = 1.5e-3
    warmup_steps: int = 100
    flat_part: float = 0.5
    weight_decay: float = 0.1
    clip: float = 1.0
    drop_rate: float = 0.2
    drop_from: float = 0.3
    steps_per_block: int = 32
    hint_weight: float = 0.5
    balance_weight: float = 0.01  # of the mean imbalance of the experts, where there are any


@dataclass(frozen=True)
class Point:
    """One line of the loss curve."""

    step: int
    tokens: int
    minutes: float
    lr: float
    train_loss: float
    held_out_loss: float


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Warm-up by steps, then flat, then a straight line to zero at the end of the time."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    decay = min(1.0, max(0.0, (1.0 - progress) / (1.0 - recipe.flat_part)))
    return recipe.peak_lr * warm * decay


def make_optimizer(model: TinyLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.98), fused=True)


def label_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED)


class Trainer:
    """The state of a run: model, optimizer, steps done, time spent and the loss curve."""

    def __init__(self, config: TinyConfig, recipe: Recipe, rows: RowMaker, held_out: Tensor, work: Path) -> None:
        self.recipe, self.rows, self.held_out, self.work = recipe, rows, held_out, work
        self.model = TinyLM(config, recipe.seed)
        self.optimizer = make_optimizer(self.model, recipe)
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(label_loss)
        self.step, self.tokens, self.seconds, self.hint = 0, 0, 0.0, 0.0
        self.curve: list[Point] = []

    @property
    def progress(self) -> float:
        return self.seconds / (60 * self.recipe.minutes)

    @property
    def state_path(self) -> Path:
        return self.work / ("experts.pt" if self.model.config.num_experts else "state.pt")

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "tokens": self.tokens, "seconds": self.seconds, "curve": [asdict(p) for p in self.curve]}  # fmt: skip
        new = self.state_path.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.state_path)
        (self.work / "curve.json").write_text(json.dumps(state["curve"], indent=1))

    def load(self) -> None:
        if not self.state_path.exists():
            return
        state = torch.load(self.state_path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.curve = [Point(**point) for point in state["curve"]]

    def train_step(self, tokens: Tensor, labels: Tensor) -> float:
        r = self.recipe
        rate = r.drop_rate if self.progress > r.drop_from else 0.0
        rng = random.Random(f"{r.seed}/drop/{self.step}")
        skipped = dropped_blocks(self.model.config.num_layers, rate, rng)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(r, self.step, self.progress)
        taps: dict[int, Tensor] = {}
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.hidden(tokens, skipped, taps)
            loss = self.loss(hidden.flatten(0, 1), self.model.model.embed_tokens.weight, labels.flatten())
            hint = hint_loss(self.model, tokens, taps) if r.hint_weight else torch.zeros(())
        total = loss + r.hint_weight * hint
        for body in self.model.experts():
            total = total + r.balance_weight / self.model.config.num_layers * body.imbalance
            body.imbalance = torch.zeros(())  # the next step may skip it
        total.backward()  # type: ignore[no-untyped-call]
        self.hint = float(hint.detach())
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], r.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += tokens.numel()
        return float(loss.item())

    def train_block(self) -> float:
        """`steps_per_block` steps on rows of one seed; returns the mean loss."""
        r = self.recipe
        length = r.short_length if self.progress < 1 - r.long_part else r.long_length
        per_step = r.tokens_per_step // length
        tokens, labels = self.rows.block(r.seed * 1_000_003 + self.step, per_step * r.steps_per_block, length)
        losses = []
        last = time.monotonic()
        for i in range(r.steps_per_block):
            part = slice(i * per_step, (i + 1) * per_step)
            losses.append(self.train_step(tokens[part], labels[part]))
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            if self.progress >= 1:
                break
        return math.fsum(losses) / len(losses)

    def run(self, save_minutes: float = 4.0) -> None:
        """Train until the time is spent."""
        saved_at, average, began = self.seconds, 0.0, True
        while self.progress < 1:
            start = time.monotonic()
            before = self.seconds
            loss = self.train_block()
            self.seconds += max(0.0, time.monotonic() - start - (self.seconds - before))
            average = loss if began else 0.6 * average + 0.4 * loss
            began = False
            minutes = self.seconds / 60
            print(
                f"step {self.step} tokens {self.tokens} minutes {minutes:.1f} loss {loss:.3f} hint {self.hint:.2f}",
                file=sys.stderr,
            )
            if self.seconds - saved_at >= 60 * save_minutes or self.progress >= 1:
                start = time.monotonic()
                held_out = quick_loss(self.model, self.held_out)
                rate = learning_rate(self.recipe, self.step, self.progress)
                self.curve.append(Point(self.step, self.tokens, minutes, rate, average, held_out))
                print(f"held-out loss {held_out:.4f} at step {self.step}", file=sys.stderr)
                self.seconds += time.monotonic() - start
                self.save()
                saved_at = self.seconds


@dataclass(frozen=True)
class Measurement:
    """Mean loss in nats per token, and the perplexities that follow from it."""

    blocks_skipped: int
    loss: float
    per_token: float
    per_byte: float
    per_word: float


@torch.no_grad()
def window_loss(model: TinyLM, windows: Tensor, skipped: frozenset[int] = frozenset(), batch: int = 4) -> float:
    """Mean loss over windows [N, T + 1]: every window is read from its first token, without earlier context."""
    total, count = 0.0, 0
    for part in torch.split(windows, batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(part[:, :-1], skipped)
        total += float(F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        count += part[:, 1:].numel()
    return total / count


def cut(tokens: Tensor, length: int) -> Tensor:
    """Windows [N, length + 1] that share their border tokens, so that each token but the first is predicted once."""
    count = (len(tokens) - 1) // length
    return torch.stack([tokens[i * length : (i + 1) * length + 1] for i in range(count)])


def quick_loss(model: TinyLM, tokens: Tensor, length: int = 512, num_windows: int = 48) -> float:
    """A loss good enough for a curve: windows spread over the book."""
    windows = cut(tokens, length)
    return window_loss(model, windows[:: max(1, len(windows) // num_windows)][:num_windows])


def held_out_report(model: TinyLM, ids: list[int], text: str) -> list[Measurement]:
    """The whole book in windows of the full context, with none, a quarter and 40 % of the blocks skipped."""
    windows = cut(torch.tensor(ids), model.config.max_positions)
    num_bytes, num_words = len(text.encode()), len(text.split())
    report = []
    for fraction in (0.0, 0.25, 0.4):
        skipped = middle_blocks(model.config.num_layers, fraction) if fraction else frozenset[int]()
        loss = window_loss(model, windows, skipped)
        nats = loss * len(ids)
        report.append(Measurement(len(skipped), loss, math.exp(loss), math.exp(nats / num_bytes),
                                  math.exp(nats / num_words)))  # fmt: skip
    return report


def format_report(report: list[Measurement]) -> str:
    lines = ["blocks skipped | loss/token | ppl/token | ppl/byte | ppl/word"]
    lines += [
        f"{m.blocks_skipped:14d} | {m.loss:10.4f} | {m.per_token:9.2f} | {m.per_byte:8.4f} | {m.per_word:8.1f}"
        for m in report
    ]
    return "\n".join(lines)


@torch.no_grad()
def locality_report(model: TinyLM, tokens: Tensor) -> str:
    """How soon the experts of a token [T] are wanted again, in every layer, and how evenly they are used."""
    c, repeated, hits, load = model.config, [], [], []
    for window in cut(tokens, c.max_positions):
        with torch.autocast("cpu", torch.bfloat16):
            model.hidden(window[None, :-1])
        for body in model.experts():
            chosen = body.chosen.tolist()
            repeated += [len({*now} & {*before}) / c.top_k for before, now in itertools.pairwise(chosen)]
            hits.append(recent_share(chosen, c.num_experts // 2))
            load.append(body.chosen.flatten().bincount(minlength=c.num_experts) / body.chosen.numel())
    mean_load = torch.stack(load).view(-1, c.num_layers, c.num_experts).mean(0)
    return (
        f"of a token's experts {math.fsum(repeated) / len(repeated):.3f} are those of the token before, "
        f"{math.fsum(hits) / len(hits):.3f} among the half used last; by chance {c.top_k / c.num_experts:.3f}, 0.500\n"
        f"the most used of a layer's {c.num_experts} has {float(mean_load.max()):.3f} of all, the least used "
        f"{float(mean_load.min()):.3f}"
    )


@torch.no_grad()
def foresight_report(model: TinyLM, tokens: Tensor) -> str:
    """How often a layer's router, given what goes into the experts of the layer before, foresees its own choice."""
    c = model.config
    shares: list[list[float]] = [[] for _ in range(c.num_layers - 1)]
    first: list[bool] = []
    inputs: list[Tensor] = []
    norms = [layer.post_attention_layernorm for layer in model.model.layers if isinstance(layer, Layer)]
    for window in cut(tokens, c.max_positions):
        inputs.clear()
        hooks = [norm.register_forward_pre_hook(lambda _norm, args: inputs.append(args[0])) for norm in norms]
        with torch.autocast("cpu", torch.bfloat16):
            model.hidden(window[None, :-1])
            for hook in hooks:
                hook.remove()
            guesses = [
                body.gate(norm(x))[0].topk(c.top_k).indices.tolist()
                for body, norm, x in zip(model.experts()[1:], norms[1:], inputs[:-1], strict=True)
            ]
        for own, guessed, body in zip(shares, guesses, model.experts()[1:], strict=True):
            chosen = body.chosen.tolist()
            own += [len({*guess} & {*experts}) / c.top_k for guess, experts in zip(guessed, chosen, strict=True)]
            first += first_absent(guessed, chosen, c.num_experts // 2)
    layers = ", ".join(f"{math.fsum(each) / len(each):.2f}" for each in shares)
    return (
        f"of a layer's experts, its router foresees a layer ahead (from the second one on): {layers}\n"
        f"its first guess that is not among the half used last is right in {math.fsum(first) / len(first):.3f}"
    )


def first_absent(guessed: list[list[int]], chosen: list[list[int]], slots: int) -> list[bool]:
    """Return of each token whose guess has an expert that is not among the last `slots` used, whether it wants it."""
    recent: list[int] = []
    found = []
    for guess, experts in zip(guessed, chosen, strict=True):
        absent = next((expert for expert in guess if expert not in recent), None)
        if absent is not None:
            found.append(absent in experts)
        recent = _renewed(recent, experts, slots)
    return found


def recent_share(chosen: list[list[int]], slots: int) -> float:
    """Return how many of the experts of tokens are among the last `slots` used ones."""
    recent: list[int] = []
    hits = 0
    for experts in chosen:
        hits += len({*experts} & {*recent})
        recent = _renewed(recent, experts, slots)
    return hits / sum(map(len, chosen))


def _renewed(recent: list[int], experts: list[int], slots: int) -> list[int]:
    """Return the last `slots` used experts, the newest first."""
    return (experts + [expert for expert in recent if expert not in experts])[:slots]


def _config(model: TinyLM, ids: dict[str, int]) -> dict[str, object]:
    c = model.config
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_positions,
        "mlp_bias": False,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "pad_token_id": ids[END_OF_TEXT],
        "pretraining_tp": 1,
        "rms_norm_eps": c.rms_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": c.vocab_size,
        **(experts if c.num_experts else {}),
    }


def _tokenizer_config(ids: dict[str, int], max_positions: int) -> dict[str, object]:
    added = {
        str(number): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                      "special": True}
        for token, number in ids.items()
    }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": max_positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def export(model: TinyLM, tokenizer: Tokenizer, directory: Path, sampling: dict[str, object]) -> None:
    """Write all files beside `directory` first, then rename them into it, so that no reader sees half a file."""
    directory.mkdir(parents=True, exist_ok=True)
    ids = special_ids(tokenizer)
    generation = {"bos_token_id": ids[END_OF_TEXT], "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
                  "pad_token_id": ids[END_OF_TEXT], **sampling}  # fmt: skip
    scratch = Path(tempfile.mkdtemp(prefix=".tiny-", dir=directory.parent))
    try:
        weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.checkpoint().items()}
        save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(scratch / "tokenizer.json"))
        for name, content in (
            ("config.json", _config(model, ids)),
            ("generation_config.json", generation),
            ("tokenizer_config.json", _tokenizer_config(ids, model.config.max_positions)),
        ):
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        for path in sorted(scratch.iterdir()):
            path.chmod(0o644)
            path.replace(directory / path.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train localllm's built-in tiny model.")
    parser.add_argument("--tales", type=Path, required=True, help="folder of the old tales (Project Gutenberg files)")
    parser.add_argument("--write-heldout", type=Path, help="write the cleaned held-out book here and stop")
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="folder for the state of the run")
    parser.add_argument("--output", type=Path, help="folder of the finished checkpoint")
    parser.add_argument("--minutes", type=float, default=65.0, help="time budget of the training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--experts", action="store_true", help="train a mixture of 16 experts, 2 for each token")
    parser.add_argument("--export-only", action="store_true", help="export the saved state without training further")
    parser.add_argument("--measure", action="store_true", help="measure the saved state on the held-out book")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    books, held_out = load_tales(args.tales)
    if args.write_heldout:
        args.write_heldout.write_text(held_out)
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    conversations = make_conversations(rare_nouns(books))
    tokenizer = load_or_train_tokenizer(args.work / "tokenizer.json", books, conversations, args.seed)
    rows = RowMaker(tokenizer, books, conversations, Mixture())
    # The hint is for copying, in twelve layers; from the first step on its gradients drown the others.
    recipe = Recipe(minutes=args.minutes, seed=args.seed, hint_weight=0.0 if args.experts else Recipe.hint_weight)
    trainer = Trainer(
        WITH_EXPERTS if args.experts else TinyConfig(), recipe, rows, torch.tensor(rows.encode(held_out)), args.work
    )
    trainer.load()
    print(f"{sum(p.numel() for p in trainer.model.parameters())} parameters, "
          f"{len(rows.old_tales)} tokens of old tales", file=sys.stderr)  # fmt: skip
    if not (args.export_only or args.measure):
        if not args.no_compile:
            trainer.model.compile_blocks()
        trainer.run()
    if args.output:
        export(trainer.model, tokenizer, args.output, SAMPLING)
    if args.measure:
        print(format_report(held_out_report(trainer.model, rows.encode(held_out), held_out)))
        if args.experts:
            print(locality_report(trainer.model, trainer.held_out))
            print(foresight_report(trainer.model, trainer.held_out))


if __name__ == "__main__":
    main()
