"""The models: choose, fetch, pack and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from textual import events, getters, messages, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static

from localllm import hub
from localllm.chat.text import one_line, visible
from localllm.config import format_bytes
from localllm.hub.names import HubName, short_name
from localllm.runtime.fit_check import Verdict
from localllm.runtime.model_catalog import ModelRow, fact_lines, freed_by, model_rows, packed_text
from localllm.runtime.model_choice import best_of
from localllm.runtime.selection import told_of
from localllm.tui.download_worker import Download, DownloadWorker
from localllm.tui.plan_worker import FitWorker
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.screens.dialogs import ChoiceDialog, DialogReply
from localllm.tui.widgets.bars import KeyBar
from localllm.tui.widgets.model_table import (
    DownloadList,
    DownloadView,
    ModelDetails,
    ModelLine,
    ModelTable,
)
from localllm.tui.widgets.status import Notice

_WIDE = 130  # columns, from which on the details have room beside the table
_NO = "no"
_EVERYTHING = "everything"
_PACKED = "packed"
_FORMATS = {
    "int4-g64": "4 bits: small, and mostly the fastest",
    "int8": "8 bits: nearly exact",
    "nf4": "4 bits, as bitsandbytes has them",
    "bf12": "12 bits: exact, 3/4 of the bytes",
}

_Result = TypeVar("_Result")


class ModelsScreen(Screen[None]):
    BINDINGS = [
        Binding("enter", "choose", "choose", id="models.choose"),
        Binding("slash", "filter", "filter", id="models.filter"),
        Binding("p", "pull", "pull", id="models.pull"),
        Binding("z", "pack", "pack", id="models.quantize"),
        Binding("d", "delete", "delete", id="models.delete"),
        Binding("i", "details", "info", id="models.details"),
        Binding("c", "cancel", "cancel", id="models.cancel"),
        Binding("escape", "back", "back", id="models.back"),
        Binding("up", "move(-1)", "the model above", id="models.up", show=False),
        Binding("down", "move(1)", "the model below", id="models.down", show=False),
    ]
    AUTO_FOCUS = "ModelTable"

    table = getters.query_one(ModelTable)
    details = getters.query_one(ModelDetails)
    notice = getters.query_one(Notice)
    filter_input = getters.query_one("#filter", Input)

    def __init__(self, chat: ChatScreen, downloads: DownloadWorker, fits: FitWorker) -> None:
        super().__init__()
        self._chat = chat
        self._worker = chat.worker
        self._downloads = downloads
        self._fits = fits
        self._rows: list[ModelRow] = []
        self._facts: list[tuple[str, str]] = []
        self._wants_details: bool | None = None  # None: where there is room beside the table

    def compose(self) -> ComposeResult:
        yield Static(Content("models"), id="title")
        yield Input(placeholder="/ part of a name; or ORG/REPOSITORY or an address of the hub, to pull it", id="filter")
        with Container(id="body"):
            with Container(id="models"):
                table = ModelTable()
                yield table.header
                yield table
            yield ModelDetails()
        yield Static("", id="measuring", markup=False)
        yield DownloadList()
        yield Notice()
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one(DownloadList).show(self._downloads.all)
        self._list()

    async def on_prune(self, event: messages.Prune) -> None:
        """Cancel the workers before the widgets go that they look for; Textual does so after."""
        self.workers.cancel_node(self)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE, "-wide")
        self._show_details()

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result | None:
        """The result of a blocking call; None where it failed, which is shown."""
        try:
            return await asyncio.to_thread(call)
        except Exception as error:
            self.notice.show_error(told_of(error, None, self._worker.resolved))
            return None

    @work(exclusive=True, group="list")
    async def _list(self) -> None:
        rows = await self._in_thread(lambda: model_rows(has_available=True))
        if rows is None:
            return
        is_first = not self._rows
        self._rows = rows
        self._show_lines()
        if is_first and self._worker.model_name is not None:
            self.table.highlight(self._worker.model_name)
        self._fits.want(self._rows, self._worker.resolved)
        self._describe_highlighted()

    def show_fit(self, name: str) -> None:
        if self._are_judged:  # now they have an order
            self._show_lines()
        else:
            self._change_line(name)
        if name == self.details.model:
            self._show_facts(name)

    def _change_line(self, name: str) -> None:
        for row in self._rows:
            if row.name == name:
                self.table.change(self._line(row))

    def show_measuring(self, text: str) -> None:
        """text: the measurement that runs; "" for none."""
        line = self.query_one("#measuring", Static)
        line.update(Content(f"{one_line(text)} …"))
        line.display = bool(text)

    def show_download(self, download: Download) -> None:
        """Show the progress of a download, or its end."""
        self.query_one(DownloadList).show(self._downloads.all)
        self._change_line(download.name)
        match download.state:
            case "ended":
                self.notice.note(download.result)
            case "cancelled":
                self.notice.note(f"{download.name}: what is there is kept; d deletes it")
            case "failed" if download.error is not None:
                self.notice.show_error(download.error)
        if not download.is_running:
            self._list()

    # The table

    @on(OptionList.OptionHighlighted)
    def _describe_highlighted(self) -> None:
        line = self.table.line
        if line is not None and self.has_class("-details"):
            self._describe(line.name)

    @on(OptionList.OptionSelected)
    @on(Input.Submitted)
    def action_choose(self) -> None:
        if (row := self._row) is not None:
            (self._use if row.is_here else self._fetch)(row)

    def on_input_changed(self) -> None:
        self._show_lines()

    def action_filter(self) -> None:
        self.filter_input.focus()

    def action_move(self, step: int) -> None:
        """Move in the table while the filter has the focus."""
        (self.table.action_cursor_down if step > 0 else self.table.action_cursor_up)()

    def action_back(self) -> None:
        if self.notice.error is not None:
            self.notice.close()
        elif self.filter_input.value or self.filter_input.has_focus:
            self.filter_input.value = ""
            self.table.focus()
        elif not self.notice.close():
            self.dismiss()

    @property
    def _row(self) -> ModelRow | None:
        line = self.table.line
        if line is None:
            self.notice.note("no model has such a name; ORG/REPOSITORY can be pulled from the hub")
        return None if line is None else line.row

    def _show_lines(self) -> None:
        words = short_name(self.filter_input.value.strip())
        lines = self._lines
        found_there = HubName.read(words)
        if found_there is not None and not found_there.part and found_there.revision in ("", "main"):
            words = found_there.repo
        if found_there is not None and not any(row.matches(words.split()) for row in self._rows):
            lines.append(ModelLine(ModelRow(words, "available", found_there.repo)))
        self.table.show(lines, words)
        here = sum(row.is_here for row in self._rows)
        found = f"{here} on this disk, {len(self._rows)} in all"
        if not self.table.num_shown:
            found = f"no name has {words!r} in it; ORG/REPOSITORY is looked for on the hub"
        self.query_one("#title", Static).update(Content(f"models: {one_line(found)}"))

    @property
    def _are_judged(self) -> bool:
        return all(self._fits.of(row, self._worker.resolved) is not None for row in self._rows)

    @property
    def _lines(self) -> list[ModelLine]:
        """What is here first, and what suits this machine best; by that once all are judged, lest they move around."""
        lines = [self._line(row) for row in self._rows]
        if not self._are_judged:
            return lines
        best = best_of([line.choice for line in lines])
        lines = [replace(line, is_best=best is not None and line.name == best.row.name) for line in lines]
        return sorted(lines, key=lambda line: (not line.row.is_here, line.choice.rank))

    def _line(self, row: ModelRow) -> ModelLine:
        verdict = self._fits.of(row, self._worker.resolved)
        return ModelLine(row, verdict, self._downloads.of(row.name), row.name == self._worker.model_name)

    # Choosing

    def _use(self, row: ModelRow) -> None:
        if self._chat.is_answering:
            self.notice.note(self._worker.answers.busy_text)
        elif row.name == self._worker.model_name:
            self.notice.note(f"{row.name} is the model that the chat has")
        else:
            self._worker.do(lambda: self._worker.use(row.name))
            self.dismiss()

    # Fetching and packing

    def action_pull(self) -> None:
        """Fetch the model; pause or resume its download."""
        row = self._row
        if row is None:
            return
        if (download := self._downloads.of(row.name)) is not None:
            self._toggle(download)
        elif row.is_here:
            self.notice.note(f"{row.name} is on this disk")
        else:
            self._fetch(row)

    @work
    async def _fetch(self, row: ModelRow) -> None:
        download = self._downloads.of(row.name)
        if download is not None and download.is_running:
            self.notice.note(f"{row.name} is on its way")
        elif download is not None:
            self._toggle(download)
        elif row.repo is None:
            self.notice.note(f"{row.name} was a folder of yours, which is gone: d deletes what was packed of it")
        elif await self.app.push_screen_wait(_ask_to_pull(row, self._fits.of(row, self._worker.resolved))) == "pull":
            self.notice.note("p pauses it, c cancels it; it goes on behind the chat, too")
            self._downloads.pull(row.name, self._worker.resolved)

    @work
    async def action_pack(self) -> None:
        row = self._row
        if row is None:
            return
        if not row.is_here:
            self.notice.note(f"{row.name} is not on this disk: p fetches it")
        elif any(download.kind == "pack" and download.is_running for download in self._downloads.all):
            self.notice.note("another model is being packed: two would need the memory of both")
        elif (weights := await self.app.push_screen_wait(_ask_how_to_pack(row))) is not None:
            self.notice.close()
            self._downloads.pack(row.name, weights, self._worker.resolved)

    def action_cancel(self) -> None:
        """Cancel the download of the highlighted model, or the only one that there is."""
        row = self._row
        download = None if row is None else self._downloads.of(row.name)
        if download is None and len(self._downloads.all) == 1:
            download = self._downloads.all[0]
        if download is not None:
            self._downloads.cancel(download)
        else:
            self.notice.note("nothing is fetched or packed")

    def on_download_view_clicked(self, event: DownloadView.Clicked) -> None:
        (self._toggle if event.what == "toggle" else self._downloads.cancel)(event.download)

    def _toggle(self, download: Download) -> None:
        if download.is_running:
            self._downloads.pause(download)
        else:
            self.notice.close()
            self._downloads.resume(download)

    # Deleting

    def action_delete(self) -> None:
        row = self._row
        if row is None:
            return
        download = self._downloads.of(row.name)
        if download is not None and download.is_running:
            verb = "fetched" if download.kind == "pull" else "packed"
            self.notice.note(f"{row.name} is being {verb}: c cancels that")
        elif row.state == "available":
            self.notice.note(f"nothing of {row.name} is on this disk")
        else:
            self._ask_to_delete_(row)

    @work(exclusive=True, group="delete")
    async def _ask_to_delete_(self, row: ModelRow) -> None:
        sizes = await self._in_thread(lambda: freed_by(row))
        if sizes is None:
            return
        choice = _ask_to_delete(row, *sizes, is_loaded=row.name == self._worker.model_name)
        answer = await self.app.push_screen_wait(choice)
        if answer == _NO:
            self.notice.note("nothing was deleted")
        if answer not in (_EVERYTHING, _PACKED):
            return
        if (paused := self._downloads.of(row.name)) is not None:
            self._downloads.cancel(paused)
        self._delete(row.name, packed_only=answer == _PACKED)

    @work
    async def _delete(self, name: str, *, packed_only: bool) -> None:
        freed_bytes = await self._in_thread(lambda: hub.removal(name, packed_only=packed_only).delete())
        if freed_bytes is not None:
            what = f"what was packed of {name}" if packed_only else name
            self.notice.note(f"deleted {what}: {format_bytes(freed_bytes)} freed")
            self._list()

    # Details

    def action_details(self) -> None:
        self._wants_details = not self.has_class("-details")
        self._show_details()

    def _show_details(self) -> None:
        wants = self.has_class("-wide") if self._wants_details is None else self._wants_details
        self.set_class(wants, "-details")
        self._describe_highlighted()

    @work(exclusive=True, group="details")
    async def _describe(self, name: str) -> None:
        try:
            self._facts = list(fact_lines(await asyncio.to_thread(hub.describe, name)))
        except Exception as error:
            known = told_of(error, None, self._worker.resolved)
            self._facts = [("name", name), ("error", known.what), ("why", known.why)]
        line = self.table.line
        if line is not None and line.name == name:
            self._show_facts(name)

    def _show_facts(self, name: str) -> None:
        line = self.table.line
        verdict = line.verdict if line is not None and line.name == name else None
        self.details.show(name, self._facts, verdict)


def _ask_to_pull(row: ModelRow, verdict: Verdict | None) -> ChoiceDialog:
    about = row.download_bytes
    size = "not known before the hub is asked" if about is None else f"about {format_bytes(about)}"
    if row.partial_bytes:
        size += f"; {format_bytes(row.partial_bytes)} of it are here, and are gone on from"
    facts = [
        ("from", row.repo or ""),
        ("size", size),
        ("licence", row.licence or ""),
    ]
    if verdict is not None:
        facts.append(("here", verdict.text))
    lines = [_fact(label, text) for label, text in facts if text]
    if row.gated:
        lines += [
            Content.styled("gated: accept the licence first at", "$text-warning"),
            Content(f"  https://huggingface.co/{row.repo}"),
            Content.styled("and log in with a token: HF_TOKEN, or `hf auth login`", "$text-warning"),
        ]
    verb = "resume the download" if row.partial_bytes else "download it"
    return ChoiceDialog(f"{row.name} is not here", lines, [DialogReply("pull", verb), DialogReply(_NO, "no")])


def _ask_how_to_pack(row: ModelRow) -> ChoiceDialog:
    packed = {model.weights: model for model in row.packed}
    replies = []
    for name, meaning in _FORMATS.items():
        if (there := packed.get(name)) is not None:
            meaning += f" ({'there' if there.state == 'whole' else 'begun'}: {format_bytes(there.size_bytes)})"
        replies.append(DialogReply(name, name, meaning))
    lines = [
        Content("The first use packs it too; packing ahead of time saves that wait."),
        Content("A packed format is verified; an unfinished one is resumed."),
    ]
    return ChoiceDialog(f"pack {row.name}", lines, replies)


def _ask_to_delete(row: ModelRow, checkpoint_bytes: int, packed_bytes: int, *, is_loaded: bool) -> ChoiceDialog:
    """A dialog that returns _EVERYTHING, _PACKED, or _NO. checkpoint_bytes: 0 where its files are not deleted."""
    lines: list[Content] = []
    replies: list[DialogReply] = []
    where = row.repo or row.file or row.directory or row.name
    if checkpoint_bytes:
        lines.append(_fact("files", f"{format_bytes(checkpoint_bytes)} of {where}, finished and unfinished ones"))
    lines += [_fact("packed", packed_text(packed)) for packed in row.packed]
    if is_loaded:
        lines.append(Content.styled("It is loaded now; the chat could not load it again.", "$text-error"))
    if checkpoint_bytes:
        replies.append(DialogReply(_EVERYTHING, "delete it", f"frees {format_bytes(checkpoint_bytes + packed_bytes)}"))
    if packed_bytes:
        text = "delete what is packed" + (" alone" if checkpoint_bytes else "")
        replies.append(DialogReply(_PACKED, text, f"frees {format_bytes(packed_bytes)}"))
    replies.append(DialogReply(_NO, "keep it"))
    return ChoiceDialog(f"delete {row.name}?", lines, replies, chosen=len(replies) - 1)


def _fact(label: str, text: str) -> Content:
    return Content.styled(f"{label:<8} ", "$foreground-muted") + Content(visible(one_line(text)))
