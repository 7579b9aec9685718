"""The recurrent states of a sequence: what layers keep of it that have no keys and values.

A state cannot be cut back. So a forward of a few tokens changes none: it leaves behind what goes into the layers, and
the next one takes in what has become certain. A longer forward changes the state in place; where it fails, the sequence
begins anew. Snapshots are taken on the way, at borders of pages, so that other sequences can begin there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from localllm.kernels.sizes import PAGE_TOKENS
from localllm.kernels.state_shapes import STEP_ROWS, StatePlace, StateShape

HOST = torch.device("cpu")


class LayerBytes:
    """So many bytes of each layer, each on its device, all layers of one device one after the other."""

    def __init__(self, homes: Sequence[torch.device], sizes: Sequence[int]) -> None:
        """homes, sizes: the device of each layer, and its bytes. Raises what torch does where there is no memory."""
        self.homes, self.sizes = tuple(homes), tuple(sizes)
        totals: Counter[torch.device] = Counter()
        begins = []
        for device, size in zip(homes, sizes, strict=True):
            begins.append(totals[device])
            totals[device] += size
        self.begins = tuple(begins)  # of each layer, in bytes, among those of its device
        with torch.inference_mode(False):
            self._parts = {
                device: torch.zeros(total, dtype=torch.uint8, device=device) for device, total in totals.items()
            }

    @property
    def nbytes(self) -> int:
        """The bytes of all layers."""
        return sum(self.sizes)

    def layer(self, number: int) -> Tensor:
        """uint8 [bytes of the layer]."""
        begin = self.begins[number]
        return self._parts[self.homes[number]][begin : begin + self.sizes[number]]

    def address(self, device: torch.device) -> int:
        """Return where the first of the device's layers begins; they lie one after the other."""
        return self._parts[device].data_ptr()

    def copy_from(self, other: LayerBytes) -> None:
        for device, part in self._parts.items():
            part.copy_(other._parts[device])

    def clear(self) -> None:
        for part in self._parts.values():
            part.zero_()

    def move(self, homes: Sequence[torch.device]) -> None:
        """Move each layer to these devices. Where there is no memory, raise what torch does and move nothing."""
        if self.homes == tuple(homes):
            return
        other = LayerBytes(homes, self.sizes)
        for number in range(len(homes)):
            other.layer(number).copy_(self.layer(number))
        self.homes, self.begins, self._parts = other.homes, other.begins, other._parts

    def payload(self) -> Tensor:
        """Return all layers in order on the host, uint8 [nbytes]: these very bytes where they are there already."""
        if set(self._parts) == {HOST}:
            return self._parts[HOST]
        return torch.cat([self.layer(number).to(HOST) for number in range(len(self.homes))])


class SequenceState:
    """The states of one sequence.

    committed: tokens before this position change the state of a layer in place, in the forward that was prepared.
    wanted: the borders of pages at which snapshots are to be taken on the way.
    follows: whether one is also taken at each border that is passed, in the place of the last of that kind.
    snapshots: those that were taken, by their position.
    """

    def __init__(self, shapes: Sequence[StateShape], homes: Sequence[torch.device]) -> None:
        """shapes, homes: of each layer. Raises what torch does where there is no memory."""
        self._shapes = tuple(shapes)
        self._snapshot_sizes = [shape.snapshot_bytes for shape in shapes]
        self.states = LayerBytes(homes, [shape.state_bytes for shape in shapes])
        self.committed = 0
        self.wanted: set[int] = set()
        self.follows = False
        self.snapshots: dict[int, LayerBytes] = {}
        self.due: dict[int, LayerBytes] = {}  # that are taken by the forwards up to one that counts
        self._followed: int | None = None  # the position of the last one at a border that was just passed
        self._length = 0  # tokens that were computed and count
        self._settled = 0  # of these, those that the states hold in any case: they cannot be taken back
        self._is_torn = False  # a forward has begun to change states in place

    def watch(self, borders: Iterable[int]) -> None:
        """Take snapshots at these borders of pages on the way, and at the last one that is passed."""
        self.wanted = {border for border in borders if border > self._length}
        self.follows = True

    def prepare(self, length: int, end: int) -> None:
        """Make room for a forward that computes the tokens from `length` to `end`. Raises what torch does where there
        is no memory."""
        assert not self._is_torn and length == self._length, "the states are those of the sequence's tokens"
        changes = end - length > STEP_ROWS
        self.committed = end if changes else length
        for position in self._borders(self._settled, self.committed):
            self.due[position] = self._room(position)
        self._is_torn, self._settled = changes, self.committed if not changes else self._settled

    def _borders(self, begin: int, end: int) -> list[int]:
        """Return at which borders behind `begin`, `end` included, a snapshot is to be taken."""
        borders = {position for position in self.wanted if begin < position <= end}
        last = end // PAGE_TOKENS * PAGE_TOKENS
        return sorted(borders | ({last} if self.follows and last > begin else set()))

    def _room(self, position: int) -> LayerBytes:
        """Return room for a snapshot: that of the last one at a border that was passed, where nobody wants that."""
        if position in self.wanted:
            return self.new_snapshot()
        old, self._followed = self._followed, position
        room = None if old is None else self.snapshots.pop(old, None)
        return self.new_snapshot() if room is None else room

    def new_snapshot(self) -> LayerBytes:
        return LayerBytes(self.states.homes, self._snapshot_sizes)

    def place(self, layer: int) -> StatePlace:
        """Return where a layer's part begins, among those of its device."""
        own = self.states.homes[layer]
        before = zip(self.states.homes[:layer], self._snapshot_sizes, strict=False)
        return StatePlace(self.states.begins[layer], sum(size for home, size in before if home == own))

    def advance(self, length: int) -> None:
        """Let what was computed count, up to so many tokens."""
        self.snapshots |= self.due
        self.due, self._length = {}, length
        if self._is_torn:
            self._is_torn, self._settled = False, self.committed

    @property
    def is_torn(self) -> bool:
        """Whether a forward that changes states in place was begun and has not ended."""
        return self._is_torn

    def trim(self, length: int) -> int:
        """Become the states of the first `length` tokens, or begin anew where they cannot. Returns of how many they
        are."""
        if self._is_torn or length < self._settled:
            self.states.clear()
            self._settled, self._is_torn, self.due, length = 0, False, {}, 0
        self._length = length
        self.snapshots = {position: each for position, each in self.snapshots.items() if position <= length}
        return length

    def take_from(self, other: SequenceState) -> None:
        """Become a copy of another sequence's states."""
        self.states.copy_from(other.states)
        self._length, self._settled = other._length, other._settled

    def begin_at(self, snapshot: Tensor, position: int) -> None:
        """Begin with a snapshot, uint8 as `LayerBytes.payload` returns it, of the tokens before `position`."""
        from localllm.kernels.layer_state import LayerState

        parts = torch.split(snapshot, self._snapshot_sizes)
        for number, (shape, part) in enumerate(zip(self._shapes, parts, strict=True)):
            state = self.states.layer(number)
            LayerState(shape, state).read_snapshot(part.to(state.device), position)
        self._length = self._settled = position

    @property
    def nbytes(self) -> int:
        """Bytes of the states and of the snapshots that are here."""
        return sum(each.nbytes for each in (self.states, *self.snapshots.values(), *self.due.values()))

    def move(self, homes: Sequence[torch.device]) -> None:
        """Move the states of each layer to these devices, and snapshots with them."""
        for each in (self.states, *self.snapshots.values(), *self.due.values()):
            each.move(homes)

    def take_snapshots(self, *, with_last: bool) -> dict[int, LayerBytes]:
        """Give away the snapshots that are wanted, by their position. with_last: and the last one at a border that was
        passed, which a later one would take the place of."""
        chosen = [position for position in self.snapshots if with_last or position in self.wanted]
        return {position: self.snapshots.pop(position) for position in chosen}
