"""Steps in which nobody looks for guesses, since none was worth it: looking itself takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.engine.drawing import Scheduled
from localllm.engine.sequence import Sequence as Running

# Looking for guesses takes no more than this share of the time then. A text that changes is noticed after so many
# tokens.
_LOOKING_SHARE, _LONGEST = 0.005, 256
# Where a device begins steps before the last one's token is known, which it does in a rest alone.
_LEAST_ON_DEVICE = 16


def rest_steps(looking_s: float, step_s: float, *, begins_ahead: bool) -> int:
    """How long a rest is, by what looking and a step took."""
    least = _LEAST_ON_DEVICE if begins_ahead else 0
    return min(_LONGEST, max(least, int(looking_s / (_LOOKING_SHARE * step_s))))


@dataclass
class Rest:
    """num_left: steps of these sequences that are yet to come. lengths: of them, before it."""

    sequences: Sequence[Running]
    num_left: int
    lengths: Sequence[int] = field(init=False)
    num_steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.lengths = [len(sequence.token_ids) for sequence in self.sequences]

    def takes(self, scheduled: Scheduled) -> bool:
        """Whether the step is one more of it."""
        if not self.num_left or len(scheduled) != len(self.sequences):
            return False
        for own, (sequence, chunk) in zip(self.sequences, scheduled, strict=True):
            if sequence is not own or chunk.num_tokens != 1:
                return False
        self.num_left -= 1
        return True

    def learn(self, step_s: float) -> None:
        """From a step that it took."""
        self.num_steps += 1
        self.seconds += step_s
