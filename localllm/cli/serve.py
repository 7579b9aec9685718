"""`localllm serve`: a server for the applications of this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from localllm.cli import options
from localllm.cli.addresses import address_of, tell_addresses
from localllm.cli.cascade import CASCADE_OPTIONS, CascadeFlags, cascade_of
from localllm.cli.context import CliContext, cli_context
from localllm.cli.load_progress import LoadLine
from localllm.cli.options import choice, number, option, refuse_together, setting_flags, takes
from localllm.cli.pulling import PULL
from localllm.cli.replicas import require_sense, serve_replicas
from localllm.cli.selection import select_or_pull
from localllm.config import DEFAULT, load_settings, user_directories
from localllm.errors import BusyError, EngineClosedError, EngineGoneError, Fix, LocalLLMError, UsageError
from localllm.runtime.engine_loader import Opening, check, with_room_for_adapters
from localllm.runtime.presets import is_preset
from localllm.runtime.selection import Selection, selected, with_defaults, within_context
from localllm.settings import ANSWER, MACHINE, OUTPUT, SETTINGS, EngineConfig, SamplingSettings

if TYPE_CHECKING:
    import asyncio
    import socket

    from localllm.runtime.engine_handle import EngineHandle
    from localllm.runtime.engine_process import Caps, Foreseen
    from localllm.runtime.model_pool import LaunchEngine, ModelPool
    from localllm.server.guard import Admission
    from localllm.server.model_server import ModelServer

DEFAULT_HOST, DEFAULT_PORT, OLLAMA_PORT = "127.0.0.1", 8420, 11434
DEFAULT_PARALLEL, DEFAULT_QUEUE = 8, 64
CASCADE = "cascade"  # the name by which requests ask for it
_ADDRESS, _ACCESS, _MODELS, _REPLICAS = "Address", "Who may ask", "Models", "Several GPUs or machines"  # in the help
# What a flag's value must match, in words too, and an example.
_HOST = r"[A-Za-z0-9._-]+(:\d{1,5})?", "it must be a name, or a name and a port", "box.local"
_ORIGIN = (
    r"[a-z][a-z0-9+.-]*://[^/\s]+",
    "it must be a scheme and a host, without a path, as browsers send it",
    "https://app.example",
)

SERVE_EXAMPLES = """Examples:

\b
  localllm serve
  localllm serve qwen3-8b --parallel 4 --max-tokens 1024
  localllm serve mistral-7b --host 0.0.0.0 --api-key-file key.txt
  localllm serve qwen3-8b --ray --replicas 2
  curl http://127.0.0.1:8420/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"model": "tiny", "messages": [{"role": "user", "content": "A tale about an owl, please."}]}'
"""


@takes(
    options.MODEL,
    option(
        "--host",
        "Address to listen on. Default: 127.0.0.1.\n"
        "Only this machine reaches that one. Other addresses need an API key.",
        "ADDRESS",
        group=_ADDRESS,
        is_basic=True,
    ),
    number(
        "--port",
        f"Port to listen on; 0: any free port. Default: {DEFAULT_PORT}.",
        0,
        65535,
        "8420",
        group=_ADDRESS,
        is_basic=True,
    ),
    option(
        "--also-ollama-port",
        f"Also listen on Ollama's port, {OLLAMA_PORT}.\nFor programs that use no other.",
        group=_ADDRESS,
        is_basic=True,
    ),
    option(
        "--alias",
        "Another name by which clients may ask for the model. May be repeated.",
        "NAME",
        list[str],
        group=_MODELS,
    ),
    number(
        "--parallel",
        f"Number of answers generated at once. Default: {DEFAULT_PARALLEL}.",
        1,
        1024,
        "8",
        group=MACHINE,
        is_basic=True,
    ),
    number(
        "--queue",
        f"Number of answers that may wait; more are refused. Default: {DEFAULT_QUEUE}.",
        0,
        10_000,
        "64",
        group=MACHINE,
    ),
    option(
        "--api-key-file",
        "File with the API key that clients must send.\n"
        "LOCALLLM_API_KEY may hold it instead. If a key is needed and none is given, one is created and shown once.",
        "FILE",
        Path,
        group=_ACCESS,
        is_basic=True,
    ),
    option("--new-key", "Create a new API key in place of the one that was shown before.", group=_ACCESS),
    option(
        "--allow-host",
        "Another host name of this server, with or without a port: box.local, localhost:9000. May be repeated.",
        "NAME",
        list[str],
        group=_ACCESS,
    ),
    option(
        "--allow-origin",
        "Allow web pages from this origin, in addition to those of this machine: app://obsidian.md. May be repeated.",
        "URL",
        list[str],
        group=_ACCESS,
    ),
    option(
        "--also",
        "Also serve this model, such as a folder.\nMay be repeated. Pulled models are served anyway.",
        "MODEL",
        list[str],
        group=_MODELS,
        is_basic=True,
    ),
    option(
        "--idle-unload",
        "Unload a model that is not used so long: 10m, 1h30m.\nDefault: only when its memory is needed.",
        "TIME",
        group=_MODELS,
        is_basic=True,
    ),
    choice(
        "--pooling",
        "How embeddings are pooled: over all tokens, or the last token. Default: mean.",
        "mean",
        "last",
        group=ANSWER,
    ),
    option("--metrics", "Serve /metrics for Prometheus.", group=OUTPUT),
    option("--quiet", "Do not print a line for each request.", group=OUTPUT),
    choice(
        "--overflow",
        "What to do when a chat is longer than the context. stop: an error says what would fit. evict: leave the "
        "oldest turns out of the prompt. Default: stop.",
        "stop",
        "evict",
        group=MACHINE,
    ),
    option(
        "--ray",
        "Serve replicas of the model on Ray Serve: one for each GPU, or for each machine of a cluster.",
        group=_REPLICAS,
    ),
    number(
        "--replicas",
        "Number of replicas with --ray. Default: one for each GPU, or without GPUs one for each machine.",
        1,
        1024,
        "2",
        group=_REPLICAS,
    ),
    "private",
    PULL,
    option(
        "--max-tokens",
        "Longest answer, in tokens, where a request sets none.\n"
        "Default: up to the end of the context. Memory is reserved for as much.",
        "N",
        int,
        accepts=SETTINGS["max_tokens"].accepts,
        group=ANSWER,
        is_basic=True,
    ),
    *CASCADE_OPTIONS,
    SamplingSettings,
    EngineConfig,
)
def serve_command(context: typer.Context, **flags: Any) -> None:
    """Serve models to the applications on this machine.

    Loads MODEL, and other models when a request names them. Clients of OpenAI, Anthropic and Ollama use one address,
    and a browser finds a chat there. Ctrl-C ends it.
    """
    cli = cli_context(context)
    require_sense(flags)
    cascade = cascade_of(flags)
    if cascade is None:
        selection = select_or_pull(cli, flags["model"], flags)
    else:
        small = cascade.select(flags["model"], lambda name: select_or_pull(cli, name, flags))[0]
        selection = within_context(small, cli.output.note)
        if is_preset(CASCADE):
            why, fix = "requests for that name are for the cascade", Fix.command("preset", "rm", CASCADE)
            raise UsageError(f"a preset is called {CASCADE}", why=why, fix=fix)
        flags["also"] = [*cascade.names[1:], *(flags["also"] or ())]
        flags["alias"] = list(dict.fromkeys([CASCADE, *(flags["alias"] or ())]))
    if "" in (flags["alias"] or ()):
        raise UsageError("--alias is empty", why="clients ask for the model by it", fix=Fix.flag("--alias", "NAME"))
    for alias in filter(is_preset, flags["alias"] or ()):
        why = "requests for that name would no longer get the preset"
        raise UsageError(f"--alias {alias} is the name of a preset", why=why, fix=Fix.flag("--alias", "NAME"))
    if flags["ray"] and selection.preset is not None:
        why = "replicas are of a model, and have no presets"
        fix = Fix.command("serve", selection.model_name, "--ray")
        raise UsageError(f"{selection.preset.name} is a preset", why=why, fix=fix)
    named = {"ray": flags["ray"], "adapter": list(selection.settings.adapter)}
    refuse_together(named, {"--ray --adapter": "replicas take no adapters yet"})
    flags["idle_s"] = _idle_seconds(flags["idle_unload"])
    chosen = {"private": selection.private, "cache_disk": flags["cache_disk"]}
    refuse_together(chosen, {"--private --cache-disk": "a private chat stores nothing on the disk"})
    if selection.settings.overflow == "grow":
        why = "its answers share the memory of one context, which stays as long as it is at the start"
        raise UsageError("a server's context cannot grow", why=why, fix=Fix.flag("--overflow", "evict"))
    port = DEFAULT_PORT if flags["port"] is None else flags["port"]
    ports = dict.fromkeys([port, *([OLLAMA_PORT] if flags["also_ollama_port"] else [])])
    _serve(cli, selection, flags, flags["host"] or DEFAULT_HOST, tuple(ports), cascade)


def _serve(
    cli: CliContext,
    selection: Selection,
    flags: Mapping[str, Any],
    host: str,
    ports: Sequence[int],
    cascade: CascadeFlags | None = None,
) -> None:
    from localllm.server.admin_routes import Doors, endpoints
    from localllm.server.app import create_app, create_router
    from localllm.server.cascade import Cascade
    from localllm.server.http_server import bound, serve
    from localllm.server.model_server import Capacity, ModelServer

    parallel, queue = flags["parallel"] or DEFAULT_PARALLEL, flags["queue"]
    capacity = Capacity(parallel, DEFAULT_QUEUE if queue is None else queue)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(bound(host, ports[0]))]
        if len(ports) > 1:
            try:
                sockets.append(stack.enter_context(bound(host, ports[1])))
            except LocalLLMError as error:
                error.fix = Fix.without("--also-ollama-port")  # or stop what listens there, which the error names
                raise
        admission = _admission(cli, flags, sockets)
        if flags["ray"]:
            serve_replicas(cli, selection, flags, capacity, sockets, admission)
            return
        pool = _pool(cli, selection, flags, parallel)
        models = None
        if cascade is not None:
            models = Cascade(tuple(flags["alias"]), tuple(pool.models[: len(cascade.names)]), cascade.bar)
        server = ModelServer(pool, capacity, flags["pooling"] or "mean", models)
        stack.callback(server.close)
        first = _First(cli, server, [address_of(sock) for sock in sockets])
        log = cli.output.note if not flags["quiet"] else lambda _line: None
        inner = create_router(endpoints(first.addresses, first.stop), server)
        app = Doors(create_app(server, admission, log=log, with_metrics=flags["metrics"]), inner)
        local = _local_socket(cli, stack)
        listened = [*sockets, *([] if local is None else [local])]
        serve(app, listened, lambda stop: stack.enter_context(first.stopping(stop)), pool.stop, first.begin)
    if first.failure is not None:
        raise first.failure
    cli.output.note("stopped")


def _pool(cli: CliContext, selection: Selection, flags: Mapping[str, Any], parallel: int) -> ModelPool:
    """Raises what can be known before the model is loaded."""
    from localllm.runtime.model_pool import ModelPool
    from localllm.runtime.served_adapters import given_adapters

    check(selection)
    resolved, preset, adapters = load_settings(setting_flags(flags)), selection.preset, given_adapters(selection)
    # An adapter is used where a request names it: the engine has room for it, and the model is the plain one.
    room = with_room_for_adapters(selection.settings).adapter_memory
    has_room = {"adapter_memory": (room, resolved.origins["adapter_memory"])}  # other models have none of these
    resolved = resolved.overlaid({"adapter": ((), DEFAULT)})
    selection = replace(selection, resolved=selection.resolved.overlaid({"adapter": ((), DEFAULT), **has_room}))
    if preset is not None:  # the engine is shared; the preset's other settings are for requests that name it
        own = preset.over(resolved.overlaid(has_room), {each.name: each for each in fields(EngineConfig)})
        selection = with_defaults(own, selection.files)
    return ModelPool(
        selection,
        resolved,
        _launch(cli, Opening(keeps_pages=True, parallel=parallel)),
        preset=None if preset is None else preset.name,
        aliases=flags["alias"] or (),
        also=[within_context(selected(resolved, word), cli.output.note) for word in flags["also"] or ()],
        adapters=adapters,
        idle_s=flags["idle_s"],
        note=cli.output.note,
    )


def _launch(cli: CliContext, opening: Opening) -> LaunchEngine:
    """Loads a model in a process of its own, of which a line tells, as of its end where nobody wanted that."""

    def launch(selection: Selection, caps: Caps, foreseen: Callable[[Foreseen], None]) -> EngineHandle:
        from localllm.runtime.engine_process import LoadObserver, start_engine

        shown = LoadLine(cli, selection)

        def ended() -> None:
            with contextlib.suppress(Exception):  # of which who asked for it is told
                process.wait_loaded()
            shown.end()
            if isinstance(failure := process.wait_ended(), EngineGoneError):
                again = "the next request loads it again"
                cli.output.warn(f"the engine of {selection.files.name} has ended: {failure.why}; {again}")

        process = start_engine(selection, opening, caps, LoadObserver(foreseen, shown.hear))
        threading.Thread(target=ended, name="localllm-watching", daemon=True).start()
        return process

    return launch


def _local_socket(cli: CliContext, stack: contextlib.ExitStack) -> socket.socket | None:
    """At which this user's own programs reach the server; None where another of this user's has it."""
    from localllm.runtime.sockets import IS_SUPPORTED, forget, identity, listening, runtime_folder, server_socket

    if not IS_SUPPORTED:
        return None
    try:
        runtime_folder()
        sock = stack.enter_context(listening(server_socket()))
    except LocalLLMError as error:
        cli.output.note(f"run, chat, ps, load and stop do not find this server: {error.what} ({error.why})")
        return None
    sock.setblocking(False)
    stack.callback(forget, server_socket(), identity(server_socket()))
    return sock


class _First:
    """The load of the model that the server was started with, while it answers already; a server that has none ends.
    failure: why there is none."""

    def __init__(self, cli: CliContext, server: ModelServer, addresses: list[str]) -> None:
        self.failure: BaseException | None = None
        self.addresses = addresses
        self._cli = cli
        self._server = server
        self._stop: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    def stopping(self, stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """stop: what ends the server, which a signal does."""
        self._stop = stop
        return self._cli.interrupts.stopping(stop)

    def stop(self) -> None:
        self._stop()

    async def begin(self) -> None:
        import asyncio

        self._task = asyncio.create_task(self._load())

    async def _load(self) -> None:
        import asyncio

        served = self._server.pool.first
        try:
            await self._server.pool.load(served)
            engine, where = served.engine(), " and ".join(self.addresses)
            for given in self._server.pool.adapters.given_to(served):
                await asyncio.to_thread(given.check)
            name = self._server.pool.preset or served.name
        except EngineClosedError:  # the server was stopped meanwhile
            return
        except (EngineGoneError, BusyError) as error:  # killed twice, or unloaded by hand: it may be asked for again
            self._cli.output.warn(f"{error.what}: {error.why}")
            return
        except Exception as error:
            self.failure = error
            self.stop()
            return
        room = f"{engine.ctx} tokens of context, {self._server.capacity.parallel} answers at once"
        self._cli.output.note(f"serving {name} ({engine.weights}, {room}) on {where}")
        if (cascade := self._server.cascade) is not None:
            first, *others = (each.name for each in cascade.models)
            rest = f"{first} where its confidence is {cascade.bar.accept:g} or more, else by {', then '.join(others)}"
            self._cli.output.note(f"requests for {' or '.join(cascade.names)} are answered by {rest}")
        if adapters := self._server.pool.adapters.given_to(served):
            names = ", ".join(f"{served.name}:{each.files.name}" for each in adapters)
            self._cli.output.note(f"requests may name its adapters: {names}")
        tell_addresses(self._cli.output, self.addresses)


def _admission(cli: CliContext, flags: Mapping[str, Any], sockets: Sequence[socket.socket]) -> Admission:
    """Who is let in. Raises UsageError."""
    from localllm.server.guard import Admission, given_key, kept_key
    from localllm.server.http_server import is_loopback

    is_local = all(map(is_loopback, sockets))
    key = given_key(flags["api_key_file"], os.environ)
    if key is not None and flags["new_key"]:
        why = "the key that is used was given, and no other is made"
        raise UsageError("--new-key has no effect", why=why, fix=Fix.without("--new-key"))
    if key is None and (not is_local or flags["new_key"]):
        key = kept_key(user_directories().data / "server-key", is_new=flags["new_key"])
        cli.output.note(
            f"the API key, which is shown this once: {key.made}"
            if key.made
            else "clients need the API key that was shown when it was made; --new-key makes another"
        )
    return Admission(
        ports=tuple(sock.getsockname()[1] for sock in sockets),
        is_local=is_local,
        hosts=_matching("--allow-host", flags["allow_host"], *_HOST),
        origins=_matching("--allow-origin", flags["allow_origin"], *_ORIGIN),
        key_digest=None if key is None else key.digest,
    )


def _idle_seconds(text: str | None) -> float | None:
    """Raises UsageError."""
    if text is None:
        return None
    from localllm.server.fields import DURATION, keep_seconds

    seconds = keep_seconds(text) if DURATION.fullmatch(text) else None
    if seconds is None or seconds <= 0:
        why = "it must be a time above 0, with its unit"
        raise UsageError(f"--idle-unload is {text[:80]!r}", why=why, fix=Fix.flag("--idle-unload", "10m"))
    return seconds


def _matching(flag: str, values: Sequence[str] | None, pattern: str, why: str, usual: str) -> tuple[str, ...]:
    """The values of a flag. Raises UsageError for one that is not as it must be."""
    for value in values or ():
        if not re.fullmatch(pattern, value):
            raise UsageError(f"{flag} is {value[:80]!r}", why=why, fix=Fix.flag(flag, usual))
    return tuple(values or ())
