"""Requests to the hub: redirects, retries and refusals.

The token goes to the hub's own origin and nowhere else. Knows no files and no cache.
"""

from __future__ import annotations

import email.utils
import json
import random
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urljoin, urlsplit

from localllm.errors import AccessError, DownloadError, LocalLLMError, ModelNotFoundError
from localllm.hub.names import pull_command
from localllm.hub.settings import HubSettings, RetryPolicy, found_token
from localllm.version import __version__

if TYPE_CHECKING:
    import httpx2

REDIRECT_LIMIT = 8
LISTING_LIMIT_BYTES = 32 << 20
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})


class TransferInterruptedError(Exception):
    """An attempt failed in a way that another one may mend."""

    def __init__(self, reason: str, *, wait_s: float | None = None, refused_range: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s  # as the server asked
        self.refused_range = refused_range


class Attempts:
    """Counts attempts without progress, and waits between them."""

    def __init__(self, policy: RetryPolicy, limit: int, report: Callable[[str], None]) -> None:
        self._policy = policy
        self._limit = limit
        self._report = report
        self._idle = 0

    def failed(self, interruption: TransferInterruptedError, *, progressed: bool) -> str | None:
        """Waits before the next attempt; returns why there is none."""
        self._idle = 0 if progressed else self._idle + 1
        if self._idle >= self._limit:
            return f"{interruption.reason}, {self._limit} times in a row"
        wait_s = interruption.wait_s
        if wait_s is not None and wait_s > self._policy.longest_retry_after_s:
            return f"{interruption.reason}; it asks to wait {wait_s:.0f} s"
        if wait_s is None:
            # Jitter, so that many clients of a hub that fell over do not come back at once.
            longest = min(self._policy.longest_s, self._policy.base_s * 2 ** max(self._idle - 1, 0))
            wait_s = 0.0 if progressed else longest * random.uniform(0.5, 1.0)
        if wait_s or not progressed:
            self._report(f"{interruption.reason}; trying again in {wait_s:.1f} s")
        time.sleep(wait_s)
        return None


class HubClient:
    """Opens addresses of one hub on behalf of one model."""

    def __init__(self, hub: HubSettings, repo: str, name: str) -> None:
        self.hub = hub
        self.repo = repo
        self.resume_command = pull_command(name)
        self._origin = _origin(hub.endpoint)
        self._token = hub.token or found_token()

    def file_url(self, commit: str, file_name: str) -> str:
        return f"{self.hub.endpoint}/{self.repo}/resolve/{commit}/{quote(file_name)}"

    def listing(self, revision: str, report: Callable[[str], None]) -> dict[str, object]:
        """The hub's description of the repository at `revision`, with the size and the checksum of each file."""
        # Not HfApi.model_info: it asks the hub for a list of coding agents first, to report which one is running.
        url = f"{self.hub.endpoint}/api/models/{self.repo}/revision/{quote(revision, safe='')}?blobs=true"
        attempts = Attempts(self.hub.retry, self.hub.retry.listing_attempts, report)
        while True:
            try:
                return self._json(url)
            except TransferInterruptedError as interruption:
                given_up = attempts.failed(interruption, progressed=False)
                if given_up:
                    raise DownloadError(
                        f"the list of files of {self.repo} could not be fetched from {self.hub.endpoint}",
                        why=given_up,
                        fix=self.resume_command,
                    ) from None

    def _json(self, url: str) -> dict[str, object]:
        with self.open(url, {"Accept": "application/json"}) as response:
            if response.status_code != 200:
                raise TransferInterruptedError(f"the hub answered {response.status_code}")
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > LISTING_LIMIT_BYTES:
                    raise TransferInterruptedError(f"the answer has more than {LISTING_LIMIT_BYTES} bytes")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise TransferInterruptedError(_not_from_the_hub(response.headers.get("content-type", ""))) from None
        if not isinstance(value, dict):
            raise TransferInterruptedError("the hub's answer is not a JSON object")
        return value

    def file_headers(self, commit: str, file_name: str) -> Mapping[str, str]:
        """The hub's own headers for a file: not those of the storage that it redirects to."""
        import httpx2
        from huggingface_hub.utils import get_session

        url = self.file_url(commit, file_name)
        timeout = httpx2.Timeout(self.hub.retry.stall_s, connect=self.hub.retry.connect_s)
        try:
            response = get_session().head(url, headers=self._headers(url, {}), timeout=timeout, follow_redirects=False)
        except httpx2.HTTPError as error:
            raise TransferInterruptedError(_one_line(error)) from None
        if response.status_code >= 400:
            self._check_status(response, url)
        headers: Mapping[str, str] = response.headers
        return headers

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """The response at the end of the redirects: status 200, 206 or 416, its body not read yet.

        Raises TransferInterruptedError for what another attempt may mend; AccessError, ModelNotFoundError or
        DownloadError for what it cannot.
        """
        import httpx2

        try:
            response = self._follow(url, headers)
            try:
                yield response
            finally:
                response.close()
        except httpx2.TimeoutException as error:
            raise TransferInterruptedError(f"no byte came in time ({type(error).__name__})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise TransferInterruptedError(_one_line(error)) from None

    def _follow(self, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        import httpx2
        from huggingface_hub.utils import get_session

        policy = self.hub.retry
        timeout = httpx2.Timeout(policy.stall_s, connect=policy.connect_s)
        client = get_session()  # carries the user's proxies and certificates
        for _ in range(REDIRECT_LIMIT):
            request = client.build_request("GET", url, headers=self._headers(url, headers), timeout=timeout)
            response: httpx2.Response = client.send(request, stream=True, follow_redirects=False)
            location = response.headers.get("location")
            if response.status_code not in (301, 302, 303, 307, 308) or location is None:
                self._check_status(response, url)
                return response
            response.close()
            url = self._redirected(url, location)
        raise TransferInterruptedError(f"more than {REDIRECT_LIMIT} redirects")

    def _headers(self, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        sent = {"User-Agent": f"localllm/{__version__}", "Accept-Encoding": "identity", **headers}
        if self._token and _origin(url) == self._origin:
            sent["Authorization"] = f"Bearer {self._token}"
        return sent

    def _redirected(self, url: str, location: str) -> str:
        target = urljoin(url, location)
        scheme = urlsplit(target).scheme
        if scheme == "https" or (scheme == "http" and urlsplit(url).scheme == "http"):
            return target
        raise DownloadError(
            "the hub's redirect was not followed",
            why=f"it leads from {urlsplit(url).scheme} to {scheme[:20] or 'nowhere'}, which is not encrypted",
            fix=f"look at your proxy and at HF_ENDPOINT, then: {self.resume_command}",
        )

    def _check_status(self, response: httpx2.Response, url: str) -> None:
        status = response.status_code
        if status in (200, 206, 416):
            return
        try:
            if status in _RETRIED:
                raise TransferInterruptedError(f"the server answered {status}", wait_s=_retry_after(response.headers))
            if _origin(url) != self._origin:
                # An address signed for a while: the next attempt asks the hub for a new one.
                raise TransferInterruptedError(f"the storage host {urlsplit(url).hostname} answered {status}")
            raise self._refusal(status, response.headers)
        finally:
            response.close()

    def _refusal(self, status: int, headers: Mapping[str, str]) -> LocalLLMError:
        code = headers.get("x-error-code", "")
        token = "a token was sent" if self._token else "HF_TOKEN is not set and no token is stored"
        page = f"{self.hub.endpoint}/{self.repo}"
        if status == 404 or code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound"):
            what = {"RevisionNotFound": "has no such revision", "EntryNotFound": "lacks a file that it lists"}
            return ModelNotFoundError(
                f"{self.repo} {what.get(code, 'is not on the hub')}",
                why=f"{self.hub.endpoint} answered {status}; it also hides private repositories ({token})",
                fix=f"check the name on {page}, or set HF_TOKEN=hf_...",
            )
        if status in (401, 403):
            return AccessError(
                f"the hub refuses {self.repo}",
                why=f"it answered {status}: the repository is gated or private; {token}",
                fix=f"accept the licence on {page}, then: HF_TOKEN=hf_... {self.resume_command}",
            )
        return DownloadError(
            f"{self.repo} could not be fetched",
            why=f"{self.hub.endpoint} answered {status} {headers.get('x-error-message', '')[:200]}".strip(),
            fix=self.resume_command,
        )


def refuse_page(response: httpx2.Response) -> None:
    """A login page of a hotel's network in place of a file."""
    kind = response.headers.get("content-type", "").lower()
    if kind.startswith("text/html"):
        raise TransferInterruptedError(_not_from_the_hub(kind))


def _not_from_the_hub(kind: str) -> str:
    page = "a web page" if "html" in kind.lower() else f"{shlex.quote(kind[:40])} that is not JSON"
    return f"the answer was {page}, not the hub's: a proxy or a network's login page may stand between"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    return parts.scheme.lower(), (parts.hostname or "").lower(), port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
