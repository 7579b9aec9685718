"""Train localllm's built-in tiny model, from the old tales and the story grammar to a checkpoint directory.

    python tools/train_tiny.py --tales DIR --work DIR --minutes 65 --output localllm/tiny
    python tools/train_tiny.py --tales DIR --write-heldout heldout.txt

The learning rate follows the elapsed time, so that it reaches zero just when the budget of minutes is spent; run the
same command again to go on after an interruption. Everything but the timing follows from --seed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tale_texts import load_tales, rare_nouns
from tiny_data import IGNORED, Mixture, RowMaker, load_or_train_tokenizer, make_conversations
from tiny_export import export
from tiny_hints import hint_loss
from tiny_measure import format_report, held_out_report, quick_loss
from tiny_model import TinyConfig, TinyLM, dropped_blocks
from torch import Tensor

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

    def __init__(self, recipe: Recipe, rows: RowMaker, held_out: Tensor, work: Path) -> None:
        self.recipe, self.rows, self.held_out, self.work = recipe, rows, held_out, work
        self.model = TinyLM(TinyConfig(), recipe.seed)
        self.optimizer = make_optimizer(self.model, recipe)
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(label_loss)
        self.step, self.tokens, self.seconds, self.hint = 0, 0, 0.0, 0.0
        self.curve: list[Point] = []

    @property
    def progress(self) -> float:
        return self.seconds / (60 * self.recipe.minutes)

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "tokens": self.tokens, "seconds": self.seconds, "curve": [asdict(p) for p in self.curve]}  # fmt: skip
        torch.save(state, self.work / "state.pt.new")
        (self.work / "state.pt.new").replace(self.work / "state.pt")
        (self.work / "curve.json").write_text(json.dumps(state["curve"], indent=1))

    def load(self) -> None:
        if not (self.work / "state.pt").exists():
            return
        state = torch.load(self.work / "state.pt")
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
            hint = hint_loss(self.model, tokens, taps)
        (loss + r.hint_weight * hint).backward()  # type: ignore[no-untyped-call]
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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train localllm's built-in tiny model.")
    parser.add_argument("--tales", type=Path, required=True, help="folder of the old tales (Project Gutenberg files)")
    parser.add_argument("--write-heldout", type=Path, help="write the cleaned held-out book here and stop")
    parser.add_argument("--work", type=Path, default=Path("tiny-work"), help="folder for the state of the run")
    parser.add_argument("--output", type=Path, help="folder of the finished checkpoint")
    parser.add_argument("--minutes", type=float, default=65.0, help="time budget of the training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
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
    recipe = Recipe(minutes=args.minutes, seed=args.seed)
    trainer = Trainer(recipe, rows, torch.tensor(rows.encode(held_out)), args.work)
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


if __name__ == "__main__":
    main()
