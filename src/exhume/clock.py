"""Wall time, budget and progress of one run."""

from __future__ import annotations

import time
from collections.abc import Callable

Observer = Callable[[str, float], bool]
"""Called with what is being done, in words, and the share of the budget used; True ends the run early."""


class Clock:
    """Wall time, budget and progress of one run."""

    def __init__(self, budget: float | None, observer: Observer | None, parent: Clock | None = None) -> None:
        self.start, self.budget, self.observer = time.perf_counter(), budget, observer
        self.stopped, self.parent = False, parent

    def part(self, share: float) -> Clock:
        """A clock for a part of the work, whose budget is a share of what is left."""
        left = None if self.budget is None else share * max(self.budget - self.elapsed, 0.0)
        return Clock(left, None, self)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    @property
    def expired(self) -> bool:
        """Whether the budget is spent, or the observer ended the run."""
        spent = self.budget is not None and self.elapsed > self.budget
        return self.stopped or spent or (self.parent is not None and self.parent.expired)

    def tick(self, doing: str, loss: float | None) -> bool:
        """Tell the observer; return True when the budget has run out."""
        if self.parent is not None:
            self.parent.tick(doing, loss)
        if self.observer is not None:
            words = doing if loss is None else f"{doing}, loss {loss:.3g}"
            share = 0.0 if self.budget is None else min(self.elapsed / self.budget, 1.0)
            self.stopped = self.observer(words, share) or self.stopped
        return self.expired
