"""What a plan knows of a machine: memory sizes and measured rates. A machine without a GPU has no card."""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.offload.planner.calibration import Corrections

OPERATORS = 24  # launches of a block: the device is given one operator after the other
KERNELS = 4.5  # of a block, in a step of one token: six of attention, three of an MLP
SPLIT_KERNELS = 6.5  # where the columns of each matrix are shared out, as in graphs of more rows


@dataclass(frozen=True)
class Held:
    """What this process holds of a model that is placed anew, or of one that would make room.

    host_bytes: of the host's memory. graph_bytes: of a GPU's, by graphs; what tensors have there, torch tells.
    """

    host_bytes: int = 0
    graph_bytes: int = 0


NOTHING = Held()


@dataclass(frozen=True)
class Memory:
    """The host's memory.

    ram_bytes: the most that the process may hold.
    program_bytes: held without a model.
    most_bytes: the most that it could hold now.
    total_bytes: of the machine.
    """

    ram_bytes: int
    program_bytes: int
    most_bytes: int
    total_bytes: int = 0


@dataclass(frozen=True)
class CardMemory:
    """A GPU's memory.

    vram_bytes: the most that this process may hold.
    context_bytes: held there without a model.
    workspace_bytes: taken by a matrix product in passing.
    most_bytes: the most that it could hold now.
    total_bytes: of the card.
    graph_node_bytes: taken by the driver for each launch of a graph; 0 where nothing is captured.
    """

    vram_bytes: int
    context_bytes: int
    workspace_bytes: int
    most_bytes: int
    total_bytes: int
    graph_node_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """The host's rates in 1e9 a second: bytes of one token's matrices and of the disk, operations of many tokens."""

    matrix_gbs: float
    compute_gops: float
    disk_gbs: float
    cached_share: float = 0.0  # of what is streamed, that the page cache holds
    is_measured: bool = True  # typical rates serve where nothing has to be chosen


@dataclass(frozen=True)
class CardRates:
    """A GPU's rates in 1e9 a second: bytes of one token's matrices, operations of many, bytes over the link.

    launch_s: from one launch to the next.
    hop_s: to let the host compute one block, there and back.
    launches: of a block, in a step of a few tokens.
    is_fused: launches are our kernels in a graph, each of which begins when the one before has ended; operators are
        given to the device while it computes.
    """

    matrix_gbs: float
    compute_gops: float
    link_gbs: float
    launch_s: float
    hop_s: float
    launches: float = OPERATORS
    is_fused: bool = False


@dataclass(frozen=True)
class Card:
    memory: CardMemory
    rates: CardRates


@dataclass(frozen=True)
class Machine:
    """corrections: of earlier runs with these weights. plan_flags: with which `plan` sees this machine, beside caps."""

    memory: Memory
    rates: Rates
    card: Card | None = None
    corrections: Corrections = field(default_factory=Corrections)
    plan_flags: tuple[str, ...] = ()

    @property
    def is_other(self) -> bool:
        """Whether this is not the machine that plans; `--ram` is then its memory, not a cap."""
        return "--gpu" in self.plan_flags

    @property
    def cpu_flags(self) -> tuple[str, str]:
        """The flag with which the CPU of this machine computes alone."""
        return ("--gpu", "none") if self.is_other else ("--device", "cpu")

    @property
    def fast_memory(self) -> Memory | CardMemory:
        """The memory that blocks are computed fastest from."""
        return self.memory if self.card is None else self.card.memory
