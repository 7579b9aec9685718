"""Settings of the hub: cache, endpoint, token, offline mode, how long to try; and the progress of a pull."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from localllm.config import below_home


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of trying again. Attempts that brought bytes do not count."""

    attempts: int = 6
    listing_attempts: int = 4
    base_s: float = 0.5  # doubled with each attempt
    longest_s: float = 8.0
    longest_retry_after_s: float = 120.0  # a hub that asks for more is told to the user, not obeyed
    connect_s: float = 10.0
    stall_s: float = 30.0  # no byte for so long: try again
    progress_bytes: int = 64 << 10  # fewer do not count as progress


@dataclass(frozen=True)
class HubSettings:
    """One hub and one cache folder."""

    cache_dir: Path
    endpoint: str
    offline: bool = False
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    @classmethod
    def from_environment(cls, *, offline: bool = False) -> HubSettings:
        """Read HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE as huggingface_hub does."""
        from huggingface_hub import constants

        cache_dir = below_home(Path(constants.HF_HUB_CACHE))
        return cls(cache_dir, constants.ENDPOINT, offline or constants.HF_HUB_OFFLINE)


def found_token() -> str | None:
    """Return the token that huggingface_hub finds; None too where its file's folder is none or not to be entered."""
    from huggingface_hub import constants, get_token

    try:
        return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except (NotADirectoryError, PermissionError):
        return None


@dataclass(frozen=True)
class PullProgress:
    """The progress of a pull. `done_bytes` of `total_bytes` are on the disk and hashed."""

    phase: Literal["listing", "waiting", "verifying", "downloading", "retrying"]
    file: str = ""
    file_done_bytes: int = 0
    file_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    note: str = ""


Progress = Callable[[PullProgress], None]
