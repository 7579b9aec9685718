"""Requests to the hub: redirects, retries and refusals.

The token goes to the hub's own host and nowhere else. Knows no files and no cache.
"""

from __future__ import annotations

import email.utils
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from localllm.errors import AccessError, DownloadError, Fix, LocalLLMError, ModelNotFoundError
from localllm.hub.names import pull_command
from localllm.hub.settings import HubSettings, RetryPolicy, found_token
from localllm.version import __version__

if TYPE_CHECKING:
    import httpx2

_Json = TypeVar("_Json", dict[str, object], list[object])

REDIRECT_LIMIT = 8
LISTING_LIMIT_BYTES = 32 << 20
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})
_NOT_THE_HUB = "not the hub's: a proxy or a network's login page may stand between"


class TransferInterruptedError(Exception):
    """An attempt failed in a way that another one may mend. `wait_s`: as the server asked."""

    def __init__(self, reason: str, *, wait_s: float | None = None, refused_range: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s
        self.refused_range = refused_range


class Attempts:
    """Counts attempts without progress, and waits between them."""

    def __init__(self, policy: RetryPolicy, limit: int, report: Callable[[str], None]) -> None:
        self._policy = policy
        self._limit = limit
        self._report = report
        self._idle = 0

    def failed(self, interruption: TransferInterruptedError, *, progressed: bool = False) -> str | None:
        """Wait before the next attempt; return why there is none."""
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
    """Opens addresses of one hub on behalf of one model, or of a search.

    again: the command that tries again what failed; a pull of `name` where none is given.
    """

    def __init__(self, hub: HubSettings, repo: str, name: str, again: Fix | None = None) -> None:
        self.hub = hub
        self.repo = repo
        self.name = name
        self.page = f"{hub.endpoint}/{repo}"
        self.resume_command = again or pull_command(name)
        self._token = found_token()

    def file_url(self, commit: str, file_name: str) -> str:
        return f"{self.page}/resolve/{commit}/{quote(file_name)}"

    def listing(self, revision: str, report: Callable[[str], None]) -> dict[str, object]:
        """Return the hub's description of the repository, with the size and the checksum of each file."""
        # Not HfApi.model_info: it sends a request of its own first, to report which program runs it.
        url = f"{self.hub.endpoint}/api/models/{self.repo}/revision/{quote(revision, safe='')}?blobs=true"
        return self._json(url, dict, f"the list of files of {self.repo}", report)

    def json_list(self, url: str, report: Callable[[str], None]) -> list[object]:
        """Return the JSON array at an address of the hub."""
        return self._json(url, list, "the answer", report)

    def _json(self, url: str, kind: type[_Json], what: str, report: Callable[[str], None]) -> _Json:
        attempts = Attempts(self.hub.retry, self.hub.retry.listing_attempts, report)
        while True:
            try:
                with self.open(url, {"Accept": "application/json"}) as response:
                    data = bytearray()
                    for chunk in response.iter_bytes():
                        data += chunk
                        if len(data) > LISTING_LIMIT_BYTES:
                            raise TransferInterruptedError(f"the answer has more than {LISTING_LIMIT_BYTES} bytes")
                with suppress(ValueError, RecursionError):
                    if isinstance(value := json.loads(data), kind):
                        return value
                form = "object" if kind is dict else "array"
                raise TransferInterruptedError(f"the answer was no JSON {form}, {_NOT_THE_HUB}")
            except TransferInterruptedError as interruption:
                if given_up := attempts.failed(interruption):
                    what = f"{what} could not be fetched from {self.hub.endpoint}"
                    raise DownloadError(what, why=given_up, fix=self.resume_command) from None

    def file_headers(self, commit: str, file_name: str) -> Mapping[str, str]:
        """Return the hub's own headers for a file: not those of the storage that it redirects to."""
        with self.open(self.file_url(commit, file_name), {}, method="HEAD") as response:
            headers: Mapping[str, str] = response.headers
            return headers

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str], *, method: str = "GET") -> Iterator[httpx2.Response]:
        """Yield a response of status 200, 206 or 416, its body not received yet: for GET at the end of the redirects,
        for HEAD the first one, which may be a redirect.

        Raises TransferInterruptedError for what another attempt may mend; AccessError, ModelNotFoundError or
        DownloadError for what it cannot.
        """
        import httpx2
        from huggingface_hub.utils import get_session

        policy = self.hub.retry
        sent = {"User-Agent": f"localllm/{__version__}", "Accept-Encoding": "identity", **headers}
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        try:
            timeout = httpx2.Timeout(policy.stall_s, connect=policy.connect_s)
            client = get_session()  # carries the user's proxies and certificates
            request = client.build_request(method, url, headers=sent, timeout=timeout)
            for _ in range(REDIRECT_LIMIT):
                with closing(client.send(request, stream=True, follow_redirects=False)) as response:
                    if method == "HEAD" or not response.has_redirect_location:
                        self._check(response)
                        yield response
                        return
                    request = self._redirected(response)
        except httpx2.TimeoutException as error:
            raise TransferInterruptedError(f"no byte came in time ({type(error).__name__})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise TransferInterruptedError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from None
        raise TransferInterruptedError(f"more than {REDIRECT_LIMIT} redirects")

    def _redirected(self, response: httpx2.Response) -> httpx2.Request:
        """Return the next request, from which httpx2 has dropped the token where it leaves the hub's origin."""
        request: httpx2.Request | None = response.next_request
        scheme = request.url.scheme if request else "nowhere"
        if request and (scheme == "https" or scheme == response.url.scheme == "http"):
            return request
        raise DownloadError(
            "the hub's redirect was not followed",
            why=f"it leads from {response.url.scheme} to {scheme[:20]}, which is not encrypted",
            fix=f"look at your proxy and at HF_ENDPOINT, then: {self.resume_command}",
        )

    def _check(self, response: httpx2.Response) -> None:
        import httpx2

        status, headers = response.status_code, response.headers
        if status in (200, 206) and headers.get("content-type", "").lower().startswith("text/html"):
            raise TransferInterruptedError(f"the answer was a web page, {_NOT_THE_HUB}")
        if status in (200, 206, 416) or response.has_redirect_location:
            return
        if status in _RETRIED:
            raise TransferInterruptedError(f"the server answered {status}", wait_s=_retry_after(headers))
        if response.url.origin != httpx2.URL(self.hub.endpoint).origin:
            # An address signed for a while: the next attempt asks the hub for a new one.
            raise TransferInterruptedError(f"the storage host {response.url.host} answered {status}")
        raise self._refusal(status, headers)

    def _refusal(self, status: int, headers: Mapping[str, str]) -> LocalLLMError:
        code = headers.get("x-error-code", "")
        token = "a token was sent" if self._token else "HF_TOKEN is not set and no token is stored"
        if not self.repo:
            why = f"{self.hub.endpoint} answered {status}; {token}"
            return DownloadError("the hub refused the search", why=why, fix=self.resume_command)
        if status == 404 or code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound"):
            what = {"RevisionNotFound": "has no such revision", "EntryNotFound": "lacks a file that it lists"}
            return ModelNotFoundError(
                f"{self.repo} {what.get(code, 'is not on the hub')}",
                why=f"{self.hub.endpoint} answered {status}; it also hides private repositories ({token})",
                fix=f"check the name on {self.page}, or set HF_TOKEN=hf_...",
            )
        if status in (401, 403):
            return AccessError(
                f"the hub refuses {self.repo}",
                why=f"it answered {status}: the repository is gated or private; {token}",
                fix=f"accept the licence on {self.page}, then: HF_TOKEN=hf_... {self.resume_command}",
            )
        return DownloadError(
            f"{self.repo} could not be fetched",
            why=f"{self.hub.endpoint} answered {status} {headers.get('x-error-message', '')[:200]}".strip(),
            fix=self.resume_command,
        )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
