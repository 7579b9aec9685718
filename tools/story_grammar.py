"""A grammar that tells short, varied tales about a given character, thing and place.

Owns the plots and words (`story_plots/`), the casting of their roles and the expansion of their text.
Knows nothing of chats, tokens or training.

Notation of a plot's text: [a|b|c] takes one alternative (they nest, and may be empty); <rule> inserts a rule of
rules.txt, <rule?> half of the time; {h} {o} {v} are the hero, the other and a third character, {t} the thing and {p}
the place. The first mention of a role reads "a silver key", later ones "the key", so plots need not care. Capitals
({H}) start sentences; {he} {him} {his} are the hero's pronouns, {ohe} {vhis} ... the others'; {in_p} {to_p} add the
preposition; {t_bare} is the noun alone, {t_the} never "a". A blank line starts a paragraph.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

PLOT_DIR = Path(__file__).resolve().parent / "story_plots"
PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
ONLY_ONE = frozenset({"sea", "moon", "edge of the world", "north pole", "wilderness"})


def load_words(path: Path = PLOT_DIR / "words.toml") -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """The lists of words by their names, and the places with their prepositions."""
    lists = tomllib.loads(path.read_text(encoding="utf-8"))
    places = lists.pop("places")
    words = {name: _words(text) for name, text in lists.items()}
    return words, [(noun, preposition) for preposition, text in places.items() for noun in _words(text)]


def _words(text: str) -> list[str]:
    return [word.replace("_", " ") for word in text.split()]


WORDS, PLACES = load_words()
TALK: dict[str, Any] = tomllib.loads((PLOT_DIR / "talk.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Figure:
    """A character: `noun` "fox", perhaps an adjective and a name; `pronoun` is "he" or "she"."""

    noun: str
    pronoun: str
    adjective: str = ""
    name: str = ""

    def first(self) -> str:
        described = f"{self.adjective} {self.noun}".strip()
        return with_article(described) + (f" named {self.name}" if self.name else "")

    def again(self) -> str:
        return self.name or f"the {self.noun}"


@dataclass(frozen=True)
class Item:
    """A thing or a place; `preposition` is set for places only."""

    noun: str
    adjective: str = ""
    preposition: str = ""

    def first(self) -> str:
        return with_article(f"{self.adjective} {self.noun}".strip())

    def again(self) -> str:
        return f"the {self.noun}"


@dataclass(frozen=True)
class Cast:
    """Who and what a tale is about; a role that a plot does not use is simply not mentioned."""

    h: Figure
    o: Figure
    v: Figure
    t: Item
    p: Item


@dataclass(frozen=True)
class Plot:
    """One skeleton of a tale."""

    name: str
    asks: tuple[str, ...]
    morals: tuple[str, ...]
    kinds: dict[str, str]
    text: str

    def roles(self) -> frozenset[str]:
        """The roles that the text mentions at least somewhere, of h, o, v, t, p."""
        found = {"h"}
        found.update(_ROLE_OF_SLOT.get(slot.lower(), "h") for slot in re.findall(r"\{(\w+)\}", self.text))
        if "<openw>" in self.text or "<open>" in self.text:
            found.add("p")
        return frozenset(found)


@dataclass(frozen=True)
class Tale:
    """A told tale with what is needed to ask about it."""

    plot: Plot
    cast: Cast
    text: str
    ask: str
    moral: str


_ROLE_OF_SLOT = {
    **{role: role for role in "hovtp"},
    "in_p": "p",
    "to_p": "p",
    "a_t": "t",
    "t_bare": "t",
    "t_the": "t",
    "o_poss": "o",
    "h_poss": "h",
    **{prefix + pronoun: prefix for prefix in "ov" for pronoun in ("he", "him", "his")},
}


def with_article(phrase: str) -> str:
    """ "a fox", "an owl"; by sound for the few words where sound and letter differ."""
    silent_h = phrase.startswith(("hour", "honest", "honor", "heir"))
    like_yoo = phrase.startswith(("uni", "use", "eu", "ewe", "one", "uku"))
    vowel = phrase[:1].lower() in "aeiou"
    return f"an {phrase}" if (vowel and not like_yoo) or silent_h else f"a {phrase}"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def load_rules(path: Path = PLOT_DIR / "rules.txt") -> dict[str, str]:
    """The shared pieces, `name = text` per line."""
    pairs = (line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and line[:1] != "#")
    return {name.strip(): text.strip() for name, text in pairs}


def _parse_plot(block: str) -> Plot:
    name, _, body = block.partition("\n")
    asks: tuple[str, ...] = ()
    morals: tuple[str, ...] = ()
    kinds: dict[str, str] = {}
    lines = []
    for line in body.strip().splitlines():
        key, _, value = line.partition(":")
        if key == "ask":
            asks = tuple(part.strip() for part in value.split(" | "))
        elif key == "moral":
            morals = tuple(part.strip() for part in value.split(" | "))
        elif key == "cast":
            kinds = dict(pair.split("=") for pair in value.split())
        else:
            lines.append(line)
    return Plot(name.strip(), asks, morals, kinds, "\n".join(lines).strip())


def load_plots(directory: Path = PLOT_DIR) -> tuple[Plot, ...]:
    """All plots, in the order of the files' names."""
    blocks = []
    for path in sorted(directory.glob("plots_*.txt")):
        blocks += re.split(r"^= ", path.read_text(), flags=re.M)[1:]
    return tuple(_parse_plot(block) for block in blocks)


def make_name(rng: random.Random) -> str:
    """An invented name of two or three syllables: names that occur once force the model to copy them."""
    middle = rng.choice(WORDS["name_vowels"]) + rng.choice(WORDS["name_middles"])
    if rng.random() < 0.25:
        middle += rng.choice(WORDS["name_vowels"]) + rng.choice(WORDS["name_middles"])
    end = rng.choice(WORDS["name_ends"])
    if end[0] not in "aeiouy":
        end = rng.choice("aeiou") + end
    start = rng.choice(WORDS["name_starts"]) if rng.random() < 0.85 else ""
    return capitalize(start + middle + end)


def choose_name(rng: random.Random, pronoun: str) -> str:
    if rng.random() < 0.55:
        return make_name(rng)
    return rng.choice(WORDS["names_she"] if pronoun == "she" else WORDS["names_he"])


class Casting:
    """Draws characters, things and places; `rare_nouns` are further nouns, for copying practice."""

    def __init__(self, rare_nouns: Iterable[str] = ()) -> None:
        self.rare_nouns = tuple(rare_nouns)
        self.people = WORDS["people_she"] + WORDS["people_he"] + WORDS["people_they"]
        self.kinds = {"strong": WORDS["strong"], "ruler": WORDS["rulers"], "person": WORDS["wise"]}

    def noun_pronoun(self, rng: random.Random, noun: str) -> str:
        if noun in WORDS["people_she"] or noun == "empress":
            return "she"
        if noun in WORDS["people_he"] or noun in ("emperor", "sultan", "hermit"):
            return "he"
        return rng.choice(("he", "she"))

    def figure(self, rng: random.Random, kind: str = "", named: float = 0.3, avoid: str = "") -> Figure:
        """A character of a kind ("strong", "ruler", "person" or anything), preferably not of pronoun `avoid`."""
        if kind:
            pool: Sequence[str] = self.kinds[kind]
        else:
            pool = rng.choices((WORDS["animals"], self.people, WORDS["creatures"], self.rare_nouns or WORDS["animals"]),
                               (0.42, 0.36, 0.15, 0.07))[0]  # fmt: skip
        noun = rng.choice(tuple(pool))
        pronoun = self.noun_pronoun(rng, noun)
        if avoid == pronoun and rng.random() < 0.7:
            return self.figure(rng, kind, named, avoid)
        adjective = rng.choice(WORDS["hero_adjectives"]) if rng.random() < 0.4 else ""
        if adjective in WORDS["colors"] and noun not in WORDS["animals"]:
            adjective = "little"
        return Figure(noun, pronoun, adjective, choose_name(rng, pronoun) if rng.random() < named else "")

    def item(self, rng: random.Random, kind: str = "") -> Item:
        rare = self.rare_nouns and rng.random() < 0.15
        pool = WORDS["magic_things"] if kind == "magic" else self.rare_nouns if rare else WORDS["things"]
        adjective = rng.choice(WORDS["thing_adjectives"]) if rng.random() < 0.5 else ""
        return Item(rng.choice(tuple(pool)), adjective)

    def place(self, rng: random.Random) -> Item:
        noun, preposition = rng.choice(PLACES)
        adjective = rng.choice(WORDS["place_adjectives"]) if rng.random() < 0.4 else ""
        if noun in ONLY_ONE:
            adjective = ""
        return Item(noun, adjective, preposition)

    def cast(self, rng: random.Random, plot: Plot) -> Cast:
        """A whole cast for a plot, no noun twice."""
        hero = self.figure(rng, named=0.45)
        other = self.figure(rng, plot.kinds.get("o", ""), 0.15, avoid=hero.pronoun)
        third = self.figure(rng, plot.kinds.get("v", "strong"), 0.0)
        cast = Cast(hero, other, third, self.item(rng, plot.kinds.get("t", "")), self.place(rng))
        nouns = [cast.h.noun, cast.o.noun, cast.v.noun, cast.t.noun, cast.p.noun]
        return cast if len(set(nouns)) == len(nouns) else self.cast(rng, plot)


class Teller:
    """Expands plots. Holds the plots and rules; every choice comes from the generator handed in."""

    def __init__(self, casting: Casting | None = None) -> None:
        self.plots = load_plots()
        self.rules = load_rules()
        self.casting = casting or Casting()

    def tell(self, rng: random.Random, plot: Plot | None = None, cast: Cast | None = None) -> Tale:
        """A tale in which every role of the plot is mentioned."""
        plot = plot or rng.choice(self.plots)
        cast = cast or self.casting.cast(rng, plot)
        while True:
            question, answer = rng.choice(TALK["riddles"])
            riddled = plot.text.replace("<riddle>", question).replace("<answer>", answer)
            text, seen = self._fill(rng, self._choose(rng, riddled), cast)
            if plot.roles() <= seen:
                break
        ask = self._fill(rng, self._choose(rng, rng.choice(plot.asks)), cast)[0]
        moral = rng.choice(plot.morals)
        return Tale(plot, cast, text, ask, moral)

    def fill_again(self, rng: random.Random, text: str, cast: Cast) -> str:
        """Expand a text in which all roles count as mentioned before."""
        return self._fill(rng, self._choose(rng, text), cast, frozenset("hovtp"))[0]

    def _choose(self, rng: random.Random, text: str) -> str:
        """Resolve rules and alternatives, innermost first, left to right."""

        def rule(match: re.Match[str]) -> str:
            if match[2] and rng.random() < 0.5:
                return ""
            return self.rules[match[1]]

        while re.search(r"<\w+\??>", text):
            text = re.sub(r"<(\w+)(\??)>", rule, text)
        innermost = re.compile(r"\[([^\[\]]*)\]")
        while innermost.search(text):
            text = innermost.sub(lambda match: rng.choice(match[1].split("|")), text)
        return text

    def _fill(
        self, rng: random.Random, text: str, cast: Cast, known: frozenset[str] = frozenset()
    ) -> tuple[str, frozenset[str]]:
        """Put the cast into the slots; also returns the roles that were named."""
        seen = set(known)
        slots = _Slots(cast, seen, rng)
        filled = re.sub(r"\{(\w+)\}", lambda match: slots.fill(match[1]), text)
        return tidy(filled), frozenset(seen)


class _Slots:
    """The slots of one telling, and the roles that it has mentioned so far."""

    def __init__(self, cast: Cast, seen: set[str], rng: random.Random) -> None:
        self.cast, self.seen, self.rng = cast, seen, rng
        self.pronouns = {
            prefix + form: word
            for prefix, figure in (("", cast.h), ("o", cast.o), ("v", cast.v))
            for form, word in zip(("he", "him", "his"), PRONOUNS[figure.pronoun], strict=True)
        }
        self.pronouns["himself"] = "himself" if cast.h.pronoun == "he" else "herself"
        self.pronouns["they"] = cast.h.pronoun

    def mention(self, role: str) -> str:
        thing: Figure | Item = getattr(self.cast, role)
        if role in self.seen:
            return thing.again()
        self.seen.add(role)
        if isinstance(thing, Item) and thing.preposition and (thing.noun in ONLY_ONE or self.rng.random() < 0.3):
            return f"the {thing.adjective} {thing.noun}".replace("  ", " ")
        return thing.first()

    def fill(self, slot: str) -> str:
        low = slot.lower()
        simple: dict[str, Callable[[], str]] = {
            "in_p": lambda: f"{self.cast.p.preposition} {self.mention('p')}",
            "to_p": lambda: f"to {self.mention('p')}",
            "a_t": self.cast.t.first,
            "t_bare": lambda: self.cast.t.noun,
            "t_the": lambda: self.mention("t") and self.cast.t.again(),
            "o_poss": lambda: possessive(self.mention("o")),
            "h_poss": lambda: possessive(self.mention("h")),
        }
        simple.update((pronoun, partial(str, word)) for pronoun, word in self.pronouns.items())
        word = simple[low]() if low in simple else self.mention(low)
        return capitalize(word) if any(letter.isupper() for letter in slot) else word


def possessive(phrase: str) -> str:
    return phrase + ("'" if phrase.endswith("s") else "'s")


def _comma(match: re.Match[str]) -> str:
    return match[0].rstrip('" .') + '," '


def tidy(text: str) -> str:
    """Join the lines of each paragraph and mend the spaces that empty alternatives leave."""
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    text = "\n\n".join(block for block in paragraphs if block)
    text = text.replace(" ,", ",").replace(" .", ".").replace("?!", "?").replace(",,", ",")
    text = re.sub(r'([?!]),"', r'\1"', text)
    text = re.sub(r'([a-z])" (?=["A-Z])', r'\1." ', text)  # a speech that ended without a stop
    return re.sub(r'(?:[a-z]|(?<=[a-z])[.])" (?=(?:said|asked|cried|called|thought|answered|replied)\b)', _comma, text)
