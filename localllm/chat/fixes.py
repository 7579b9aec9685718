"""What helps against an error, as it is typed in a chat."""

from __future__ import annotations

import shlex

from localllm.errors import ContextOverflowError, Fix, LocalLLMError, SettingsError, TemplateError, UsageError


def mended_in_chat(error: LocalLLMError) -> LocalLLMError:
    """Return the error with a fix that can be typed in a chat."""
    error.fix = [_typed_in_chat(fix) for fix in error.fixes]
    match error:
        case ContextOverflowError():
            error.fix = "/undo", "/clear", *error.fixes
        case SettingsError() if not any(str(fix).startswith("/set ") for fix in error.fixes):
            error.fix = "/set shows every setting"
        case TemplateError():
            error.fix = "/undo", "/clear", "/system -"
        case UsageError() if not error.fixes:
            error.fix = "/help"
    return error


def _typed_in_chat(fix: Fix) -> Fix | str:
    if fix.kind in ("model", "word"):
        return f"/{'model' if fix.kind == 'model' else 'attach'} {shlex.quote(fix.words[1])}"
    return f"start again with {fix}" if fix.kind == "flag" else fix
