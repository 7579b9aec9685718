"""Names of models: their meaning, and those that are refused at the door.

Looks at the registry and asks whether a directory exists; opens no file.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from localllm import present
from localllm.errors import Fix, ModelNotFoundError
from localllm.hub.repo_cache import ADAPTER_CONFIG, REPO_FILE
from localllm.registry import BUILT_IN, REPO_ID, REVISION, ModelEntry, Registry

NAME_LIMIT = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
TINY_DIRECTORY = Path(__file__).parent.parent / "tiny"
# A folder with one of these is a model's, or has its text part alone.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", *_TEMPLATE_FILES)
_HUB = re.compile(r"(?:https?://(?:www\.)?)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_PAGE = re.compile(r"([^/]+/[^/]+)/(blob|resolve|raw|tree)/([^/]+)(?:/(.+))?")
_QUANT = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
_MAIN = "main"
OLLAMA, LM_STUDIO, LLAMA_CPP = STORES = ("ollama", "lmstudio", "llamacpp")


@dataclass(frozen=True)
class ModelReference:
    """A name, understood. One of these is set: `directory` (the built-in model, or a folder of the user's), `gguf` (a
    file of the user's), `repo`, `store` (another program's, which has the model as `word`).

    part: of a repository's GGUF files those of one quantization, "Q4_K_M", or one file, "x.gguf"; "": none is named.
    """

    name: str
    directory: Path | None = None
    repo: str | None = None
    revision: str = _MAIN
    entry: ModelEntry | None = None
    folder_without_config: Path | None = None  # a folder of that name, passed over
    gguf: Path | None = None
    part: str = ""
    store: str = ""
    word: str = ""

    @property
    def place(self) -> Path | None:
        """Return the file or the folder of the user's that it is; None for any other."""
        return self.gguf or (self.directory.resolve() if self.directory else None)


@dataclass(frozen=True)
class HubName:
    """A model of the hub. part: as `ModelReference` has it. revision: "" where none is named."""

    repo: str
    part: str = ""
    revision: str = ""

    @classmethod
    def read(cls, name: str) -> HubName | None:
        """Read ORG/REPO, ORG/REPO:QUANT, ORG/REPO/FILE.gguf, each with @REVISION or without, or the address of a page
        of the hub. None for any other name; touches no disk."""
        path, at, revision = short_name(name).partition("@")
        revision, behind, quant = revision.partition(":")
        if not behind:
            path, behind, quant = path.partition(":")
        org, _, rest = path.partition("/")
        repo, slash, file = rest.partition("/")
        is_repo = REPO_ID.fullmatch(f"{org}/{repo}") and (not at or REVISION.fullmatch(revision))
        is_file = not slash or (REPO_FILE.fullmatch(file) and file.casefold().endswith(".gguf"))
        is_quant = not behind or (_QUANT.fullmatch(quant) and not slash)
        return cls(f"{org}/{repo}", file or quant, revision) if is_repo and is_file and is_quant else None


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder. `repo` and `revision` (a commit) are None for the built-in model, for a user's folder or file,
    and for what another program keeps.

    gguf: the model's file, of which the folder holds what its header says.
    """

    directory: Path
    name: str
    repo: str | None = None
    revision: str | None = None
    entry: ModelEntry | None = None
    gguf: Path | None = None

    @property
    def place(self) -> Path:
        """Return where the user has it: the file, or the folder."""
        return self.gguf or self.directory.resolve()

    @property
    def copied_anew(self) -> str:
        """Return what helps where files that are not from our cache are damaged."""
        if self.name.startswith(f"{OLLAMA}:"):
            return f"ollama pull {self.name.removeprefix(f'{OLLAMA}:')}"
        return f"copy {self.gguf} anew" if self.gguf else f"copy the model's files into {self.directory} anew"


def understand(name: str, registry: Registry) -> ModelReference:
    """Return what a name means: the built-in model, a directory or GGUF file, another program's model, a registry entry
    or a model of the hub, in this order.

    Raises ModelNotFoundError for anything else; nothing is opened for it.
    """
    is_path = looks_like_path(name)
    if reason := refusal(name, is_path=is_path):
        raise ModelNotFoundError(f"{name[:80]!r} is not a model name", why=reason, fix=Fix.command("list"))
    if name.casefold().endswith(".gguf") and present.is_file(path := path_of(name)):
        file = whole_path(path)
        return ModelReference(str(file), gguf=file)
    if name.casefold() == BUILT_IN:
        return ModelReference(BUILT_IN, directory=TINY_DIRECTORY, entry=registry.find(BUILT_IN))
    if is_path:
        return _directory(name)
    folder = Path(name)
    if any(present.is_file(folder / mark) for mark in MODEL_FILES) or _has_gguf(folder):
        return ModelReference(name, directory=folder)
    store, colon, word = name.partition(":")
    if colon and store.casefold() in STORES:
        return ModelReference(name, store=store.casefold(), word=word)
    passed_over = folder if present.is_folder(folder) else None
    entry = registry.find(name)
    if entry is not None and entry.name == BUILT_IN:  # "tiny:latest"
        return ModelReference(BUILT_IN, directory=TINY_DIRECTORY, entry=entry)
    if entry is not None:
        return ModelReference(entry.name, None, entry.repo, entry.revision, entry, passed_over)
    if present.is_file(folder / ADAPTER_CONFIG):  # no model, which is told where its files are wanted
        return ModelReference(name, directory=folder)
    found = HubName.read(name)
    if name.casefold().endswith(".gguf") and (found is None or not found.part):
        why = f"{path_of(name).absolute()} is not there"
        raise ModelNotFoundError(f"there is no file {name[:200]!r}", why=why, fix=Fix.command("list"))
    if found is not None:
        known = None if found.part else registry.by_repo(found.repo)
        revision, short = found.revision or _MAIN, short_name(name)
        return ModelReference(short, None, found.repo, revision, known, passed_over, part=found.part)
    raise _unknown(name, passed_over, registry)


def looks_like_path(name: str) -> bool:
    """Return whether a name is a path by its first letters, whatever is there."""
    return name in (".", "..", "~") or name.startswith(("/", "./", "../", "~"))


def refusal(name: str, *, is_path: bool = False) -> str:
    """Return why a text is no name of anything; "" where it may be one."""
    if not name or len(name) > NAME_LIMIT:
        return f"it has {len(name)} characters; a name has 1 to {NAME_LIMIT}"
    if _CONTROL.search(name) or any("\ud800" <= character <= "\udfff" for character in name):
        return "it holds a control character"
    bare = short_name(name)
    if not is_path and ("\\" in bare or "%" in bare or ".." in re.split(r"[/@:]", bare)):
        return "a name holds no backslash, no percent sign and no '..' between slashes"
    return ""


def _unknown(name: str, passed_over: Path | None, registry: Registry) -> ModelNotFoundError:
    nearest = registry.nearest(name)
    if passed_over is not None:
        why = f"the folder {name!r} is there, but {without_config(passed_over)}"
    elif nearest:
        why = f"did you mean {' or '.join(nearest)}? `localllm list --all` names all"
    else:
        why = "no model has this short name, and no folder or GGUF file here; other names look like org/repo"
    fix = Fix.model(name, nearest[0]) if nearest else Fix.command("list", "--all")
    return ModelNotFoundError(f"there is no model {name[:80]!r}", why=why, fix=fix)


def short_name(name: str) -> str:
    """Return a name without the hub's address: "hf.co/org/repo:Q8_0" is "org/repo:Q8_0", and
    "https://huggingface.co/org/repo/blob/v1/x.gguf" is "org/repo/x.gguf@v1". Any other name stays as it is."""
    found = _HUB.match(name)
    if found is None:
        return name
    address, _, query = name[found.end() :].partition("#")[0].partition("?")
    page = _PAGE.fullmatch(address.rstrip("/"))
    if page is None:
        file = parse_qs(query).get("show_file_info", [""])[0]  # of the page on which one file is looked at
        return f"{address.rstrip('/')}/{file}".rstrip("/")
    repo, kind, revision, path = page[1], page[2], page[3], page[4] or ""
    if path and kind == "tree":  # a folder is called by the quantization of the files in it
        repo += f":{path.rpartition('/')[2]}"
    elif path.casefold().endswith(".gguf"):
        repo += f"/{path}"
    return repo if revision == _MAIN else f"{repo}@{revision}"


def pull_command(name: str) -> Fix:
    return Fix.command("pull", name)


def whole_path(file: Path) -> Path:
    """Return the absolute path of a file, in a folder without links, under the name that it has there."""
    return file.parent.resolve() / file.name


def path_of(name: str) -> Path:
    """Return the path that a name would be, with ~ as the shell has it."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~nobody
        return Path(name)


def _has_gguf(folder: Path) -> bool:
    if not present.is_folder(folder):
        return False
    with suppress(OSError):
        return any(path.suffix.casefold() == ".gguf" for path in folder.iterdir())
    return False


def _directory(name: str) -> ModelReference:
    path = path_of(name)
    if present.is_folder(path):
        return ModelReference(name, directory=path)
    is_there = present.is_there(path)
    why = "it is a file, and its name does not end in .gguf" if is_there else "nothing is there"
    raise ModelNotFoundError(f"no model in {name[:200]!r}", why=why, fix=Fix.command("list"))


def without_config(folder: Path) -> str:
    """Why a folder without config.json is not a model."""
    return f"it has no config.json, and no GGUF file; it holds {len(list(folder.iterdir()))} other files"
