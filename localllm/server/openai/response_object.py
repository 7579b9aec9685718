"""The replies of /v1/responses: a response of items, and the events by which one is streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import SkipValidation

from localllm.engine.events import FinishedEvent, TokenLogprob
from localllm.server.bodies import Absent, ReplyBody
from localllm.server.compression import CompressionReply
from localllm.server.errors import Failure
from localllm.server.logprobs import ContentLogprob, content_logprobs
from localllm.server.replies import AnswerWriter, event, new_id
from localllm.server.tools.deltas import Delta
from localllm.text.tokenizer import Tokenizer

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ReplyBody):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: SkipValidation[list[ContentLogprob]]


class OutputReasoningText(ReplyBody):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(ReplyBody):
    id: str
    type: Literal["message"] = "message"
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(ReplyBody):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: tuple[()] = ()
    content: list[OutputReasoningText]


class FunctionCallItem(ReplyBody):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputDetails(ReplyBody):
    """reused_tokens: as in `PromptDetails`."""

    cached_tokens: int
    reused_tokens: Absent[int] = None
    cache_write_tokens: int = 0


class OutputDetails(ReplyBody):
    reasoning_tokens: int


class ResponseUsage(ReplyBody):
    """evicted_tokens: as in `OpenAIUsage`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    evicted_tokens: Absent[int] = None


class Incomplete(ReplyBody):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(ReplyBody):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    completed_at: int | None
    status: Status
    error: None = None
    incomplete_details: Incomplete | None
    output: list[OutputItem]
    usage: Absent[ResponseUsage] = None
    compression: Absent[CompressionReply] = None


class ResponseEvent(ReplyBody):
    """type: "response.created" first, "response.completed" or "response.incomplete" last."""

    type: str
    sequence_number: int
    response: Absent[ResponseObject] = None
    delta: Absent[str] = None


ItemKind = Literal["reasoning", "message", "function_call"]
ItemDelta = tuple[OutputItem, str, list[ContentLogprob]]  # the item, its new text and log-probabilities
_EVENTS: dict[ItemKind, str] = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class ResponseWriter(AnswerWriter):
    """Builds a response out of an answer's deltas, and writes it in numbered events; an item's begin when there is
    something of it. head: the fields of the response that are known before."""

    def __init__(self, head: Mapping[str, Any], tokenizer: Tokenizer, most_logprobs: int | None) -> None:
        self._head = {"id": new_id("resp_"), **head}
        self._tokenizer = tokenizer
        self._most = most_logprobs
        self._num_thought_tokens = 0
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is still to come, or is of a call
        self._finished: FinishedEvent | None = None
        self._items: list[OutputItem] = []
        self._number = -1
        self._index = -1  # of the item that is open
        self._open: OutputItem | None = None

    def add(self, delta: Delta) -> Iterator[ItemDelta]:
        """Take a delta; a new item comes without any text first. A response that has ended has a message,
        perhaps an empty one, or a call."""
        self._num_thought_tokens += delta.num_thought_tokens
        self._waiting += delta.logprobs
        if delta.thought:
            yield from self._extend("reasoning", delta.thought)
        if delta.text:
            yield from self._extend("message", delta.text)
        for call in delta.calls:
            yield from self._extend("function_call", call.arguments, call.name)
        if delta.finished is not None:
            self._finished = delta.finished
            if not self._items or self._items[-1].type != "function_call":
                yield from self._extend("message", "")
            self._items[-1].status = self.status

    def _extend(self, kind: ItemKind, text: str, name: str | None = None) -> Iterator[ItemDelta]:
        if not self._items or self._items[-1].type != kind or name is not None:
            for item in self._items[-1:]:
                item.status = "completed"
            self._items.append(_begun(kind, name or ""))
            yield self._items[-1], "", []
        item, found = self._items[-1], list[ContentLogprob]()
        if kind == "message" and self._most is not None:
            found = content_logprobs(self._waiting, self._tokenizer, self._most)
        if kind != "reasoning":
            self._waiting = []
        if isinstance(item, FunctionCallItem):
            item.arguments += text
        else:
            item.content[0].text += text
        if isinstance(item, OutputMessage):
            item.content[0].logprobs += found
        yield item, text, found

    @property
    def status(self) -> Status:
        if self._finished is None:
            return "in_progress"
        return "incomplete" if self._finished.finish_reason == "length" else "completed"

    def response(self) -> ResponseObject:
        """Return the response so far; it has its output once it has ended."""
        status, usage = self.status, None
        if self._finished is not None:
            counts = self._finished.usage
            usage = ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=InputDetails(
                    cached_tokens=counts.cached_tokens, reused_tokens=counts.reused_tokens or None
                ),
                output_tokens=counts.completion_tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=self._num_thought_tokens),
                total_tokens=counts.prompt_tokens + counts.completion_tokens,
                evicted_tokens=counts.evicted_tokens or None,
            )
        return ResponseObject(
            **self._head,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            incomplete_details=Incomplete() if status == "incomplete" else None,
            output=self._items if usage else [],
            usage=usage,
        )

    def whole(self, answers: list[Delta]) -> ResponseObject:
        for answer in answers:
            list(self.add(answer))
        return self.response()

    def begin(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.response())

    def write(self, _index: int, delta: Delta) -> Iterator[bytes]:
        for item, text, logprobs in self.add(delta):
            if item is not self._open:
                yield from self._close_item()
                yield from self._open_item(item)
            if text or logprobs:
                more = {"logprobs": logprobs} if isinstance(item, OutputMessage) else {}
                yield self._item_event(item, f"{_EVENTS[item.type]}.delta", delta=text, **more)
        if delta.finished is not None:
            yield from self._close_item()

    def end(self) -> Iterator[bytes]:
        yield self._event(f"response.{self.status}", response=self.response())

    def fail(self, failure: Failure) -> bytes:
        return self._event("error", code=failure.name, message=failure.message, param=failure.param)

    def _open_item(self, item: OutputItem) -> Iterator[bytes]:
        self._open = item
        self._index += 1
        begun = {**item.written, **({} if isinstance(item, FunctionCallItem) else {"content": []})}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        if not isinstance(item, FunctionCallItem):
            yield self._item_event(item, "response.content_part.added", part=item.content[0])

    def _close_item(self) -> Iterator[bytes]:
        """Write the open item's text once more, its part, and all of it."""
        item, self._open = self._open, None
        if item is None:
            return
        done = f"{_EVENTS[item.type]}.done"
        if isinstance(item, FunctionCallItem):
            yield self._item_event(item, done, name=item.name, arguments=item.arguments)
        else:
            part = item.content[0]
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            yield self._item_event(item, done, text=part.text, **more)
            yield self._item_event(item, "response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _item_event(self, item: OutputItem, kind: str, **fields: Any) -> bytes:
        place = {"item_id": item.id, "output_index": self._index}
        if not isinstance(item, FunctionCallItem):
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)


def _begun(kind: ItemKind, name: str) -> OutputItem:
    if kind == "function_call":
        return FunctionCallItem(id=new_id("fc_"), call_id=new_id("call_"), name=name, arguments="")
    if kind == "message":
        return OutputMessage(id=new_id("msg_"), content=[OutputText(text="", logprobs=[])])
    return ReasoningItem(id=new_id("rs_"), content=[OutputReasoningText(text="")])
