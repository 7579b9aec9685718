"""Chats about tales: requests in many wordings, the tale, and what people say afterwards.

Owns the conversations the tiny model is trained on, as lists of (role, text). Knows nothing of tokens or templates.
"""

from __future__ import annotations

import random
import re

from story_grammar import TALK, Cast, Figure, Item, Tale, Teller, capitalize

Chat = list[tuple[str, str]]


def _indefinite(rng: random.Random, part: Figure | Item) -> str:
    """The way a user names a part: with or without its adjective and article."""
    if isinstance(part, Item):
        return rng.choice((part.first(), part.first(), part.noun if rng.random() < 0.3 else part.first()))
    if part.name:
        called = rng.choice(("named", "named", "called"))
        full = part.first().replace(" named ", f" {called} ")
        return rng.choice((full, full, part.name, f"{part.name} the {part.noun}"))
    return part.first()


class Conversations:
    """Makes chats out of tales told by a `Teller`."""

    def __init__(self, teller: Teller) -> None:
        self.teller = teller

    def _topic(self, rng: random.Random, tale: Tale) -> str:
        """ "a fox and a lantern": one to three parts of the cast that the tale mentions."""
        roles = tale.plot.roles()
        cast = tale.cast
        hero, thing = _indefinite(rng, cast.h), _indefinite(rng, cast.t)
        where = f"{cast.p.preposition} {cast.p.first()}"
        ways = [(5.0, hero)]
        if "t" in roles:
            ways += [(7.0, f"{hero} and {thing}"), (2.0, thing), (1.0, f"{thing} and {hero}")]
        if "o" in roles:
            ways += [(4.0, f"{hero} and {_indefinite(rng, cast.o)}")]
        if "p" in roles:
            ways += [(3.0, f"{hero} {where}"), (0.7, cast.p.first())]
        if {"t", "p"} <= roles:
            ways += [(3.0, f"{hero} and {thing} {where}"), (2.0, f"{hero}, {thing} and {cast.p.first()}")]
        if {"t", "o"} <= roles:
            ways += [(2.5, f"{hero}, {_indefinite(rng, cast.o)} and {thing}")]
        ask = tale.ask
        ways += [(5.0, f"{hero} who {ask}")]
        return rng.choices([way for _, way in ways], [weight for weight, _ in ways])[0]

    def request(self, rng: random.Random, tale: Tale) -> str:
        """A user's message that asks for this tale."""
        topic = self._topic(rng, tale)
        kind = rng.random()
        if kind < 0.66:
            text = f"{rng.choice(TALK['tell'])} {rng.choice(('about', 'about', 'about', 'of'))} {topic}"
        elif kind < 0.74:
            text = f"{rng.choice(TALK['tell'])}. It should be about {topic}"
        elif kind < 0.80:
            text = f"{rng.choice(TALK['tell'])} with {topic}"
        elif kind < 0.84:
            text = f"{rng.choice(TALK['tell'])} in which {tale.cast.h.first()} {tale.ask}"
        elif kind < 0.92:
            text = topic
        else:
            text = self._bare(rng, tale)
        return self._finish(rng, text)

    def _bare(self, rng: random.Random, tale: Tale) -> str:
        """Only nouns: "dragon", "fox, lantern"."""
        cast = tale.cast
        nouns = [cast.h.name or cast.h.noun] + ([cast.t.noun] if "t" in tale.plot.roles() else [])
        nouns += [cast.p.noun] if "p" in tale.plot.roles() else []
        return rng.choice((", ", ", ", " and ", " ")).join(nouns[: rng.choice((1, 1, 2, 2, 3))])

    def _finish(self, rng: random.Random, text: str) -> str:
        """Punctuation, politeness and case as people type them."""
        if re.match(r"(can|could|how about|do you)", text, re.I):
            ending = rng.choice(("?", "?", "", " please?"))
        else:
            ending = rng.choice((".", ".", ".", "", "", "!", " please", ", please."))
        text += ending
        case = rng.random()
        return text.lower() if case < 0.12 and text.lower() == text[:1].lower() + text[1:] else (
            capitalize(text) if case < 0.7 else text)  # fmt: skip

    def _system(self, rng: random.Random) -> Chat:
        return [("system", rng.choice(TALK["system"]))] if rng.random() < 0.4 else []

    def tale_turn(self, rng: random.Random) -> tuple[Chat, Tale]:
        """A request and its tale."""
        tale = self.teller.tell(rng)
        kind = rng.random()
        if kind < 0.10:
            return [("user", rng.choice(TALK["nothing_named"])), ("assistant", tale.text)], tale
        if kind < 0.17:
            return self._continued(rng, tale), tale
        answer = tale.text
        request = self.request(rng, tale)
        if rng.random() < 0.05:
            request = request.rstrip(".!?") + rng.choice((", with a moral.", ". End with a moral."))
            answer += f"\n\nThe moral: {tale.moral}"
        return [("user", request), ("assistant", answer)], tale

    def _continued(self, rng: random.Random, tale: Tale) -> Chat:
        """The user gives the opening; the answer goes on from there."""
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", tale.text.split("\n\n")[0])
        opening = " ".join(sentences[: rng.choice((1, 1, 2))])
        rest = tale.text[len(opening) :].strip()
        asked = rng.choice((f"{opening} Continue.", f"Continue this tale: {opening}", f"Go on: {opening}",
                            f"{opening} Continue the story.", f"{opening} ... continue", opening,
                            f"Finish this story: {opening}", f"{opening.rstrip('.')} ..."))  # fmt: skip
        return [("user", asked), ("assistant", rest)]

    def _follow_up(self, rng: random.Random, tale: Tale) -> Chat:
        """A second turn that refers to the tale before."""
        kind = rng.random()
        if kind < 0.16:
            following = self.teller.tell(rng)
            return [("user", rng.choice(TALK["another"])), ("assistant", following.text)]
        if kind < 0.34:
            following = self.teller.tell(rng)
            asked = f"{rng.choice(TALK['another_about'])} {self._topic(rng, following)}"
            return [("user", self._finish(rng, asked)), ("assistant", following.text)]
        if kind < 0.50:
            return self._next(rng, tale)
        if kind < 0.86:
            return self._question(rng, tale)
        return self.small_talk(rng)

    def _filled(self, rng: random.Random, template: str, cast: Cast) -> str:
        """A template of the small-talk lists, with alternatives and slots as in the plots; all roles known."""
        return self.teller.fill_again(rng, template, cast)

    def _next(self, rng: random.Random, tale: Tale) -> Chat:
        pool = [text for text in TALK["what_next"] if self._fits(text, tale)]
        answer = self._filled(rng, rng.choice(pool), tale.cast)
        return [("user", rng.choice(TALK["ask_next"])), ("assistant", answer)]

    def _fits(self, text: str, tale: Tale) -> bool:
        slots = set(re.findall(r"\{(\w+)\}", text))
        needed = {slot[-1] if slot.endswith(("_p", "_t")) else slot[0].lower() for slot in slots}
        return all(role in tale.plot.roles() for role in needed & {"o", "t", "p"})

    def _question(self, rng: random.Random, tale: Tale) -> Chat:
        pool = [pair for pair in TALK["questions"] if self._fits(pair[0] + pair[1], tale)]
        asked, answer = rng.choice(pool)
        answer = answer.replace("{moral}", tale.moral)
        return [("user", self._filled(rng, asked, tale.cast)), ("assistant", self._filled(rng, answer, tale.cast))]

    def small_talk(self, rng: random.Random) -> Chat:
        """Greetings, thanks, who are you, and questions that the model cannot answer."""
        chosen = rng.choices(TALK["small_talk"], [kind["weight"] for kind in TALK["small_talk"]])[0]
        teller = self.teller
        cast = teller.casting.cast(rng, teller.plots[0])
        fill = blanks(rng)
        question = teller.fill_again(rng, rng.choice(chosen["asked"]).format_map(fill), cast)
        offer = f"{cast.h.first()} and {cast.t.first()}"
        answer = teller.fill_again(rng, rng.choice(chosen["answers"]), cast).replace("OFFER", offer)
        chat = [("user", question), ("assistant", answer)]
        if offer in answer and rng.random() < 0.6:
            plot = rng.choice([plot for plot in teller.plots if {"h", "t"} <= plot.roles() and not plot.kinds])
            tale = teller.tell(rng, plot, cast)
            chat += [("user", rng.choice(TALK["yes"])), ("assistant", tale.text)]
        return chat

    def chat(self, rng: random.Random) -> Chat:
        """One conversation of one to four turns."""
        messages = self._system(rng)
        if rng.random() < 0.16:
            messages += self.small_talk(rng)
            if rng.random() < 0.5:
                return messages
        turn, tale = self.tale_turn(rng)
        messages += turn
        if rng.random() < 0.35:
            messages += self._follow_up(rng, tale)
        return messages


class _Blanks(dict[str, str]):
    """Leaves unknown slots as they are, for the cast to fill."""

    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def blanks(rng: random.Random) -> _Blanks:
    """One choice for each blank of the unanswerable questions."""
    chosen = _Blanks({key: rng.choice(values) for key, values in TALK["blanks"].items()})
    chosen.update(n=str(rng.randrange(1, 100)), m=str(rng.randrange(1, 100)))
    return chosen
