"""The API key of a server: given by the user, or made and shown once. Only its digest is saved."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import LocalLLMError, UsageError
from localllm.server.guard import key_digest

VARIABLE = "LOCALLLM_API_KEY"
_SHORTEST = 16  # characters; a made one has 43


@dataclass(frozen=True)
class ServerKey:
    """made: the key itself, if it is new."""

    digest: bytes
    made: str | None = None


_MAKING = "openssl rand -base64 32 > key.txt"


def given_key(file: Path | None, environ: Mapping[str, str]) -> ServerKey | None:
    """Return the key in the file, else in the environment, else None. Raises UsageError."""
    if file is not None:
        try:
            text = file.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {file} cannot be read", why=str(error), fix=_MAKING) from None
        return ServerKey(key_digest(_accepted(text, f"the key in {file}")))
    if environ.get(VARIABLE):
        return ServerKey(key_digest(_accepted(environ[VARIABLE], f"the key in {VARIABLE}")))
    return None


def _accepted(text: str, name: str) -> str:
    key = text.strip()
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        why = f"it has {len(key)} characters; at least {_SHORTEST} are needed, of ASCII and without blanks"
        raise UsageError(f"{name} is no key", why=why, fix=_MAKING)
    return key


def kept_key(file: Path, *, is_new: bool) -> ServerKey:
    """Return the key of an earlier start, or a new one. Raises LocalLLMError where it cannot be saved."""
    with contextlib.suppress(OSError, ValueError):
        digest = bytes.fromhex(file.read_text(encoding="ascii"))
        if len(digest) == 32 and not is_new:
            return ServerKey(digest)
    key = secrets.token_urlsafe(32)
    digest = key_digest(key)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(digest.hex())
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        what, fix = f"the key cannot be kept in {file}", "localllm serve --api-key-file FILE"
        raise LocalLLMError(what, why=error.strerror or str(error), fix=fix) from None
    return ServerKey(digest, key)
