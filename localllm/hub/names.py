"""Names of models: their meaning, and those that are refused at the door.

Looks at the registry and asks whether a directory exists; opens no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from localllm import present
from localllm.errors import Fix, ModelNotFoundError
from localllm.registry import BUILT_IN, REPO_ID, REVISION, ModelEntry, Registry

NAME_LIMIT = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
TINY_DIRECTORY = Path(__file__).parent.parent / "tiny"
GGUF_IS_NOT_READ = "GGUF is not read: use the repository with the safetensors files that it was made from"
# A folder with one of these is a model's, or has its text part alone.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", *_TEMPLATE_FILES)


class UnknownModelError(ModelNotFoundError):
    """Nothing has that name. `nearest` may be what was meant; "": nothing is like it."""

    def __init__(self, name: str, nearest: str, why: str) -> None:
        fix = Fix.command("run", nearest) if nearest else Fix.command("list", "--all")
        super().__init__(f"there is no model {name[:80]!r}", why=why, fix=fix)
        self.name = name
        self.nearest = nearest


@dataclass(frozen=True)
class ModelReference:
    """A name, understood. Either `directory` is set (the built-in model, a folder of the user's) or `repo` is."""

    name: str
    directory: Path | None = None
    repo: str | None = None
    revision: str = "main"
    entry: ModelEntry | None = None
    folder_without_config: Path | None = None  # a folder of that name, passed over


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder. `repo` and `revision` (a commit) are None for the built-in model and for a user's folder."""

    directory: Path
    name: str
    repo: str | None = None
    revision: str | None = None
    entry: ModelEntry | None = None


def understand(name: str, registry: Registry) -> ModelReference:
    """The built-in model, a directory, a registry entry or `org/repo[@revision]`, in this order.

    Raises ModelNotFoundError for anything else; nothing is opened for it.
    """
    is_path = name in (".", "..", "~") or name.startswith(("/", "./", "../", "~"))
    reason = ""
    if not name or len(name) > NAME_LIMIT:
        reason = f"it has {len(name)} characters; a name has 1 to {NAME_LIMIT}"
    elif _CONTROL.search(name) or any("\ud800" <= character <= "\udfff" for character in name):
        reason = "it holds a control character"
    elif not is_path and ("\\" in name or "%" in name or ".." in re.split(r"[/@]", name)):
        reason = "a name holds no backslash, no percent sign and no '..' between slashes"
    if reason:
        raise ModelNotFoundError(f"{name[:80]!r} is not a model name", why=reason, fix=Fix.command("list"))
    if name.casefold().endswith(".gguf") and present.is_file(Path(name)):
        raise ModelNotFoundError(
            f"{name[:200]!r} is a GGUF file", why=GGUF_IS_NOT_READ, fix=Fix.command("list", "--all")
        )
    if name.casefold() == BUILT_IN:
        return ModelReference(BUILT_IN, directory=TINY_DIRECTORY, entry=registry.find(BUILT_IN))
    if is_path:
        return _directory(name)
    folder = Path(name)
    if any(present.is_file(folder / mark) for mark in MODEL_FILES):
        return ModelReference(name, directory=folder)
    passed_over = folder if present.is_folder(folder) else None
    entry = registry.find(name)
    if entry is not None:
        return ModelReference(entry.name, None, entry.repo, entry.revision, entry, passed_over)
    repo, at, revision = name.partition("@")
    if REPO_ID.fullmatch(repo) and (not at or REVISION.fullmatch(revision)):
        return ModelReference(name, None, repo, revision or "main", registry.by_repo(repo), passed_over)
    nearest = registry.nearest(name)
    if passed_over is not None:
        why = f"the folder {name!r} is there, but {without_config(passed_over)}"
    elif nearest:
        why = f"did you mean {' or '.join(nearest)}?"
    else:
        why = "it is neither in models.toml, nor a folder with config.json, nor of the form org/repo"
    raise UnknownModelError(name, nearest[0] if nearest else "", why)


def pull_command(name: str) -> Fix:
    return Fix.command("pull", name)


def _directory(name: str) -> ModelReference:
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~nobody
        path = Path(name)
    if present.is_folder(path):
        return ModelReference(name, directory=path)
    is_there = present.is_there(path)
    why = "it is a file; a model is a folder with config.json" if is_there else "there is no such folder"
    raise ModelNotFoundError(f"no model in {name[:200]!r}", why=why, fix=Fix.command("list", "--all"))


def without_config(folder: Path) -> str:
    """Why a folder without config.json is not a model."""
    has_gguf = any(present.is_file(path) for path in folder.glob("*.gguf"))
    return "it has no config.json" + (f"; {GGUF_IS_NOT_READ}" if has_gguf else "")
