"""The cards by themselves: whether there are any, who else holds their memory, how they are connected."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from localllm.cli.checks_machine import process_limits
from localllm.cli.findings import Finding, fail, ok, warn
from localllm.config import format_bytes
from localllm.engine.device import no_gpu
from localllm.engine.events import ignore
from localllm.offload.planner.nvml import Gpu, gpus, refusal, sm_name
from localllm.repairs import TRITON, install_driver, is_container, is_wsl

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
_OTHERS_SHARE = 0.25  # a desktop takes less of any card of 4 GiB and more
_COPY_BYTES = 64 << 20
_COPY_SECONDS = 0.2
_SEE_LINK = "sudo lspci -vv -d 10de: | grep -E 'LnkCap:|LnkSta:'"


def check_gpu(cards: tuple[Gpu, ...], torch_devices: int, root: Path = Path("/"), rocm: str = "") -> Finding:
    """Check that there are cards, and a driver that answers for them. root: of the file system. rocm: its version, of
    a torch for AMD's."""
    if cards:
        sizes = ["" if card.total_bytes is None else f"{format_bytes(card.total_bytes)}, " for card in cards]
        return ok(
            "; ".join(
                f"{card.name or 'a card'} ({size}{sm_name(card.compute_capability)})"
                for card, size in zip(cards, sizes, strict=True)
            )
        )
    if rocm and torch_devices:
        return ok(f"{torch_devices} of AMD's, ROCm {rocm}")
    if find_spec("pynvml") is None and (torch_devices or _driver_version(root)):
        return warn(
            "nvidia-ml-py is not installed: nothing is known of the card", "pip install 'nvidia-ml-py>=12.560,<14'"
        )
    if torch_devices:
        return ok(f"{torch_devices} of which torch knows; NVML refuses: {refusal()}")
    driver = _driver_version(root)
    if not driver and not _has_card(root):
        return ok("none; models run on the CPU")
    if is_container(root) and not (root / "dev/nvidiactl").exists():
        return warn("this container was not given the NVIDIA card of its machine", "docker run --gpus all IMAGE")
    if driver:
        return warn(f"the driver is loaded, but NVML refuses: {refusal()} ({driver})", "sudo reboot")
    return warn("there is an NVIDIA card without its driver; models run on the CPU", install_driver(root))


def check_vram(card: Gpu) -> Finding:
    if card.total_bytes is None or card.free_bytes is None or card.used_by_others_bytes is None:
        return ok("this card does not tell; it may share the machine's memory")
    others = f"{format_bytes(card.used_by_others_bytes)} held by other programs"
    if card.drives_display:
        others += " and the display"
    detail = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}, {others}"
    if card.used_by_others_bytes > _OTHERS_SHARE * card.total_bytes:
        fix = f"nvidia-smi -i {card.index}"
        return warn(f"{detail}: end what you can spare", fix)
    return ok(detail)


@dataclass(frozen=True)
class LinkTrial:
    """The result of a copy to a card. after: the card then, its link awake; error: why nothing could be pinned."""

    gbs: float | None = None
    after: Gpu | None = None
    error: str = ""


def try_link(card: Gpu) -> LinkTrial:
    """Pins a little memory and copies it to the card for a fifth of a second. Never raises."""
    try:
        import torch

        pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    except Exception as error:
        return LinkTrial(error=str(error).partition("\n")[0])
    try:
        devices = range(torch.cuda.device_count())
        same = [index for index in devices if str(torch.cuda.get_device_properties(index).uuid) in (card.uuid or "")]
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", same[0]))
        target.copy_(pinned)
        started, copies = time.perf_counter(), 0
        while time.perf_counter() - started < _COPY_SECONDS:
            target.copy_(pinned)
            torch.cuda.synchronize(target.device)
            copies += 1
        rate = copies * _COPY_BYTES / (time.perf_counter() - started) / 1e9
    except Exception:  # a card that is hidden from torch, or full
        return LinkTrial()
    return LinkTrial(rate, next((now for now in gpus() if now.uuid == card.uuid), None))


def check_link(card: Gpu, trial: LinkTrial) -> Finding:
    now = trial.after or card
    if None in (now.pcie_generation, now.pcie_generation_max, now.pcie_width, now.pcie_width_max):
        return ok("this card does not tell its generation and width")
    detail = f"PCIe {now.pcie_generation} x{now.pcie_width}, at most {now.pcie_generation_max} x{now.pcie_width_max}"
    if trial.gbs is not None:
        detail += f", {trial.gbs:.1f} GB/s from pinned memory"
    if now.pcie_width != now.pcie_width_max:
        return warn(f"{detail}: seat the card again, or in another slot", _SEE_LINK)
    if now.pcie_generation == now.pcie_generation_max:
        return ok(detail)
    if trial.gbs is None:
        return ok(f"{detail}; a card without work lets its link sleep")
    return warn(f"{detail}: slower than it can be, while it was copying", _SEE_LINK)


def check_pinned(trial: LinkTrial, limit_bytes: int | None = None, root: Path = Path("/")) -> Finding:
    """Check that memory can be pinned. limit_bytes: of mlock; None stands for this process's own.

    CUDA's driver pins pages in the kernel and does not count them against RLIMIT_MEMLOCK. Windows does limit WSL.
    """
    wsl = is_wsl(root)
    if trial.error:
        fix = "wsl.exe --shutdown" if wsl else "ps -eo rss,pid,comm --sort=-rss | head"
        return warn(f"{format_bytes(_COPY_BYTES)} could not be pinned: {trial.error}", fix)
    limit = process_limits("RLIMIT_MEMLOCK")[0] if limit_bytes is None else limit_bytes
    detail = (
        "no limit of mlock" if limit is None else f"mlock may take {format_bytes(limit)}, which CUDA does not count"
    )
    return ok(f"{detail}; under WSL Windows limits it" if wsl else detail)


def check_kernels(tell: Callable[[str], None] = ignore) -> Finding:
    """Check that every kernel computes on the card what torch does, in all ways. tell: hears how far that is."""
    import torch

    from localllm.kernels.gpu import ready

    if (refusal := no_gpu()) is not None:
        return fail(f"not used, the CPU computes: {refusal.why}", str(refusal.fixes[0]))
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := ready.missing(device):
        return ok(f"not used: {reason}; torch's operators compute")
    if reason := ready.fault(device):
        return warn(f"not used, torch's operators compute: {reason}", f"rm {shlex.quote(str(ready.kept_file()))}")
    started = time.perf_counter()
    if reason := ready.check(device, ready.ALL, tell):
        fix = TRITON if reason.startswith(ready.UNCOMPARED) else "rm -rf ~/.triton/cache && localllm doctor"
        return warn(f"not used, torch's operators compute: {reason}", fix)
    return ok(f"right on this card, in {time.perf_counter() - started:.0f} s")


def _driver_version(root: Path) -> str:
    """Return the version of the loaded kernel module, "" for none."""
    with suppress(OSError, UnicodeDecodeError, IndexError):
        return (root / "proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return ""


def _has_card(root: Path) -> bool:
    """Return whether the bus has a card, with a driver or without."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError, UnicodeDecodeError):
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            if vendor == _NVIDIA and (device / "class").read_text(encoding="ascii").startswith(_DISPLAY_CLASS):
                return True
    return False
