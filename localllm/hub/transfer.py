"""One file from the hub into the cache: ranged, resumed, verified.

Every byte is judged by the checksum that the listing promised for the whole file; what a server says about ranges and
lengths only decides how much of an answer is worth reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import DownloadError
from localllm.hub.http import Attempts, HubClient, TransferInterruptedError
from localllm.hub.partial_file import PartialFile, RemoteFile

if TYPE_CHECKING:
    import httpx2

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class FileTransfer:
    """Fetches one file of a commit, with progress to `report(phase, bytes of this file, note)`."""

    def __init__(
        self, client: HubClient, remote: RemoteFile, commit: str, report: Callable[[str, int, str], None]
    ) -> None:
        self._client = client
        self._remote = remote
        self._url = client.file_url(commit, remote.name)
        self._report = report

    def run(self, partial_path: Path, destination: Path) -> None:
        """Leave the verified file at `destination`; what it had when it broke off stays at `partial_path`.

        Raises DownloadError or AccessError, and DoesNotFitError when the disk is full.
        """
        # A second time from nothing: the bytes that an earlier run left may be the wrong ones.
        for _ in range(2):
            with PartialFile(partial_path, self._remote, lambda count: self._report("verifying", count, "")) as partial:
                self._fill(partial)
                if partial.matches:
                    partial.publish(destination)
                    return
                partial.discard(destination)
        raise DownloadError(
            f"{self._remote.name} is not what the hub promised",
            why=f"its {self._remote.size_bytes} bytes have another checksum than {self._remote.digest}, twice",
            fix=self._client.resume_command,
        )

    def _fill(self, partial: PartialFile) -> None:
        policy = self._client.hub.retry
        attempts = Attempts(policy, policy.attempts, lambda note: self._report("retrying", partial.position, note))
        with_range = True
        while partial.missing_bytes:
            before = partial.position
            try:
                self._receive(partial, with_range=with_range)
                interruption = TransferInterruptedError("the connection ended early")
            except TransferInterruptedError as error:
                interruption = error
            with_range = with_range and not interruption.refused_range
            if not partial.missing_bytes:
                return
            progressed = partial.position - before >= policy.progress_bytes
            if given_up := attempts.failed(interruption, progressed=progressed):
                raise DownloadError(
                    f"{self._remote.name} could not be fetched",
                    why=f"{given_up}; {partial.position} of {self._remote.size_bytes} bytes are kept",
                    fix=self._client.resume_command,
                )

    def _receive(self, partial: PartialFile, *, with_range: bool) -> None:
        start = partial.position if with_range else 0
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._client.open(self._url, headers) as response:
            first = self._first_byte(response, start)
            unread = partial.position - first  # bytes that we hold already
            # No chunk size: bytes gathered to fill one would be lost with the connection.
            for chunk in response.iter_bytes():
                fresh = chunk[unread:]
                unread -= len(chunk) - len(fresh)
                if fresh:
                    partial.append(fresh)
                    self._report("downloading", partial.position, "")
                if not partial.missing_bytes:
                    return

    def _first_byte(self, response: httpx2.Response, start: int) -> int:
        """Return which byte of the file the body starts with. Raises TransferInterruptedError for what cannot be it."""
        size = self._remote.size_bytes
        # Some servers compress although asked not to; a range of that is of no use.
        is_plain = response.headers.get("content-encoding", "identity").lower() == "identity"
        if response.status_code == 416:
            raise TransferInterruptedError("the server refuses to go on from where we were", refused_range=True)
        if response.status_code == 206:
            found = is_plain and _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
            if not found or int(found[1]) != start or found[3] not in ("*", str(size)):
                raise TransferInterruptedError("the server sent another range than asked for", refused_range=True)
            return start
        length = response.headers.get("content-length", "")
        if is_plain and length.isdigit() and int(length) != size:
            raise TransferInterruptedError(f"the server announces {int(length)} bytes, the hub promised {size}")
        return 0
