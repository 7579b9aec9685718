"""GGUF files by their names: which of them are one model, how it is quantized, and which one a name means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from localllm.config import format_bytes
from localllm.errors import Fix, ModelNotFoundError
from localllm.gguf.header import SUFFIX, split_name

_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|I\d_\w+|(?:BF|FP|F)(?:16|32)|MXFP\d\w*|NVFP\d\w*))(?=[-./]|$)",
    re.IGNORECASE | re.ASCII,
)
_DYNAMIC = "UD-"  # in front of a quantization that is mixed by layers; nobody types it
# Beside models: encoders of images, statistics of quantizing, and heads that draft tokens.
_NO_MODEL = re.compile(r".*(?:mmproj|imatrix)|(?:mtp|eagle3|dflash|dspark)-", re.IGNORECASE | re.DOTALL)
_MOST_NAMED = 40


@dataclass(frozen=True)
class GgufChoice:
    """A model among GGUF files. files: all that it is split into, in order. quant: "" where no name says it."""

    files: tuple[str, ...]
    quant: str
    size_bytes: int

    def is_file(self, name: str) -> bool:
        """Return whether one of its files has this name, with its folder or without."""
        wanted = name.casefold()
        return any(wanted in (file.casefold(), file.casefold().rpartition("/")[2]) for file in self.files)


def is_gguf_name(name: str) -> bool:
    """Return whether a file is by its name one of a model's."""
    return name.casefold().endswith(SUFFIX) and not _NO_MODEL.match(name.rpartition("/")[2])


def quant_of(name: str) -> str:
    """Return the quantization that a file's name tells, in capitals: "Q4_K_M"; "" where it tells none."""
    found = _QUANT.findall(split_name(name)[0])
    return found[-1].upper() if found else ""


def models_among(sizes: Mapping[str, int]) -> list[GgufChoice]:
    """Return the models whose files are all there, the smallest first. sizes: bytes of files by their names."""
    models = []
    for name in sizes:
        stem, number, count = split_name(name)
        if number != 1 or count > len(sizes) or not is_gguf_name(name):
            continue
        end = name[len(name) - len(SUFFIX) :]
        files = [name] if not count else [f"{stem}-{each:05}-of-{count:05}{end}" for each in range(1, count + 1)]
        if all(file in sizes for file in files):
            models.append(GgufChoice(tuple(files), quant_of(name), sum(sizes[file] for file in files)))
    return sorted(models, key=lambda model: (model.size_bytes, model.files))


def named(models: Iterable[GgufChoice], repo: str, behind: str = "") -> dict[str, GgufChoice]:
    """Return the models by their shortest names: "org/repo:Q4_K_M", or "org/repo/x.gguf" where the quantization does
    not tell it from others. behind: a revision, "@v1"."""
    models = list(models)
    quants = [model.quant for model in models]
    found = {}
    for model in models:
        is_alone = model.quant and quants.count(model.quant) == 1 and repo
        found[f"{repo}:{model.quant}{behind}" if is_alone else f"{repo}/{model.files[0]}{behind}".lstrip("/")] = model
    return found


def pick(models: Iterable[GgufChoice], part: str) -> list[GgufChoice]:
    """Return the models that are meant. part: a quantization or a file's name, in letters of either case; "": any."""
    models = list(models)
    if part.casefold().endswith(SUFFIX):
        exact = [model for model in models if part in model.files]
        return exact or [model for model in models if model.is_file(part)]
    wanted = part.upper()
    exact = [model for model in models if model.quant == wanted]
    return exact or [model for model in models if not part or model.quant.removeprefix(_DYNAMIC) == wanted]


def several(what: str, models: Mapping[str, GgufChoice], fix: Callable[[str], Fix]) -> ModelNotFoundError:
    """Return the error of a name that may mean several models: their sizes, and the fix that each makes."""
    sizes = ", ".join(_sized(model) for model in list(models.values())[:_MOST_NAMED])
    return ambiguous(f"{what} has {len(models)} GGUF models", sizes, list(models), fix)


def ambiguous(what: str, why: str, names: Sequence[str], fix: Callable[[str], Fix]) -> ModelNotFoundError:
    """Return the error of a name that may mean any of several, with the fix that each makes."""
    left_out = len(names) - _MOST_NAMED
    more = f", and {left_out} more" if left_out > 0 else ""
    return ModelNotFoundError(what, why=f"{why}{more}", fix=map(fix, names[:_MOST_NAMED]))


def _sized(model: GgufChoice) -> str:
    size = f" {format_bytes(model.size_bytes)}" if model.size_bytes else ""  # 0: nobody has told it
    return f"{model.quant or model.files[0]}{size}"
