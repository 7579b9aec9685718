"""The questions before a model is fetched, packed or deleted."""

from __future__ import annotations

from textual.content import Content

from localllm.chat.text import one_line, visible
from localllm.config import format_bytes
from localllm.runtime.fit_check import Verdict
from localllm.runtime.model_catalog import ModelRow, licence_text, packed_text
from localllm.tui.screens.dialogs import ChoiceDialog, DialogReply
from localllm.tui.widgets.model_table import about_bytes

NO = "no"
EVERYTHING = "everything"
PACKED = "packed"
_FORMATS = {
    "int4-g64": "4 bits: small, and mostly the fastest",
    "int8": "8 bits: nearly exact",
    "nf4": "4 bits, as bitsandbytes has them",
    "bf12": "12 bits: exact, 3/4 of the bytes",
}


def ask_to_pull(row: ModelRow, verdict: Verdict | None) -> ChoiceDialog:
    """A dialog that returns "pull" or NO."""
    about = about_bytes(row)
    size = "not known before the hub is asked" if about is None else f"about {format_bytes(about)}"
    if row.partial_bytes:
        size += f"; {format_bytes(row.partial_bytes)} of it are here, and are gone on from"
    facts = [("from", row.repo or ""), ("size", size), ("licence", licence_text(row).replace(" (gated)", ""))]
    if verdict is not None:
        facts.append(("here", verdict.text))
    lines = [_fact(label, text) for label, text in facts if text]
    if row.gated:
        lines += [
            Content.styled("gated: its maker asks for the licence to be accepted first, at", "$text-warning"),
            Content(f"  https://huggingface.co/{row.repo}"),
            Content.styled("and for a token: HF_TOKEN, or `hf auth login`", "$text-warning"),
        ]
    verb = "go on with the pull" if row.partial_bytes else "pull it"
    return ChoiceDialog(f"{row.name} is not here", lines, [DialogReply("pull", verb), DialogReply(NO, "no")])


def ask_how_to_pack(row: ModelRow) -> ChoiceDialog:
    """A dialog that returns the name of a format."""
    packed = {model.weights: model for model in row.packed}
    replies = []
    for name, meaning in _FORMATS.items():
        if (there := packed.get(name)) is not None:
            meaning += f" ({'there' if there.state == 'whole' else 'begun'}: {format_bytes(there.size_bytes)})"
        replies.append(DialogReply(name, name, meaning))
    lines = [
        Content("The first use does it, too; ahead of time nobody waits for it."),
        Content("What is packed already is verified, what was begun is gone on with."),
    ]
    return ChoiceDialog(f"pack {row.name}", lines, replies)


def ask_to_delete(row: ModelRow, checkpoint_bytes: int, packed_bytes: int, *, is_loaded: bool) -> ChoiceDialog:
    """A dialog that returns EVERYTHING, PACKED, or NO. checkpoint_bytes: 0 where its files are not deleted."""
    lines: list[Content] = []
    replies: list[DialogReply] = []
    where = row.repo or row.directory or row.name
    if checkpoint_bytes:
        lines.append(_fact("files", f"{format_bytes(checkpoint_bytes)} of {where}, finished and unfinished ones"))
    lines += [_fact("packed", packed_text(packed)) for packed in row.packed]
    if is_loaded:
        lines.append(Content.styled("It is the model that is loaded: the chat could not load it again.", "$text-error"))
    if checkpoint_bytes:
        replies.append(DialogReply(EVERYTHING, "delete it", f"frees {format_bytes(checkpoint_bytes + packed_bytes)}"))
    if packed_bytes:
        text = "delete what is packed" + (" alone" if checkpoint_bytes else "")
        replies.append(DialogReply(PACKED, text, f"frees {format_bytes(packed_bytes)}"))
    replies.append(DialogReply(NO, "keep it"))
    return ChoiceDialog(f"delete {row.name}?", lines, replies, chosen=len(replies) - 1)


def _fact(label: str, text: str) -> Content:
    return Content.styled(f"{label:<8} ", "$foreground-muted") + Content(visible(one_line(text)))
