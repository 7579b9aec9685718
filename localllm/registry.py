"""The models known by a short name: models.toml as shipped, overlaid by the user's own.

Owns the form of models.toml and the order in which sampling defaults apply. Knows nothing of disks and downloads.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localllm.config import Origin, ResolvedSettings, accepted, unknown_key, user_directories
from localllm.errors import CheckpointError, Fix, SettingsError, UnsupportedModelError, show
from localllm.settings import Accepts, taken_by
from localllm.toml_file import TomlFile

BUILT_IN = "tiny"  # in the package: an entry with no repository

# Architectures that run here, by the model_type of a config.json: the file of `models/families` that reads it.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "mistral",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "phi3": "phi3",
        "gemma2": "gemma2",
        "gemma3_text": "gemma3",
        "gemma3": "gemma3",
        "olmo2": "olmo2",
        "mixtral": "mixtral",
        "qwen2_moe": "qwen2_moe",
        "qwen3_moe": "qwen3_moe",
        "qwen3_vl_moe": "qwen3_vl_moe",
        "qwen3_vl_moe_text": "qwen3_vl_moe",
        "olmoe": "olmoe",
        "glm4_moe": "glm4_moe",
        "dots1": "dots1",
        "ernie4_5_moe": "ernie4_5_moe",
        "granitemoe": "granitemoe",
        "phimoe": "phimoe",
        "minimax_m2": "minimax_m2",
        "hunyuan_v1_moe": "hunyuan_v1_moe",
        "deepseek_v2": "deepseek_v2",
        "deepseek_v3": "deepseek_v3",
        "glm4_moe_lite": "glm4_moe_lite",
        "minicpm3": "minicpm3",
        "qwen3_next": "qwen3_next",
        "qwen3_5": "qwen3_5",
        "qwen3_5_text": "qwen3_5",
        "qwen3_5_moe": "qwen3_5_moe",
        "qwen3_5_moe_text": "qwen3_5_moe",
        "olmo_hybrid": "olmo_hybrid",
        "kimi_linear": "kimi_linear",
        "lfm2": "lfm2",
        "lfm2_moe": "lfm2_moe",
        "lfm3": "lfm3",
        "bamba": "bamba",
        "falcon_h1": "falcon_h1",
        "granitemoehybrid": "granitemoehybrid",
        "nemotron_h": "nemotron_h",
        "mamba2": "mamba2",
        "mamba": "mamba",
        "falcon_mamba": "mamba",
        "jamba": "jamba",
        "gemma3n": "gemma3n",
        "gemma3n_text": "gemma3n",
        "gemma4": "gemma4",
        "gemma4_text": "gemma4",
        "gemma4_unified": "gemma4",
        "gemma4_unified_text": "gemma4",
        "gpt_oss": "gpt_oss",
        "ministral3": "ministral3",
        "mistral3": "mistral",
        "smollm3": "smollm3",
        "olmo3": "olmo3",
        "granite": "granite",
        "glm": "glm",
        "glm4": "glm4",
        "seed_oss": "seed_oss",
        "hunyuan_v1_dense": "hunyuan_v1_dense",
        "ernie4_5": "ernie4_5",
        "exaone4": "exaone4",
        "apertus": "apertus",
        "arcee": "arcee",
        "cohere2": "cohere2",
        "qwen3_vl": "qwen3_vl",
        "qwen3_vl_text": "qwen3_vl",
        "qwen2_5_vl": "qwen2_5_vl",
        "qwen2_5_vl_text": "qwen2_5_vl",
        "muse_glimmer": "muse_glimmer",
        "muse_glimmer_text": "muse_glimmer",
        "internlm3": "internlm3",
        "stablelm": "stablelm",
        "starcoder2": "starcoder2",
        "phi4mm": "phi4_multimodal",
        "phi4_multimodal": "phi4_multimodal",
        "nemotron": "nemotron",
        "rwkv7": "rwkv7",
    }
)

# Quantizers whose checkpoints are read, by the quant_method of a config.json.
QUANTIZERS = (
    "gptq", "awq", "compressed-tensors", "mlx", "bitsandbytes", "fp8", "fbgemm_fp8", "mxfp4", "modelopt",
)  # fmt: skip

SAMPLING_KEYS = taken_by("models.toml")
_ENTRY_KEYS: Mapping[str, Accepts] = {
    "name": Accepts("text"),
    "aliases": Accepts("texts"),
    "repo": Accepts("text"),
    "revision": Accepts("text"),
    "licence": Accepts("text"),
    "gated": Accepts("switch"),
    "context": Accepts("integer", 1, 2**31),
    "parameters": Accepts("number", 0, 1e6),
    "download_gb": Accepts("number", 0, 1e6),
    "stop": Accepts("texts"),
}
# One spelling for the hub's address, the cache's folder and an error text: nothing here needs quoting, nothing climbs.
_SEGMENT = r"\w(?:[\w.-]{0,94}\w)?"
REPO_ID = re.compile(rf"(?!.*(?:--|\.\.)){_SEGMENT}/{_SEGMENT}", re.ASCII)
REVISION = re.compile(r"(?!.*(?:\.\.|//|/\.|\.lock\b))\w(?:[\w./-]{0,198}[\w-])?", re.ASCII)

_WRITES_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # ends of a class's name in `architectures`
_BF16_BYTES = 2  # of a parameter: what nearly all makers publish

# "7b" of "mistral-7b", "135m" of "smollm2:135m", "8" of "qwen3-8".
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z]{2})|(?<=[-:])(\d+)$")


@dataclass(frozen=True)
class ModelEntry:
    """One model of models.toml."""

    name: str
    repo: str | None = None  # None: the built-in model
    revision: str = "main"
    aliases: tuple[str, ...] = ()
    licence: str = "unknown"
    gated: bool = False
    context: int | None = None  # tokens
    parameters: float | None = None  # billions, of the text model
    download_gb: float | None = None  # 10^9 bytes; None: as many as bf16 takes
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)  # of the sampling keys and `stop`

    @property
    def download_bytes(self) -> int | None:
        """About as many bytes as a pull fetches; None where it is not known, or where there is nothing to fetch."""
        if self.repo is None or (self.download_gb is None and self.parameters is None):
            return None
        return int(1e9 * (self.download_gb if self.download_gb is not None else _BF16_BYTES * (self.parameters or 0)))


@dataclass(frozen=True)
class Registry:
    """Entries by name, the user's before the shipped ones."""

    entries: tuple[ModelEntry, ...]

    def find(self, name: str) -> ModelEntry | None:
        """The entry with this name, else with this alias; letter case does not matter, nor does Ollama's `:latest`."""
        wanted = name.casefold().removesuffix(":latest")
        for entry in self.entries:
            if entry.name.casefold() == wanted:
                return entry
        for entry in self.entries:
            if wanted in (alias.casefold() for alias in entry.aliases):
                return entry
        return None

    def by_repo(self, repo: str) -> ModelEntry | None:
        """The entry whose files come from `repo`."""
        return next((entry for entry in self.entries if entry.repo and entry.repo.casefold() == repo.casefold()), None)

    def of_family(self, architecture: str) -> ModelEntry | None:
        """Return the first model of the same series: "qwen4_moe" and "qwen3.6-27b" begin with the same letters."""
        series = _series(architecture)
        return next((entry for entry in self.entries if series and _series(entry.name) == series), None)

    def nearest(self, name: str, count: int = 3) -> tuple[str, ...]:
        """Names that `name` may have been meant for; empty where none is. The best first: of the likest family, then of
        the nearest size, or the smallest where `name` has none."""
        family, size = _family_and_size(name.rsplit("/", 1)[-1])
        likeness = difflib.SequenceMatcher(b=family)
        ranks: dict[str, tuple[float, float]] = {}
        for entry in self.entries:
            ratios = []
            for key in (entry.name, *entry.aliases):
                likeness.set_seq1(_family_and_size(key)[0])
                ratios.append(likeness.ratio())
            billions = entry.parameters or math.inf
            # Of three letters "hi" and "phi" are alike, and nothing alike.
            if max(ratios) >= 0.6 and (len(family) > 3 or _series(entry.name).startswith(family)):
                ranks[entry.name] = -max(ratios), billions if size is None else abs(math.log(billions / size))
        return tuple(sorted(ranks, key=ranks.__getitem__))[:count]


def _series(name: str) -> str:
    """Return the letters that a name begins with: "qwen" of "Qwen3.5-9B"."""
    found = re.match("[a-z]+", name.casefold())
    return found[0] if found else ""


def unknown_architecture(source: str, config: Mapping[str, Any], known: Collection[str]) -> UnsupportedModelError:
    """Return the error for an architecture that does not run here.

    source: the file or the repository.
    config: its config.json, or as much of it as is known.
    known: the architectures of such files that run.
    """
    name = str(config.get("model_type"))
    why = f"{len(known)} other architectures run"
    if "vision_config" in config or "audio_config" in config:
        why = f"it reads images or sound beside text, and of such models only some run; {why}"
    elif not any(str(each).endswith(_WRITES_TEXT) for each in config.get("architectures") or _WRITES_TEXT):
        why = f"it is no language model: it is made for {config['architectures'][0]}"
    nearest = load_registry().of_family(name)
    fix = [Fix.command("plan", nearest.name)] if nearest is not None else []
    what = f"{source}: the architecture {show(name)} is not supported"
    return UnsupportedModelError(what, why=why, fix=[*fix, Fix.command("list", "--all")])


def _family_and_size(name: str) -> tuple[str, float | None]:
    """Return what stands before the size in a model's name, without dashes, and the size in billions, if it has one."""
    found = _SIZE.search(name.casefold())
    family = name.casefold()[: found.start() if found else None]
    size = float(found[1] or found[3]) / (1000 if found[2] == "m" else 1) if found else 0.0
    return re.sub(r"[-_:]", "", family), size or None


def shipped_registry() -> Path:
    """models.toml of this installation: inside the package, or beside it in a source tree."""
    package = Path(__file__).parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def load_registry(user_file: Path | None = None, *, environ: Mapping[str, str] = os.environ) -> Registry:
    """The shipped entries overlaid by `user_file` (default: models.toml beside the user's config.toml).

    Raises SettingsError, naming file and line, for an unknown key, a wrong value, and a name given twice in a file.
    """
    user_file = user_file or user_directories(environ).config / "models.toml"
    shipped = dict(_entries(TomlFile.read(shipped_registry()), {}))
    user = dict(_entries(TomlFile.read(user_file), shipped))
    return Registry(tuple({**user, **{name: entry for name, entry in shipped.items() if name not in user}}.values()))


def _entries(file: TomlFile, base: Mapping[str, ModelEntry]) -> Iterator[tuple[str, ModelEntry]]:
    """(folded name, entry) of each [[model]], over the entry of the same name in `base`."""
    for key in file.data:
        if key != "model":
            raise unknown_key(key, file.where(key), ["model"], fix="start each entry with [[model]]")
    tables = file.data.get("model", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingsError(f"model is not a list in {file.where('model')}", why="entries start with [[model]]")
    taken: set[str] = set()
    for index, table in enumerate(tables):
        entry = _entry(file, index, table, base)
        names = {name.casefold() for name in (entry.name, *entry.aliases)}
        if twice := names & taken:
            where = file.where("model", index, "name")
            raise SettingsError(
                f"{sorted(twice)[0]!r} names two models in {where}", why="each name and alias stands once"
            )
        taken |= names
        yield entry.name.casefold(), entry


def _entry(file: TomlFile, index: int, table: Mapping[str, Any], base: Mapping[str, ModelEntry]) -> ModelEntry:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "sampling":
            continue
        if key not in _ENTRY_KEYS:
            raise unknown_key(key, file.where("model", index, key), [*_ENTRY_KEYS, "sampling"])
        values[key] = accepted(key, value, partial(file.where, "model", index, key), _ENTRY_KEYS[key])
    if "name" not in values:
        where = file.where("model", index)
        raise SettingsError(f"a model has no name in {where}", why="every [[model]] needs one", fix='add name = "..."')
    entry = base.get(values["name"].casefold(), ModelEntry(name=values["name"]))
    _check_repository(values, entry, partial(file.where, "model", index))
    sampling = _sampling(file, index, table.get("sampling", {}))
    set_here = [*sampling, *(["stop"] if "stop" in values else [])]
    origin = dict.fromkeys(set_here, Origin("registry", str(file.path)))
    return replace(entry, **values, sampling={**entry.sampling, **sampling}, origins={**entry.origins, **origin})


def _check_repository(values: Mapping[str, Any], entry: ModelEntry, where: Callable[..., str]) -> None:
    repo, revision = values.get("repo", entry.repo), values.get("revision", entry.revision)
    if entry.name == BUILT_IN and repo is None:
        return
    if entry.name == BUILT_IN:
        raise SettingsError(f"{BUILT_IN!r} has a repository in {where('repo')}", why="it is the model in the package")
    if repo is None:
        raise SettingsError(
            f"{values['name']!r} has no repo in {where('name')}", why='a new model needs repo = "org/name"'
        )
    if not REPO_ID.fullmatch(repo):
        raise SettingsError(f"repo is {repo[:80]!r} in {where('repo')}", why='it must look like "org/name"')
    if not REVISION.fullmatch(revision):
        raise SettingsError(f"revision is {revision[:80]!r} in {where('revision')}", why="a branch, a tag or a commit")


def _sampling(file: TomlFile, index: int, table: object) -> dict[str, float]:
    where = partial(file.where, "model", index, "sampling")
    if not isinstance(table, dict):
        raise SettingsError(f"sampling is not a table in {where()}", why="write sampling = { temperature = 0.7 }")
    for key in table:
        if key not in SAMPLING_KEYS:
            raise unknown_key(key, where(key), SAMPLING_KEYS)
    return {key: accepted(key, value, partial(where, key)) for key, value in table.items()}


def with_model_defaults(
    resolved: ResolvedSettings, entry: ModelEntry | None, generation_config: Mapping[str, Any], source: str
) -> ResolvedSettings:
    """Fill every sampling setting that the user has not set from the model.

    The registry's entry comes first, then `generation_config`: the parsed generation_config.json, which `source` names.
    Raises CheckpointError where that file holds a value out of range.
    """
    values: dict[str, tuple[Any, Origin]] = {}
    for key in SAMPLING_KEYS:
        if getattr(resolved.settings, key) is not None:
            continue
        if entry is not None and key in entry.sampling:
            values[key] = (entry.sampling[key], entry.origins[key])
        elif generation_config.get(key) is not None:
            try:
                value = accepted(key, generation_config[key], source)
            except SettingsError as error:
                fix = f"set your own, which beats it: --{key.replace('_', '-')}"
                raise CheckpointError(error.what, why=error.why, fix=fix) from None
            values[key] = (value, Origin("checkpoint", source))
    if entry is not None and entry.stop and not resolved.settings.stop:
        values["stop"] = (entry.stop, entry.origins["stop"])
    return resolved.overlaid(values)
