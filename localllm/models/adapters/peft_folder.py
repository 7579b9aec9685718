"""PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors. No pickle is opened."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from localllm.errors import AdapterError, show
from localllm.models.adapters.peft_config import CONFIG, PeftConfig
from localllm.models.adapters.peft_experts import expert_deltas
from localllm.models.adapters.places import EMBEDDING_NAME, HEAD_NAME, MatrixPlaces
from localllm.models.adapters.stored import (
    CHOOSE_ANOTHER,
    LoraPair,
    LoraTensor,
    StoredAdapter,
    WeightDelta,
    by_name,
    unknown_matrix,
    unsupported,
)
from localllm.models.architecture import ModelConfig
from localllm.models.checkpoints.safetensors_file import SafetensorsFile
from localllm.models.checkpoints.safetensors_header import refused
from localllm.models.families import in_published_form

WEIGHTS = "adapter_model.safetensors"
_OTHERS = ("adapter_model.bin", "adapter_model.pt")
_MOST_CHARACTERS = 512
_OTHER_FILES = "have both files of one adapter"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PREFIX = "base_model.model."
# "…q_proj.lora_A.weight", "…q_proj.lora_A.default.weight", "…embed_tokens.lora_embedding_A"
_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.[\w-]+)??(\.weight)?")
_WRAPPED = ".base_layer"  # what stands behind a module's name where PEFT wraps it
_ROOTS = ("language_model.model.", "model.language_model.", "model.", "")
_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
# Modules of transformers that are called otherwise than the tensors of their checkpoints.
_MODULES = ((".block_sparse_moe.", ".mlp."), (".mlp.router.layer.", ".mlp.gate."), (".mlp.router.", ".mlp.gate."))
# Words of the names of tensors that are no two thin matrices.
_FOREIGN = {
    "lora_magnitude_vector": "DoRA",
    "lora_diag": "KaSA",
    "token_adapter": "a set of trained tokens",
    "trainable_tokens": "a set of trained tokens",
    ".lora_": "a trained bias",
}


def open_folder(folder: Path, config: ModelConfig) -> StoredAdapter:
    """Return the adapter of a folder, for a model of this config. Raises AdapterError and CheckpointError."""
    _require_files(folder)
    peft = PeftConfig.read(folder)
    made_for = in_published_form(config)
    places = MatrixPlaces(made_for)
    with SafetensorsFile(folder / WEIGHTS) as file:
        pairs = _pairs(file, folder, made_for)
        found = (_deltas(pair, peft, places, made_for) for pair in pairs)
        deltas = by_name(itertools.chain.from_iterable(found), folder)
    if peft.ties_embeddings and config.tie_word_embeddings and EMBEDDING_NAME in deltas:
        deltas.setdefault(HEAD_NAME, _as_head(deltas[EMBEDDING_NAME]))
    _require_targets(folder, peft, places, deltas)
    _require_named(folder, peft, [pair.module for pair in pairs], deltas)
    return StoredAdapter(folder, peft.base, made_for, deltas)


def _require_files(folder: Path) -> None:
    try:
        found = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read", why=error.strerror or "unknown", fix=CHOOSE_ANOTHER) from None
    missing = next((name for name in (CONFIG, WEIGHTS) if name not in found), None)
    if missing is None:
        return
    why, fix = f"{missing} is not there", "name the folder that has it"
    pickles = [name for name in _OTHERS if name in found]
    files = sorted(name for name in found if name.endswith(".gguf"))
    if missing == WEIGHTS and pickles:
        why += f"; {pickles[0]} is, but pickles are never opened: they can run code"
        fix = "load it with PEFT and save it anew: save_pretrained writes safetensors"
    elif files:
        why, fix = f"{why}; {show(files[0])} is", "name the .gguf file itself"
    elif "config.json" in found and missing == CONFIG:
        why += "; config.json is: it is a model"
    raise AdapterError(f"{folder} is not an adapter that can be read", why=why, fix=fix)


def _pairs(file: SafetensorsFile, folder: Path, config: ModelConfig) -> list[LoraPair]:
    """Raises AdapterError."""
    halves: dict[tuple[str, bool], dict[str, LoraTensor]] = {}
    for name, entry in file.entries.items():
        if len(name) > _MOST_CHARACTERS:
            raise refused(file.path, f"a name has {len(name)} characters; at most {_MOST_CHARACTERS} are read")
        found = _LORA.fullmatch(name)
        if found is None or (found[2] is None) != (found[4] is not None):
            _require_base_copy(name, entry.shape, folder, config)
            continue
        module, side = found[1].removeprefix(_PREFIX), found[3]
        shown = name.removeprefix(_PREFIX)
        tensor = LoraTensor(shown, entry.shape, _dtype(file, name), partial(file.read_into, name))
        half = halves.setdefault((module, found[2] is not None), {})
        if side in half:
            why = f"{show(half[side].name)} and {show(shown)} are both stored"
            raise AdapterError(f"{folder} holds several adapters", why=why, fix="save one of them by itself, with PEFT")
        half[side] = tensor
    if not halves:
        why = f"{WEIGHTS} has {len(file.entries)} tensors, none of them lora_A or lora_B"
        raise AdapterError(f"{folder} changes nothing", why=why, fix="choose another adapter")
    for (module, _), half in halves.items():
        if len(half) < 2:
            (present,) = half.values()
            why = f"{show(present.name)} is there, and not the lora_{'B' if 'A' in half else 'A'} that belongs to it"
            raise AdapterError(f"{folder}: half of {show(module)} is missing", why=why, fix="fetch its files anew")
    return [LoraPair(folder, module, half["A"], half["B"]) for (module, _), half in halves.items()]


def _dtype(file: SafetensorsFile, name: str) -> str:
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    stored = file.entry(name).dtype
    return names.get(stored, stored)


def _require_base_copy(name: str, shape: tuple[int, ...], folder: Path, config: ModelConfig) -> None:
    """Raise AdapterError for a tensor that is no half of a pair. PEFT stores the base's embedding beside the changes of
    it: the model has that."""
    name = name.removeprefix(_PREFIX)
    module, _, kind = name.rpartition(".")
    if (
        kind in ("weight", "bias")
        and module.endswith(_WRAPPED)
        and _plain(module.removesuffix(_WRAPPED), config) in (EMBEDDING_NAME, HEAD_NAME)
    ):
        wanted = (config.vocab_size, config.hidden_size)[: 2 if kind == "weight" else 1]
        if shape == wanted:
            return
        why = f"{show(name)} is {list(shape)}, the model's is {list(wanted)}"
        raise AdapterError(f"{folder} was made for an embedding of another size", why=why, fix=CHOOSE_ANOTHER)
    for word, variant in _FOREIGN.items():
        if word in name:
            raise unsupported(folder, f"{variant} ({show(name)})")
    raise unsupported(folder, f"a whole tensor beside the thin ones (modules_to_save: {show(name)})")


def _deltas(pair: LoraPair, peft: PeftConfig, places: MatrixPlaces, config: ModelConfig) -> Iterator[WeightDelta]:
    """Yield what a pair adds: to a matrix, or to one of each expert. Raises AdapterError."""
    module = pair.module
    plain = _plain(module, config)
    stem, _, last = plain.rpartition(".")
    if (experts := places.experts(_unwrapped(plain))) is not None:
        # A parameter of all experts, whose shape tells which: the second one is wrapped around the first.
        yield from expert_deltas(pair, experts, peft, _unwrapped(module))
        return
    if (experts := places.experts(stem)) is not None:
        yield from expert_deltas(pair, experts, peft, module, last)
        return
    if not places.find(plain) and not places.is_unread(plain):
        raise unknown_matrix(pair.place, plain, pair.b.name, peft.base, config)
    peft.require_rank(pair, pair.rank, module)
    scale = peft.scale_of(module, pair.rank)
    a, b = pair.read()
    if "lora_embedding_" in pair.a.name:  # y = a.T[token] @ b.T
        a, b = b.T, a.T
    for name, first, rows in config.stored.parts_of(plain) or [(plain, 0, len(b))]:
        yield WeightDelta(name, pair.b.name, a, b[first : first + rows], scale)


def _plain(module: str, config: ModelConfig) -> str:
    """Return a checkpoint's name of a module: see `Checkpoint`."""
    if module in _HEADS:
        return HEAD_NAME
    root = next(root for root in _ROOTS if module.startswith(root))
    name = f"model.{module.removeprefix(root)}."
    for theirs, ours in (*config.stored.renames, *_MODULES):
        name = name.replace(theirs, ours)
    return name.removesuffix(".")


def _unwrapped(module: str) -> str:
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    return module


def _as_head(embedding: WeightDelta) -> WeightDelta:
    return WeightDelta(HEAD_NAME, embedding.stored, embedding.a, embedding.b, embedding.scale)


def _require_targets(folder: Path, peft: PeftConfig, places: MatrixPlaces, deltas: Iterable[str]) -> None:
    """Raise AdapterError where the config lists modules of the model none of which is changed."""
    found = [place.site for name in deltas for place in places.find(name)]
    for target in peft.targets:
        sites = places.sites_of(target)
        if sites and sites.isdisjoint(found):
            why = f"{CONFIG} lists it in target_modules, the model has {len(sites)} such modules, {WEIGHTS} none"
            what = f"{folder}: what the adapter adds to {show(target)} is missing"
            raise AdapterError(what, why=why, fix="fetch the adapter's files anew")


def _require_named(folder: Path, peft: PeftConfig, modules: Iterable[str], deltas: Iterable[str]) -> None:
    """Raise AdapterError where the config names none of the modules that the file changes, or not their layers: PEFT
    leaves those out."""
    ends = tuple(f".{target}" for target in peft.targets)
    if ends and not peft.parameters and not any(f".{_unwrapped(module)}".endswith(ends) for module in modules):
        why = f"target_modules is {', '.join(map(show, peft.targets[:4]))}; {WEIGHTS} changes none of these"
        raise AdapterError(f"{folder}: {CONFIG} and {WEIGHTS} do not belong together", why=why, fix=_OTHER_FILES)
    numbers = {int(layer[1]) for name in deltas if (layer := _LAYER.match(name))}
    if peft.layers is not None and (others := numbers - peft.layers):
        why = f"layers_to_transform lists {sorted(peft.layers)[:8]}; {WEIGHTS} changes layer {min(others)}, too"
        raise AdapterError(f"{folder}: {CONFIG} and {WEIGHTS} do not belong together", why=why, fix=_OTHER_FILES)
