"""A prompt as it is, or chat messages; as the text and as the ids that the model is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.chat.harmony import FINAL, is_harmony
from localllm.chat.thoughts import AS_IT_DOES, Effort, Thinking, answer_ids, effort_of, thinking_of
from localllm.chat.tool_words import told_in_words
from localllm.cli.output import Output
from localllm.cli.prompt import argument_text, join_parts, read_input, read_stdin
from localllm.cli.structured import form_of_stdin
from localllm.errors import Fix, UsageError

if TYPE_CHECKING:
    from localllm.config import ResolvedSettings
    from localllm.text.chat_template import ChatInput, ChatTemplate
    from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """Either `raw` or `chat` is set."""

    raw: str | None = None
    chat: ChatInput | None = None

    @property
    def opens_turn(self) -> bool:
        """The value of `Request.opens_turn`."""
        return self.chat is not None and self.chat.opens_turn

    def render(self, directory: Path, resolved: ResolvedSettings) -> str:
        """The prompt as the model in `directory` is given it, special tokens written out. Raises TemplateError, and
        UsageError where what was typed of --think cannot be had."""
        if self.chat is None:
            return self.raw or ""
        from localllm.text.chat_template import ChatTemplate

        template = ChatTemplate.load(directory)
        effort = effort_of(resolved, template, "--think")
        ends = effort.is_off and self.chat.add_generation_prompt and is_harmony(template)
        return template.render_chat(effort.told(told_in_words(template, self.chat))) + (FINAL if ends else "")


@dataclass(frozen=True)
class Encoder:
    """Tokenizer and template of one model, loaded once for any number of prompts. has_form: so have their answers."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: for raw prompts
    effort: Effort = AS_IT_DOES
    has_form: bool = False

    @classmethod
    def load(cls, directory: Path, resolved: ResolvedSettings, *, is_raw: bool, has_form: bool = False) -> Encoder:
        """Raises TokenizerError, and TemplateError and UsageError (of --think) unless it is for raw prompts."""
        from localllm.text.chat_template import ChatTemplate
        from localllm.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(directory)
        if is_raw:
            return cls(tokenizer, None)
        template = ChatTemplate.load(directory, tokenizer)
        return cls(tokenizer, template, effort_of(resolved, template, "--think"), has_form)

    def encode(self, source: Source) -> tuple[int, ...]:
        """The prompt's ids. In a raw prompt special tokens are meant; in a message they are text."""
        from localllm.text.chat_template import encode_chat

        if source.chat is None or self.template is None:
            return tuple(self.tokenizer.encode(source.raw or "", special=True, bos=True))
        chat = self.effort.told(told_in_words(self.template, source.chat))
        tail = answer_ids(self.template, self.tokenizer, is_final=self.has_form or self.effort.is_off)
        return (*encode_chat(self.template, self.tokenizer, chat), *tail)

    def thinking(self, prompt_ids: Sequence[int]) -> Thinking:
        """Return how the thought and the answer to a prompt are separated."""
        return thinking_of(self.template, self.tokenizer, prompt_ids)


def read_source(output: Output, text: str | None, flags: Mapping[str, Any], system: str | None) -> Source:
    """The prompt of a command line: `--messages`, or what is piped in, the files and the text, in this order.

    Raises UsageError where there is none.
    """
    from localllm.text.chat_template import parse_messages_file

    if flags["messages"] is not None:
        return Source(chat=parse_messages_file(read_input(flags["messages"], "--messages", output)))
    paths = flags["file"] or []
    is_form_piped = form_of_stdin(flags) is not None
    parts = [] if Path("-") in paths or is_form_piped else [read_stdin(output)]
    parts += [read_input(path, "--file", output) for path in paths]
    parts.append(None if text is None else argument_text(text, "the prompt"))
    prompt = join_parts([part for part in parts if part])
    if not (prompt if flags["raw"] else prompt.strip()):
        piped = "what is piped in is the answer's form" if is_form_piped else "nothing is piped in"
        raise UsageError(
            "there is no prompt",
            why=f"none on the command line, and {piped}" if text is None and not any(parts) else "it is blank",
            fix=Fix.flag("-p", "TEXT") if is_form_piped else Fix.command("run", "Tell me a tale about a fox."),
        )
    if flags["raw"]:
        return Source(raw=prompt)
    # A shell or an editor ends a text with a newline that nobody means; a prompt that was typed stays as it is.
    question = prompt if text else prompt.rstrip("\n")
    return asked(question, argument_text(system, "--system") if system else None)


def asked(question: str, system: str | None) -> Source:
    """A question as chat messages."""
    from localllm.text.chat_template import ChatInput

    messages = [{"role": "system", "content": system}] if system else []
    return Source(chat=ChatInput([*messages, {"role": "user", "content": question}]))
