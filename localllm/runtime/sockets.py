"""The Unix sockets by which other programs of the same user find the server and its engines: in a folder that nobody
else may enter."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import stat
import struct
import sys
import tempfile
import threading
from pathlib import Path

from localllm.config import user_directories
from localllm.errors import LocalLLMError
from localllm.present import is_there

_MOST_PATH = 90  # characters: a socket's address has room for 104 to 108 bytes, and names are put behind
IS_SUPPORTED = hasattr(socket, "AF_UNIX") and sys.platform != "win32"


def runtime_folder() -> Path:
    """Return the folder of the sockets, made for this user alone where it is absent. Raises LocalLLMError where it
    belongs to another user, or is open to one."""
    folder = _place()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalLLMError("the folder of the sockets cannot be made", why=str(error)) from None
    if not _is_own(folder):
        why = f"{folder} is not a folder that is this user's alone"
        raise LocalLLMError("the folder of the sockets cannot be used", why=why, fix=f"chmod 700 {folder}")
    return folder


def server_socket() -> Path:
    """The address of this user's server."""
    return _place() / "server.sock"


def found_server() -> Path | None:
    """Return `server_socket` where it exists, in a folder that nobody else could have put it into."""
    path = server_socket()
    return path if is_there(path) and _is_own(path.parent) else None


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _place() -> Path:
    home = os.environ.get("LOCALLLM_HOME")
    system = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(system) / "localllm" if system and not home else user_directories().data / "run"
    if len(os.fsencode(folder)) <= _MOST_PATH:
        return folder
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"localllm-{os.getuid()}-{name}"


def listening(path: Path) -> socket.socket:
    """Listen at that address, for this user alone; a file that an ended process has left there is removed.

    Raises LocalLLMError where somebody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_answered(path):
            raise LocalLLMError("a server of this user is running already", why=f"it listens at {path}")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise LocalLLMError(f"{path} cannot be listened on", why=str(error)) from None
    except LocalLLMError:
        sock.close()
        raise
    return sock


def is_answered(path: Path) -> bool:
    """Return whether a process listens there: the file alone says nothing, as it outlives a process that was killed."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is busy, which the dead are not
            return True
    return True


def identity(path: Path) -> tuple[int, int]:
    """Return the identity of the file at an address, whatever comes to stand there later."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def forget(path: Path, own: tuple[int, int]) -> None:
    """Remove a socket's file, where it is the one that was made and not a successor's."""
    with contextlib.suppress(OSError):
        if identity(path) == own:
            path.unlink()


def connected(path: Path) -> socket.socket:
    """Connect to an address. Raises OSError where no process listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


class Outbox:
    """Messages to a socket from any thread: none of them waits for a peer that does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="localllm-send", daemon=True)
        self._writer.start()

    def send(self, data: bytes) -> None:
        """Ignore a connection that has ended: the thread that reads it finds out."""
        self._unsent.put(data)

    def end(self, timeout_s: float = 0.0) -> None:
        """Take nothing more; wait so long for what is on its way."""
        self._unsent.put(None)
        self._writer.join(timeout_s)

    def _write(self) -> None:
        is_open = True
        try:
            while is_open:
                parts = [self._unsent.get()]
                while not self._unsent.empty():  # no other thread takes anything out
                    parts.append(self._unsent.get())
                self._sock.sendall(b"".join(part for part in parts if part is not None))
                is_open = None not in parts
        except OSError:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def listener_pid(sock: socket.socket) -> int | None:
    """Return the id of the process that listens at the other end, in this process's numbers, which in a container
    are others than its own; None where it has none here, or where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, _uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid or None
