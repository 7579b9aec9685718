"""The head that a checkpoint brings to draft for its model: whether it is there, and its sizes. Needs no torch."""

from __future__ import annotations

from localllm.engine.placement import model_shape
from localllm.engine.planner import DraftShape
from localllm.engine.speculative.choice import Speculate
from localllm.errors import Fix, UsageError
from localllm.hub import ModelFiles
from localllm.models.architecture import ModelConfig
from localllm.models.checkpoints.checkpoint import Checkpoint
from localllm.quant.layouts import Sizes

HEAD_CTX = 1 << 14  # tokens that it attends to: then it begins anew with those that it has not read
MOST_STATES = 2048  # tokens before a draft that the head reads where it has read none: of 2,560 features, 20 MB in fp32
_FIRST_TENSOR = "mtp.fc.weight"  # by which a checkpoint shows that it brings one


def head_config(config: ModelConfig, files: ModelFiles | None, speculate: Speculate, device: str) -> ModelConfig | None:
    """Return the head that may draft for a model; None where it has none, or nobody wants it to. files: None where the
    model is not on this disk; then what its config promises counts.

    Raises UsageError where it was asked for by its name and there is none.
    """
    if speculate.who not in ("auto", "mtp") or not speculate.is_on:
        return None
    head, why = config.draft_head, "the model brings no head that drafts (MTP)"
    if head is not None and device != "cpu":
        head, why = None, "on a GPU, a head that drafts (MTP) does not run yet"
    if head is not None and files is not None:
        with Checkpoint.open(files.directory, head.stored) as checkpoint:
            if not checkpoint.has(_FIRST_TENSOR):
                head, why = None, f"its files have no tensor {_FIRST_TENSOR}: whoever made them left the head out"
    if head is None and speculate.who == "mtp":
        raise UsageError("--speculate mtp: nobody can draft", why=why, fix=Fix.flag("--speculate", "auto"))
    return head


def head_shape(config: ModelConfig, sizes: Sizes, dtype: str, name: str, device: str, kv: str) -> DraftShape:
    """Return what a plan needs to know of a head."""
    shape = model_shape(config, sizes, dtype, name, device, kv)
    return DraftShape(
        shape, min(config.longest_context, HEAD_CTX), 2 * MOST_STATES * 4 * config.hidden_size, shares_head=True
    )
