"""One SQLite file: opened safely, written in transactions, and every refusal of the disk as an error that helps.

Knows files, locks and damage. Knows nothing of sessions and messages.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from localllm.errors import Fix, HistoryError
from localllm.history import schema
from localllm.history.records import clean

PATIENCE_S = 10.0  # how long a transaction of another process is waited for; theirs take milliseconds
_PAUSE_S = 0.01
_UNHEARD_S = 0.02  # how long SQLite itself waits, in which no Ctrl-C is heard
# Every page is read when the file is opened, 1 ms for 1 MB; a larger file's only after it was found damaged at work.
_CHECKED_BYTES = 32 << 20
# The bytes of a database on which each of its connections holds a lock that it shares: SQLite's file format, 1.3.13.
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510


class LockedError(HistoryError):
    """Another process has held the file for longer than was waited."""


class DamagedError(HistoryError):
    """The file, or pages of it, are no database."""


class Database:
    """A connection to the file at `path`, which is made where it may be written.

    moved_to: where a damaged file was put, in whose place a new one was begun. Raises HistoryError, as all of its
    methods do.
    """

    def __init__(self, path: Path, *, writable: bool, patience_s: float = PATIENCE_S) -> None:
        self.path = path
        self.writable = writable
        self.patience_s = patience_s
        self.moved_to: Path | None = None
        self.identity: os.stat_result
        self.has_words = False  # the index for searching is there
        self._depth = 0
        try:
            self._connection = self._open()
        except DamagedError:
            if not writable:
                raise
            with self._explained():
                self.moved_to = self._move_aside()
            self._connection = self._open()

    def close(self) -> None:
        """End the connection; what was committed is in the file."""
        with suppress(sqlite3.Error):
            self._connection.close()

    def is_in_place(self) -> bool:
        """Return whether the file is still at its path: nobody would ever read what is written into a deleted one."""
        try:
            return os.path.samestat(self.path.stat(), self.identity)
        except OSError:
            return False

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        bound = [clean(value) if isinstance(value, str) else value for value in values]
        with self._explained():
            return self._connection.execute(statement, bound).fetchall()

    @contextmanager
    def writing(self, *, synced: bool = True, patience_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction; inside another one, a part of that. An exception undoes all of it.

        synced: the disk has it in the end. Otherwise a kill cannot take it back, but a loss of power can.
        """
        if self._depth:
            yield self._connection
            return
        with self._explained():
            if self._connection.in_transaction:  # a rollback that a full disk refused
                self._connection.rollback()
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._begin(self.patience_s if patience_s is None else patience_s)
            self._depth = 1
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.rollback()
                raise
            finally:
                self._depth = 0

    def forget_deleted(self) -> None:
        """Remove deleted texts from the index and the log as well, as far as no other process is reading."""
        with suppress(HistoryError):
            if self.has_words:
                with self.writing() as connection:
                    connection.execute("INSERT INTO message_words (message_words) VALUES ('optimize')")
                    connection.execute("INSERT INTO title_words (title_words) VALUES ('optimize')")
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def _begin(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _open(self) -> sqlite3.Connection:
        with self._explained():
            if self.writable:
                _make_private(self.path)
                mode = "rw"
            else:  # SQLite's own files beside it can be neither made nor, without a log, needed
                mode = "ro" if _beside(self.path, "-wal").exists() else "ro&immutable=1"
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=self.patience_s)
            try:
                connection.row_factory = sqlite3.Row
                self.identity = self.path.stat()
                self._connection = connection
                self._prepare(connection)
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * _UNHEARD_S)}")
            except BaseException:
                connection.close()
                raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        known = self._require_ours(connection)
        self._require_sound(connection)
        if not self.writable:
            self.has_words = known > 0 and schema.has_fts5(connection) and schema.has_index(connection)
            return
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # a chat that was deleted is not to be found in free pages
        if known < schema.VERSION:
            with self.writing():  # asked again: another process may have been faster
                schema.migrate(connection, self._require_ours(connection))
        self.has_words = schema.has_fts5(connection)
        if schema.has_index(connection) != self.has_words:
            with self.writing():
                (schema.make_index if self.has_words else schema.drop_triggers)(connection)

    def _require_ours(self, connection: sqlite3.Connection) -> int:
        """The version of its tables; 0 where it has none. Raises HistoryError for one that must not be touched."""
        # The tables are read first: another process creates them in one transaction with the id that is read after.
        has_tables = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
        known, application = (
            int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("user_version", "application_id")
        )
        if application == schema.APPLICATION_ID and known > schema.VERSION:
            raise HistoryError(
                f"the history is of version {known}; this localllm knows version {schema.VERSION}",
                why=f"a newer localllm has written {self.path}; it was left as it is",
                fix="pip install --upgrade localllm",
            )
        if has_tables and application != schema.APPLICATION_ID:
            why = f"{self.path} has other tables; it was left as it is"
            fix = f"mv {shlex.quote(str(self.path))} {shlex.quote(f'{self.path}.other')}"
            raise HistoryError("the history's file is a database of another program", why=why, fix=fix)
        return known

    def _require_sound(self, connection: sqlite3.Connection) -> None:
        suspect = _beside(self.path, "-suspect")
        if self.identity.st_size > _CHECKED_BYTES and not suspect.exists():
            return
        found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
        if found != ["ok"] and not all("fts5" in text.casefold() for text in found):  # the index is made again
            raise DamagedError("the history is damaged", why=f"{found[0][:200]} ({self.path})")
        if found != ["ok"] and self.writable:
            schema.drop_triggers(connection)
        with suppress(OSError):
            suspect.unlink(missing_ok=True)

    def _move_aside(self) -> Path | None:
        """Rename the damaged file, with what SQLite put beside it; delete nothing. None: another process did it."""
        with _alone(self.path.parent):
            try:
                self._open().close()
            except DamagedError as error:
                if _is_open_elsewhere(self.path):
                    error.why += "; it is moved aside when no other process has it open"
                    error.fix = f"end the others: lsof {shlex.quote(str(self.path))}"
                    raise
                number = 1
                while (aside := _beside(self.path, f".damaged-{number}")).exists():
                    number += 1
                for suffix in ("-wal", "-shm", "-journal", ""):  # a log left behind would be played into the new file
                    with suppress(FileNotFoundError):
                        _beside(self.path, suffix).rename(_beside(aside, suffix))
                _beside(self.path, "-suspect").unlink(missing_ok=True)
                return aside
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._as_known(error) from error
        except OSError as error:
            why, fix = f"{error.strerror or error} ({self.path})", f"ls -ld {shlex.quote(str(self.path.parent))}"
            raise HistoryError("the history cannot be opened", why=why, fix=fix) from error

    def _as_known(self, error: sqlite3.Error) -> HistoryError:
        code, path, folder = _primary_code(error), shlex.quote(str(self.path)), shlex.quote(str(self.path.parent))
        what, why, fix = "the history cannot be used", f"{error} ({self.path})", f"ls -l {path}"
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LockedError(
                "the history is locked", why=f"another process holds {self.path}", fix=f"see which: lsof {path}"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "decode" in str(error):  # of a text: no UTF-8
            self._suspect(error)
            return DamagedError("the history is damaged", why=why, fix=Fix.command("sessions", "list"))
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            what, fix = "the history cannot be written", f"df -h {folder}"
        elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
            verb = "written" if self.writable or code == sqlite3.SQLITE_READONLY else "read"
            what, fix = f"the history cannot be {verb}", f"ls -ld {folder} {path}"
        return HistoryError(what, why=why, fix=fix)

    def _suspect(self, error: sqlite3.Error) -> None:
        """Have the next start look at every page, or where only the index is damaged, build that anew."""
        with suppress(sqlite3.Error, OSError):
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB:
                self._connection.rollback()
                schema.drop_triggers(self._connection)
            else:
                _beside(self.path, "-suspect").touch(mode=0o600)


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _make_private(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    elif path.stat().st_mode & 0o077:
        with suppress(OSError):  # somebody else's
            path.chmod(path.stat().st_mode & 0o700)


def _is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has the database open: it would go on writing into the file that was moved, and
    some versions of SQLite would in the end delete the log of the new one, by its name."""
    try:
        import fcntl
    except ImportError:
        return False
    with path.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SHARED_SIZE, _SHARED_FIRST)
        except OSError:
            return True
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; on a system without locks, all of them."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
