"""Checks of the installation: Python, the packages, the settings, the network, the terminal."""

from __future__ import annotations

import os

from localllm.cli.check_result import Finding, fail, ok, warn
from localllm.cli.output import Output
from localllm.config import load_settings, user_directories
from localllm.errors import LocalLLMError
from localllm.present import is_file
from localllm.runtime.error_origins import with_origins


def check_python() -> Finding:
    import platform

    return ok(f"{platform.python_version()} ({platform.system()} {platform.machine()})")


def check_package(name: str, purpose: str) -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return ok(f"{version(name)} ({purpose})")
    except PackageNotFoundError:
        return warn(f"not installed ({purpose})", f"pip install {name}")


def check_settings() -> Finding:
    from localllm.engine.placement import require_cap
    from localllm.registry import load_registry

    file = user_directories().config / "config.toml"
    try:
        resolved = load_settings()
        load_registry()
    except LocalLLMError as error:
        return fail(f"{error.what}: {error.why}", error.fix)
    try:
        require_cap(resolved.settings.ram)
    except LocalLLMError as error:
        with_origins(error, resolved)
        return fail(f"{error.what}: {error.why}", error.fix)
    return ok(f"{file}{'' if is_file(file) else ' (none: defaults)'}")


def check_token() -> Finding:
    """Tell whether there is a token, and never print it."""
    from localllm.hub.settings import found_token

    return ok("set" if found_token() else "none: open models only")


def check_network() -> Finding:
    switches = [name for name in ("LOCALLLM_OFFLINE", "HF_HUB_OFFLINE") if os.environ.get(name)]
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "HF_ENDPOINT") if os.environ.get(name)]
    if switches:
        return warn(f"{', '.join(switches)} is set: nothing can be pulled", f"unset {' '.join(switches)}")
    return ok(f"used by `pull` only{', through ' + ', '.join(proxies) if proxies else ''}")


def check_terminal(output: Output) -> Finding:
    streams = [("stdout", output.stdout_is_terminal), ("stderr", output.stderr_is_terminal)]
    on_terminal = [name for name, is_one in streams if is_one]
    where = f"{' and '.join(on_terminal)} on a terminal" if on_terminal else "no terminal"
    colours = "colours" if output.coloured else "no colours"
    return ok(f"{where}, TERM={os.environ.get('TERM', 'unset')}, {colours}")
