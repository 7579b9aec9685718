"""A packed model: a folder with one file a block, and an index that is written last.

What its files hold follows from the model's config, the recipe and the source; the index and every header are compared
with that before a byte is used, and every block with its checksum while the next one is being read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import xxhash
from torch import Tensor

from localllm.errors import CheckpointError, show
from localllm.hub.locks import reading
from localllm.hub.packed import PACKED_INDEX
from localllm.layers.config import (
    BesideConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MambaConfig,
    Mixer,
    MLPConfig,
    MoEConfig,
    Rwkv7ChannelMixConfig,
    Rwkv7TimeMixConfig,
    ShortConvConfig,
)
from localllm.models.architecture import LayerConfig, ModelConfig
from localllm.models.block_layouts import block_layouts
from localllm.models.block_source import add_to_digest
from localllm.models.disk_embedding import DiskEmbedding
from localllm.models.layout import CHECKSUM_BYTES, EXPERTS, SHARED_CHECKSUM, BlockLayout
from localllm.models.packed_file import CHECKSUM, DTYPES, LAYOUT_VERSION, PackedFile, read_index, read_tensor
from localllm.offload.streaming.disk_read import READERS, FileRead, cached_share, read_into
from localllm.offload.streaming.disk_stream import StreamedFile
from localllm.offload.streaming.expert_pool import ExpertFile
from localllm.offload.streaming.host_buffer import host_buffer
from localllm.offload.streaming.page_map import can_map
from localllm.quant.recipe import Recipe


@dataclass(frozen=True)
class PackedPlan:
    """The contents of a packed model of this checkpoint in this recipe, before any byte of it is known."""

    config: ModelConfig
    recipe: Recipe
    source: str  # identifies the checkpoint
    model: str = "MODEL"  # its name in commands

    @cached_property
    def files(self) -> dict[str, PackedFile]:
        """Files by the block's name, in the order in which a forward needs them."""
        source = self.source.encode("utf-8", "backslashreplace").decode()  # a path may hold bytes that are no text
        return {layout.name: PackedFile.of(layout, self.recipe, source) for layout in block_layouts(self.config)}

    @property
    def command(self) -> str:
        """Return the command that makes it, and makes its damaged blocks anew."""
        return f"localllm quantize {shlex.quote(self.model)} --weights {self.recipe.flag}"

    def index(self, checksums: Mapping[str, str]) -> dict[str, object]:
        """Return the content of index.json. checksums: by the block's name."""
        recipe, files = self.recipe, self.files
        return {
            "layout_version": LAYOUT_VERSION,
            "recipe": {"name": recipe.name, "blocks": recipe.blocks.name, "embedding": recipe.embedding.name},
            "source": next(iter(files.values())).metadata["source"],
            "model": _model_entry(self.config),
            "blocks": [_block_entry(file, checksums[name]) for name, file in files.items()],
        }


def _model_entry(config: ModelConfig) -> dict[str, object]:
    """Return what the packed bytes depend on. Layers that are all alike are told by the numbers of one."""
    entry: dict[str, object] = {
        name: getattr(config, name)
        for name in ("model_type", "vocab_size", "hidden_size", "num_layers", "norm_weight_offset")
    }
    entry["tie_word_embeddings"] = config.tie_word_embeddings
    if config.altup is not None:
        entry["altup"] = dataclasses.asdict(config.altup)
    if config.per_layer is not None:
        entry["per_layer"] = dataclasses.asdict(config.per_layer)
    if config.residual_scale != 1.0:
        entry["residual_scale"] = config.residual_scale
    if config.stored.multipliers:
        entry["multipliers"] = [list(pair) for pair in config.stored.multipliers]
    layers = [_layer_entry(layer) for layer in config.layers]
    return entry | (layers[0] if all(layer == layers[0] for layer in layers) else {"layers": layers})


def _layer_entry(layer: LayerConfig) -> dict[str, object]:
    mixer, body = layer.mixer, layer.feed_forward
    entry = ({} if body is None else _body_entry(body)) | ({} if mixer is None else _mixer_entry(mixer))
    return entry | {"norm_placement": layer.norm_placement} | ({"has_scalar": True} if layer.has_scalar else {})


def _mixer_entry(mixer: Mixer) -> dict[str, object]:
    if isinstance(mixer, BesideConfig):
        return {name: value for each in mixer.mixers for name, value in _mixer_entry(each).items()}
    if isinstance(mixer, MambaConfig):
        return {"mamba": dataclasses.asdict(mixer)}
    if isinstance(mixer, Mamba2Config):
        return {"mamba2": dataclasses.asdict(mixer)}
    if isinstance(mixer, ShortConvConfig):
        return {"short_conv": dataclasses.asdict(mixer)}
    if isinstance(mixer, DeltaNetConfig):
        return {"delta_net": _delta_entry(mixer)}
    if isinstance(mixer, Rwkv7TimeMixConfig):
        return {"rwkv7_time_mix": dataclasses.asdict(mixer)}
    if isinstance(mixer, Rwkv7ChannelMixConfig):
        return {"rwkv7_channel_mix": dataclasses.asdict(mixer)}
    if isinstance(mixer, LatentAttentionConfig):
        sizes = ("num_heads", "query_rank", "latent_dim", "plain_dim", "shared_dim", "value_dim")
        return {name: getattr(mixer, name) for name in (*sizes, "has_bias", "has_output_bias")}
    entry: dict[str, object] = {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.has_bias,
        "output_bias": mixer.has_output_bias,
        "qk_norm": mixer.qk_norm,
    }
    own = {
        "output_gate": mixer.has_output_gate,
        "head_gates": mixer.gates_heads,
        "sinks": mixer.has_sinks,
        "value_from_key": mixer.value_from_key,
    }
    own["shares_kv"] = mixer.kv_of_layer is not None
    return entry | {name: value for name, value in own.items() if value}


def _delta_entry(mixer: DeltaNetConfig) -> dict[str, object]:
    entry = dataclasses.asdict(mixer.shape)
    if mixer.rank is None:  # older files say nothing of it
        del entry["decays"]
        return entry
    return {**entry, "rank": mixer.rank}


def _body_entry(body: MLPConfig | MoEConfig) -> dict[str, object]:
    if isinstance(body, MLPConfig):
        entry: dict[str, object] = {"intermediate_size": body.intermediate_size, "mlp_bias": body.has_bias}
        return entry if body.has_gate else entry | {"has_gate": False}
    entry = {"num_experts": body.router.num_experts, **_body_entry(body.expert)}
    own = {"router_bias": body.has_router_bias, "own_norms": body.has_own_norms}
    entry |= {name: True for name, is_so in own.items() if is_so}
    return entry if body.shared is None else entry | {"shared_intermediate_size": body.shared.intermediate_size}


def _block_entry(file: PackedFile, checksum: str) -> dict[str, object]:
    tensors = {
        name: {
            "dtype": DTYPES[placed.spec.dtype],
            "shape": list(placed.spec.shape),
            "offset": file.data_begin + placed.begin,
        }
        for name, placed in file.tensors.items()
    }
    entry = {"name": file.name, "file": file.file_name, "bytes": file.file_bytes, "checksum": checksum}
    return {**entry, "tensors": tensors}


class PackedModel:
    """An open packed model; a BlockSource. The tensors of a block are views of one buffer, read once and in one piece.

    At most one block is read ahead of the one that was asked for. Until it is closed nobody deletes it.
    """

    def __init__(self, directory: Path, plan: PackedPlan, checksums: Mapping[str, str], held: ExitStack) -> None:
        """held: what keeps the folder from being deleted; closed with this."""
        self.directory = directory
        self._held = held
        self.config = plan.config
        self._plan = plan
        self._files = plan.files
        self._checksums = checksums
        self._next = dict(itertools.pairwise(self._files))  # block -> the one after it
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="packed-read")
        self._ahead: tuple[str, Tensor, FileRead] | None = None

    @classmethod
    def open(
        cls, directory: Path, config: ModelConfig, recipe: Recipe, source: str, *, model: str = "MODEL"
    ) -> PackedModel:
        """Open the packed model in `directory`, if it is just this one. Its `config` says whether the head is tied.

        model: its name, for the commands in errors. Raises CheckpointError where it is unfinished, made from another
        source or in another recipe, damaged, cut, or of another layout version.
        """
        plan = PackedPlan(config, recipe, source, model)
        with ExitStack() as held:
            with suppress(OSError):  # no index: said below
                held.enter_context(reading(directory / PACKED_INDEX))
            try:
                found = read_index(directory)
            except CheckpointError as error:
                raise CheckpointError(error.what, why=error.why, fix=plan.command) from None
            plan, checksums = _agreed(found, plan, directory / PACKED_INDEX)
            for path, file in ((directory / file.file_name, file) for file in plan.files.values()):
                try:
                    size = path.stat().st_size
                except OSError as error:
                    why = error.strerror or "unknown"
                    raise CheckpointError(f"{path} cannot be read", why=why, fix=plan.command) from None
                if size != file.file_bytes:
                    what = f"{path} is cut short" if size < file.file_bytes else f"{path} is too long"
                    why = f"{file.file_bytes} bytes are needed, it has {size}"
                    raise CheckpointError(what, why=why, fix=plan.command)
            return cls(directory, plan, checksums, held.pop_all())

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. The tensors that were given out stay."""
        if self._ahead is not None:
            self._ahead[2].close()
            self._ahead = None
        self._readers.shutdown()
        self._held.close()

    def tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        """Return a block's tensors. Raises MemoryError, and CheckpointError with the file and the command that
        helps."""
        return self.views(layout, self.content(layout))

    def content(self, layout: BlockLayout) -> Tensor:
        """Return the block as it lies on the disk, uint8, whole pages of its own, checked. Raises as `tensors` does."""
        file = self._files[layout.name]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] != file.name:
            ahead[2].close()
            ahead = None
        buffer, read = self._begin(file) if ahead is None else ahead[1:]
        try:
            following = self._next.get(layout.name)
            if following is not None:
                self._ahead = (following, *self._begin(self._files[following]))
            self._check(file, read.chunks())
        except (OSError, EOFError) as error:
            raise self._refusal(file, "cannot be read", str(error)) from None
        finally:
            read.close()
        return buffer

    def views(self, layout: BlockLayout, memory: Tensor) -> dict[str, Tensor]:
        """Return the block's tensors in `memory`, which holds its content, or will, on whatever device."""
        return self._files[layout.name].views(memory)

    def finish(self) -> None:
        """Do nothing: the index names every file."""

    def read_ahead_only(self, names: Iterable[str]) -> None:
        """Begin only these of the blocks that follow each other before they are asked for."""
        self._next = dict(itertools.pairwise(names))

    def cached_share(self) -> float:
        """Return how much of the blocks lies in the page cache and can be used there; 0 where that cannot be found
        out."""
        cached = 0.0
        with suppress(OSError):
            for file in self._files.values():
                with (self.directory / file.file_name).open("rb") as opened:
                    if can_map(opened.fileno()):
                        cached += cached_share(opened.fileno(), file.file_bytes) * file.file_bytes
        return cached / sum(file.file_bytes for file in self._files.values())

    def streamed_file(self, layout: BlockLayout) -> StreamedFile:
        """Return the block's file as a stream reads it: whole, again and again."""
        file = self._files[layout.name]
        return StreamedFile(
            name=file.name,
            path=self.directory / file.file_name,
            num_bytes=file.file_bytes,
            check=lambda content: self._check(file, [content]),
            fix=self._plan.command,
        )

    def disk_embedding(self, layout: BlockLayout) -> DiskEmbedding:
        """Return the rows of the block's one matrix, read when they are wanted. The file is checked now. Raises
        CheckpointError."""
        file, (matrix,) = self._files[layout.name], layout.matrices
        path = self.directory / file.file_name
        if file.checksum_of(path) != self._checksums[file.name]:
            raise self._refusal(file, "is damaged", f"its header or its checksum is not that of {file.name}")
        weight_format = matrix.format(self._plan.recipe)
        return DiskEmbedding(path, file, matrix.name, weight_format, matrix.in_features, self._plan.command)

    def expert_file(self, layout: BlockLayout) -> ExpertFile:
        """Return the block's file as a pool reads its experts."""
        file, experts = self._files[layout.name], layout.experts
        assert experts is not None
        return ExpertFile(
            block=file.name,
            path=self.directory / file.file_name,
            begin=file.data_begin + file.tensors[EXPERTS].begin,
            count=experts.num_experts,
            check=partial(self._check_record, file),
            fix=self._plan.command,
            active=experts.top_k,
        )

    def shared_tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        """Read what all tokens share of a mixture, which lies before its experts. Raises CheckpointError."""
        file = self._files[layout.name]
        buffer = host_buffer(file.data_begin + file.tensors[EXPERTS].begin)
        try:
            with (self.directory / file.file_name).open("rb", buffering=0) as opened:
                read_into(opened.fileno(), None, 0, buffer.numpy().data)
        except (OSError, EOFError) as error:
            raise self._refusal(file, "cannot be read", str(error)) from None
        own = file.header(self._checksums[file.name])
        if buffer[: len(own)].numpy().tobytes() != own:
            raise self._refusal(file, "is damaged", f"its header is not that of {file.name}")
        tensors = file.views(buffer, without=EXPERTS)
        digest, stored = xxhash.xxh3_128(), tensors.pop(SHARED_CHECKSUM).numpy().tobytes()
        add_to_digest(digest, tensors)
        if digest.digest() != stored:
            why = f"the checksum of what all tokens share is {digest.hexdigest()}, {stored.hex()} is stored"
            raise self._refusal(file, "is damaged", why)
        return tensors

    def small_tensors(self, layout: BlockLayout) -> dict[str, Tensor]:
        """Read the block's norms and biases, which stay where its matrices are streamed. Raises CheckpointError."""
        file = self._files[layout.name]
        path = self.directory / file.file_name
        try:
            with path.open("rb", buffering=0) as opened:
                return {
                    name: read_tensor(file.tensors[name], opened.fileno(), file.data_begin)
                    for name in layout.small_tensors()
                }
        except (OSError, EOFError) as error:
            raise self._refusal(file, "cannot be read", str(error)) from None

    def _check_record(self, file: PackedFile, index: int, content: memoryview) -> None:
        """Raises CheckpointError where an expert's bytes are not those that its own checksum means."""
        digest = xxhash.xxh3_128_digest(content[:-CHECKSUM_BYTES])
        if digest != content[-CHECKSUM_BYTES:]:
            stored = bytes(content[-CHECKSUM_BYTES:]).hex()
            why = f"the checksum of expert {index} is {digest.hex()}, {stored} is stored behind it"
            raise self._refusal(file, "is damaged", why)

    def _begin(self, file: PackedFile) -> tuple[Tensor, FileRead]:
        buffer = host_buffer(file.file_bytes)
        try:
            return buffer, FileRead(self.directory / file.file_name, buffer.numpy().data, self._readers)
        except OSError as error:
            raise self._refusal(file, "cannot be read", str(error)) from None

    def _check(self, file: PackedFile, chunks: Iterable[memoryview]) -> None:
        """Raises CheckpointError where a file's bytes, in order, are not those that the index means."""
        header = file.header(self._checksums[file.name])
        digest = xxhash.xxh3_128()
        position = 0
        for chunk in chunks:
            own = header[position : position + len(chunk)]
            if chunk[: len(own)] != own:
                why = f"its header is not that of {file.name}, {self._plan.recipe.name}, {self._plan.source}"
                raise self._refusal(file, "is damaged", why)
            digest.update(chunk[len(own) :])
            position += len(chunk)
        if digest.hexdigest() != self._checksums[file.name]:
            why = f"the checksum of its bytes is {digest.hexdigest()}, {PACKED_INDEX} has {self._checksums[file.name]}"
            raise self._refusal(file, "is damaged", why)

    def _refusal(self, file: PackedFile, what: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.directory / file.file_name} {what}", why=why, fix=self._plan.command)


def _agreed(found: Mapping[str, object], plan: PackedPlan, path: Path) -> tuple[PackedPlan, dict[str, str]]:
    """Return the plan, with a head of its own where the index has one, and the checksums. Raises CheckpointError."""
    version = found.get("layout_version")
    if version != LAYOUT_VERSION:
        newer = type(version) is int and version > LAYOUT_VERSION
        raise CheckpointError(
            f"{path} is of {'a newer' if newer else 'another'} layout version",
            why=f"it is {show(version)}; this localllm reads {LAYOUT_VERSION}",
            fix=f"update localllm, or pack the model anew: {plan.command}" if newer else plan.command,
        )
    model = found.get("model")
    if plan.config.tie_word_embeddings and isinstance(model, dict) and model.get("tie_word_embeddings") is False:
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, tie_word_embeddings=False))
    checksums = _checksums(found.get("blocks"), plan)
    expected = plan.index(checksums)
    for key in (*expected, *found):
        if found.get(key) != expected.get(key):
            told, meant = (json.dumps(index.get(key))[:120] for index in (found, expected))
            what = f"{path} is not of this model in {plan.recipe.name}"
            raise CheckpointError(what, why=f"{show(key)} is {told}, not {meant}", fix=plan.command)
    return plan, checksums


def _checksums(blocks: object, plan: PackedPlan) -> dict[str, str]:
    """Return checksums by the block's name, as far as the index has them in place; "" for the others."""
    checksums = dict.fromkeys(plan.files, "")
    for name, entry in zip(plan.files, blocks if isinstance(blocks, list) else [], strict=False):
        checksum = entry.get("checksum") if isinstance(entry, dict) else None
        if isinstance(checksum, str) and CHECKSUM.fullmatch(checksum):
            checksums[name] = checksum
    return checksums
