"""Tokenizer and training rows of the tiny model.

Owns the mixture of old tales, grammar tales and chats, and which tokens count in the loss.
Knows nothing of networks. Every block of rows comes from its own seed, so that a resumed run sees the same rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from story_chat import Chat, Conversations
from story_grammar import Casting, Teller, capitalize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IGNORED = -100


@dataclass(frozen=True)
class Mixture:
    """Shares of the rows; the rest are chats. Old tales also fill the ends of other rows, about a fifth of those."""

    old_tales: float = 0.16
    grammar_tales: float = 0.10


def make_conversations(rare: list[str]) -> Conversations:
    return Conversations(Teller(Casting(rare)))


def plain_tale(conversations: Conversations, rng: random.Random) -> str:
    """A grammar tale as running text, sometimes under a title."""
    tale = conversations.teller.tell(rng)
    if rng.random() < 0.3:
        title = f"{tale.cast.h.again()} and {tale.cast.t.again()}"
        title = " ".join(word if word in ("and", "the") else capitalize(word) for word in title.split())
        return f"{capitalize(title)}\n\n{tale.text}"
    return tale.text


def train_tokenizer(books: list[str], conversations: Conversations, vocab_size: int, seed: int) -> Tokenizer:
    """Byte-level BPE over the old tales and about as much of the grammar."""
    rng = random.Random(seed)
    texts = list(books)
    for _ in range(9000):
        texts.append("\n".join(text for _, text in conversations.chat(rng)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_or_train_tokenizer(path: Path, books: list[str], conversations: Conversations, seed: int) -> Tokenizer:
    if not path.exists():
        train_tokenizer(books, conversations, 4096, seed).save(str(path))
    return Tokenizer.from_file(str(path))


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the three special tokens."""
    found = {token: tokenizer.token_to_id(token) for token in (END_OF_TEXT, IM_START, IM_END)}
    return {token: number for token, number in found.items() if number is not None}


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether it is to be predicted."""

    ids: list[int]
    counts: list[bool]


class RowMaker:
    """Makes blocks of training rows."""

    def __init__(self, tokenizer: Tokenizer, books: list[str], conversations: Conversations, mixture: Mixture) -> None:
        self.tokenizer = tokenizer
        self.conversations = conversations
        self.mixture = mixture
        ids = special_ids(tokenizer)
        self.end_of_text, self.im_start, self.im_end = ids[END_OF_TEXT], ids[IM_START], ids[IM_END]
        self.newline = self.encode("\n")
        joined: list[int] = []
        for book in books:
            joined += [*self.encode(book), self.end_of_text]
        self.old_tales = torch.tensor(joined, dtype=torch.int32)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def chat_document(self, chat: Chat) -> Document:
        """ChatML; only what the assistant says counts, for nobody can predict what a user will name."""
        ids: list[int] = []
        counts: list[bool] = []
        for role, text in chat:
            head = [self.im_start, *self.encode(f"{role}\n")]
            body = [*self.encode(text), self.im_end]
            ids += head + body + self.newline
            counts += [False] * len(head) + [role == "assistant"] * len(body) + [False] * len(self.newline)
        return Document([*ids, self.end_of_text], [*counts, False])

    def plain_document(self, text: str) -> Document:
        ids = [*self.encode(text), self.end_of_text]
        return Document(ids, [True] * len(ids))

    def _document(self, rng: random.Random) -> Document:
        share = self.mixture.grammar_tales / (1 - self.mixture.old_tales)
        if rng.random() < share:
            return self.plain_document(plain_tale(self.conversations, rng))
        return self.chat_document(self.conversations.chat(rng))

    def _old_window(self, rng: random.Random, length: int) -> list[int]:
        start = rng.randrange(len(self.old_tales) - length)
        return [int(token) for token in self.old_tales[start : start + length]]

    def _packed_row(self, rng: random.Random, pool: list[Document], length: int) -> tuple[list[int], list[int]]:
        """Whole documents, the longest that still fits first; a piece of an old tale fills the rest of the row."""
        ids: list[int] = []
        labels: list[int] = []
        while True:
            while len(pool) < 48:
                pool.append(self._document(rng))
            room = length + 1 - len(ids)
            fitting = [i for i, document in enumerate(pool) if len(document.ids) <= room]
            if not ids:
                best = rng.randrange(len(pool))
            elif fitting:
                best = max(fitting, key=lambda i: len(pool[i].ids))
            else:
                break
            document = pool.pop(best)
            ids += document.ids
            labels += [token if count else IGNORED for token, count in zip(document.ids, document.counts, strict=True)]
        filling = self._old_window(rng, max(0, length + 1 - len(ids)))
        ids, labels = ids + filling, labels + filling
        return ids[:length], labels[1 : length + 1]

    def block(self, seed: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), each [num_rows, length]; labels are shifted already."""
        rng = random.Random(seed)
        pool: list[Document] = []
        rows = []
        for _ in range(num_rows):
            if rng.random() < self.mixture.old_tales:
                window = self._old_window(rng, length + 1)
                rows.append((window[:-1], window[1:]))
            else:
                rows.append(self._packed_row(rng, pool, length))
        return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
