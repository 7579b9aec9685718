"""A cascade of models under one name: a request for it is answered by the first model that is sure of its answer.

The models are asked one after the other, each as if the request had named it: by its own template, tokenizer and usual
sampling. An answer is held back until it is whole and was judged. Where it is not given, its model is free before the
next one is asked for, so that the two need not have room at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from localllm.chat.cascade import Bar, Tried, judged
from localllm.runtime.served_model import AskedModel, ServedModel
from localllm.server.errors import RequestError
from localllm.server.fields import NO_BEST_OF
from localllm.server.generation_request import GenerationRequest
from localllm.server.stream import GenerationStream
from localllm.server.tools.deltas import Delta

HEADER = "x-localllm-cascade"  # of a reply: the models that were asked, each with its confidence


class UnsureError(Exception):
    """The model does not answer: the next one of the cascade is to be asked."""


@dataclass(frozen=True)
class Cascade:
    """names: by which requests ask for it. models: the cheapest first. bar: for the answers of all but the last."""

    names: tuple[str, ...]
    models: tuple[ServedModel, ...]
    bar: Bar

    def has(self, name: str | None) -> bool:
        """Whether a request for that name is for the cascade; so is one that names no model."""
        bare = None if name is None else name.removesuffix(":latest").casefold()
        return bare is None or bare in {each.casefold() for each in self.names}

    def streams(self, body: object) -> bool:
        """Whether the body is of a request for the cascade that wants a stream."""
        return bool(getattr(body, "stream", None)) and self.has(getattr(body, "model", None))

    def stage(self, tried: list[Tried]) -> CascadeStage:
        """Return the model that is to be asked now. tried: those before it; it is added to them."""
        model, is_last = self.models[len(tried)], len(tried) + 1 == len(self.models)
        return CascadeStage(model, model.selection, bar=None if is_last else self.bar, tried=tried)


@dataclass(frozen=True)
class CascadeStage(AskedModel):
    """A model that is asked as a part of a cascade. bar: that its answer must pass; None: any is given."""

    bar: Bar | None = None
    tried: list[Tried] = field(default_factory=list)

    def shown(self, _given: str | None) -> str:
        return self.name

    async def answer(
        self,
        ask: Callable[[GenerationRequest], Awaitable[GenerationStream]],
        requests: Sequence[GenerationRequest],
    ) -> GenerationStream:
        """Return the answer, which is whole and was judged where there is a bar. ask: begins to answer. Raises
        UnsureError where it may not be given, RequestError for a request that a cascade cannot honour."""
        request = _only(requests, self.bar)
        if self.bar is None:
            self.tried.append(Tried(self.name, None, is_accepted=True))
            return await ask(request)
        try:
            answers = await ask(replace(request, n=self.bar.drafts, best_of=NO_BEST_OF, is_scored=self.bar.is_scored))
        except RequestError as error:
            if error.name != "context_length_exceeded":
                raise
            self.tried.append(Tried(self.name, None, is_accepted=False))
            raise UnsureError from None
        try:
            wholes = await answers.wholes()
            judgement = judged(self.bar, list(map(_said, wholes)), [each.end for each in wholes])
            self.tried.append(Tried(self.name, judgement.confidence, judgement.is_accepted))
            if not judgement.is_accepted:
                raise UnsureError
        except BaseException:
            answers.close()
            raise
        answers.keep(judgement.place, wholes[judgement.place])
        return answers


def tried_text(tried: Sequence[Tried]) -> str:
    """Return the models that were asked, for a header and for the log: "tiny:0.412,qwen3-8b"."""
    return ",".join(
        quote(each.model, safe="/:@+ ") + ("" if each.confidence is None else f":{each.confidence:.3f}")
        for each in tried
    )


def _said(answer: Delta) -> str:
    calls = "".join(f"\n{call.name} {call.arguments}" for call in answer.calls)
    return answer.text + calls


def _only(requests: Sequence[GenerationRequest], bar: Bar | None) -> GenerationRequest:
    """Return the one request. Raises RequestError for what a cascade cannot honour."""
    request = requests[0]
    is_greedy = bar is not None and bar.drafts > 1 and request.sampling.temperature == 0
    refused = {
        request.prompt_field: (len(requests) > 1, "a cascade answers one prompt"),
        "n": (request.n > 1 or request.best_of.rows(request.n) > 1, "a cascade chooses the answer itself"),
        "max_tokens": (request.reads_only, "there is no answer to judge"),
        "logit_bias": (bool(request.sampling.logit_bias), "a token has another id in each model"),
        "temperature": (is_greedy, "at 0, the drafts that must agree would all be the same"),
    }
    if isinstance(request.prompt, tuple):
        refused[request.prompt_field] = (True, "a token has another id in each model: send text")
    for param, (is_set, why) in refused.items():
        if is_set:
            raise RequestError(400, f"{param!r} cannot be honoured", why=why, param=param, name="unsupported_value")
    return request
