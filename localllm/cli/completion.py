"""Completion of what is typed in bash, zsh and fish: the script of each, and where it is installed.

A script gives the program the line so far, and gets the words that complete it, one a line. Names of models have
colons, at which bash ends a word. Its script joins the pieces, and gives bash what follows the last colon.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from localllm.chat.text_file import replace_file
from localllm.cli.output import Output
from localllm.errors import Fix, UsageError

_BASH = r"""
_localllm() {
    local rest=${COMP_LINE:0:COMP_POINT} words=() word current prefix=
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ ${#words[@]} == 0 || $rest == [[:space:]]* ]]; then
            rest=${rest#"${rest%%[![:space:]]*}"}
            words+=("")
        fi
        [[ $rest == "$word"* ]] || word=$rest
        words[${#words[@]}-1]+=$word
        rest=${rest#"$word"}
    done
    current=${words[${#words[@]}-1]}
    [[ $current == -*=* ]] && current=${current#*=}
    [[ $COMP_WORDBREAKS == *:* && $current == *:* ]] && prefix=${current%:*}:
    COMPREPLY=()
    while IFS= read -r word; do
        [[ -n $word ]] && COMPREPLY+=("${word:${#prefix}}")
    done < <(COMP_WORDS=$(printf '%s\n' "${words[@]}") COMP_CWORD=$((${#words[@]} - 1)) \
        _LOCALLLM_COMPLETE=complete_bash "$1" 2>/dev/null)
}
complete -o default -F _localllm localllm
"""
_ZSH = r"""
#compdef localllm
_localllm() {
    local -a found
    found=("${(@f)$(COMP_WORDS="${(pj:\n:)words[1,CURRENT]}" COMP_CWORD=$((CURRENT - 1)) \
        _LOCALLLM_COMPLETE=complete_bash ${words[1]} 2>/dev/null)}")
    [[ $PREFIX == -*=* ]] && compset -P '*='
    if [[ -n "$found" ]]; then
        compadd -- "${found[@]}"
    else
        _files
    fi
}
if [[ ${funcstack[1]} == _localllm ]]; then
    _localllm "$@"
else
    compdef _localllm localllm
fi
"""
_FISH = r"""
function __localllm
    set -l words (string escape -- (commandline --tokenize --cut-at-cursor --current-process))
    set -l current (commandline --cut-at-cursor --current-token)
    set -l found (env COMP_WORDS=(string join \n -- $words $current | string collect) COMP_CWORD=(count $words) \
        _LOCALLLM_COMPLETE=complete_bash localllm 2>/dev/null)
    set -l prefix (string match --regex -- '^-[^=]*=' $current)
    if test -n "$found"
        printf "$prefix%s\n" $found
    else
        __fish_complete_path $current
    end
end
complete --command localllm --no-files --arguments '(__localllm)'
"""
SCRIPTS: Mapping[str, str] = MappingProxyType({"bash": _BASH, "zsh": _ZSH, "fish": _FISH})


def show(output: Output) -> None:
    """Print the script of the shell that this process was started from. Raises UsageError where it is none of ours."""
    output.verbatim(SCRIPTS[_shell()].lstrip())


def install(output: Output) -> None:
    """Write the script of the shell that this process was started from to where it is read.

    Raises UsageError for another shell, and where a file cannot be written.
    """
    shell, home = _shell(), Path.home()
    if shell == "bash":
        script = home / ".bash_completions" / "localllm.sh"
        _add_line(home / ".bashrc", f"source '{script}'")
    elif shell == "zsh":
        script = home / ".zfunc" / "_localllm"
        _add_line(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    else:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        script = config / "fish" / "completions" / "localllm.fish"
    with suppress(OSError):  # the write tells
        script.parent.mkdir(parents=True, exist_ok=True)
    replace_file(script, SCRIPTS[shell].lstrip())
    output.line(f"completion for {shell} is in {script}; a new shell has it")


def _shell() -> str:
    import shellingham

    try:
        shell: str = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        shell = Path(os.environ.get("SHELL", "")).name
    if shell not in SCRIPTS:
        why = f"it knows {', '.join(SCRIPTS)}, and this is {shell or 'no shell'}"
        raise UsageError("there is no completion for this shell", why=why, fix=Fix.advice("type it in one of them"))
    return shell


def _add_line(file: Path, line: str) -> None:
    """Put a line at the end of a shell's start-up file, unless it has it. Raises UsageError."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if line not in text.splitlines():
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n" if not text or text.endswith("\n") else f"\n{line}\n")
    except OSError as error:
        fix = f"add this line to {file} yourself: {line}"
        raise UsageError(f"{file} cannot be changed", why=error.strerror or str(error), fix=fix) from error
