"""Changes of all experts of a layer, which PEFT stores as one pair (`target_parameters`)."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.errors import AdapterError, show
from localllm.models.adapters.peft_config import PeftConfig
from localllm.models.adapters.stored import CHOOSE_ANOTHER, LoraPair, WeightDelta
from localllm.models.layout import Experts, Matrix


def expert_deltas(
    pair: LoraPair, experts: Experts, peft: PeftConfig, module: str, matrix_name: str | None = None
) -> Iterator[WeightDelta]:
    """Yield what a pair adds to a matrix of each expert. Raises AdapterError.

    pair: a [experts * rank, K], an expert after another; b [N, rank * experts], the experts' columns in turns.
    module: the experts, or their matrix where that is a module of its own.
    matrix_name: None where the shape tells which it is: of what comes into a layer and what goes out, no two are alike.
    """
    matrix = _matrix(pair, experts, matrix_name)
    count, rank = experts.num_experts, pair.rank // experts.num_experts
    key = f"{module}.{matrix.name}" if matrix_name is None else module
    peft.require_rank(pair, rank, key)
    scale = peft.scale_of(key, rank)
    a, b = pair.read()
    rows = b.view(-1, rank, count).permute(2, 0, 1).contiguous()  # [experts, N, rank]
    for index, (own_a, own_b) in enumerate(zip(a.view(count, rank, -1), rows, strict=True)):
        yield WeightDelta(f"{experts.stored}.{index}.{matrix.name}", pair.b.name, own_a, own_b, scale)


def _matrix(pair: LoraPair, experts: Experts, name: str | None) -> Matrix:
    N, K = pair.b.shape[0], pair.a.shape[1]
    matrices = experts.matrices(0)
    for matrix in matrices:
        is_meant = name is None or matrix.name == name
        if is_meant and (N, K) == (matrix.out_features, matrix.in_features) and not pair.rank % experts.num_experts:
            return matrix
    known = " and ".join(f"{each.name} of {each.out_features} x {each.in_features}" for each in matrices)
    why = f"{show(pair.a.name)} is {list(pair.a.shape)} and {show(pair.b.name)} is {list(pair.b.shape)};"
    why += f" the model has {experts.num_experts} experts with {known}"
    raise AdapterError(f"{pair.place}: {show(pair.module)} fits no matrix of the experts", why=why, fix=CHOOSE_ANOTHER)
