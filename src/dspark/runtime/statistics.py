"""What speculation gained: tokens per step, and how often each draft position was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class WorkerStats:
    """Counts over the steps of a worker. A *request step* is one step of one request.

    tokens: emitted by request steps, the first token of each request (which comes from its prefill) not included.
    proposed[k], accepted[k]: how often draft k was verified, and how often it and all before it were right.
    """

    steps: int = 0
    request_steps: int = 0
    tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_step(self, verify_lens: Sequence[int], correct: Sequence[int], emitted: Sequence[int]) -> None:
        """One step; each argument has an entry per request that took part."""
        self.steps += 1
        self.request_steps += len(emitted)
        self.tokens += sum(emitted)
        missing = max(verify_lens, default=0) - 1 - len(self.proposed)
        for counts in (self.proposed, self.accepted):
            counts.extend([0] * missing)
        for length, right in zip(verify_lens, correct, strict=True):
            for position in range(length - 1):
                self.proposed[position] += 1
                self.accepted[position] += position < right

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per request step; 1.0 is plain decoding, 0.0 where there was no step."""
        return self.tokens / self.request_steps if self.request_steps else 0.0

    @property
    def acceptance(self) -> list[float]:
        """For each draft position, the share of verified drafts that were kept; 0.0 where none was verified."""
        return [right / tried if tried else 0.0 for right, tried in zip(self.accepted, self.proposed, strict=True)]
