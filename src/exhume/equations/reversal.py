"""The states of a long recursion visited last to first, while few of them are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import comb
from typing import TypeVar

State = TypeVar("State")


def backwards(
    start: State, steps: int, slots: int, step: Callable[[int, State], State]
) -> Iterator[tuple[int, State]]:
    """Yield (t, state_t) for t = steps, ..., 0, where state_{t+1} = step(t, state_t).

    States are recomputed from checkpoints that are placed anew as memory falls free: with s slots and every step
    taken at most r times, a chain of C(s + r, s) states can be reversed, and the smallest such r is used
    (Griewank and Walther, Algorithm 799, 2000).

    Args:
        start: state_0.
        steps: number of steps T.
        slots: checkpoints held at once, `start` included, at least 1; one working state comes on top.
        step: one step; must not change its argument.
    """
    held = [(0, start)]
    for wanted in range(steps, -1, -1):
        while (t := held[-1][0]) < wanted:
            free = slots - len(held)
            stop = min(t + _stride(wanted - t + 1, free), wanted) if free > 0 else wanted
            held.append((stop, _advance(step, held[-1][1], t, stop)))
        yield held.pop()


def _advance(step: Callable[[int, State], State], state: State, begin: int, end: int) -> State:
    for t in range(begin, end):
        state = step(t, state)
    return state


def _stride(length: int, free: int) -> int:
    """Steps to the next checkpoint, when `length` states are left to visit and `free` slots are empty."""
    repeats = 1
    while comb(free + repeats + 1, repeats) < length:
        repeats += 1
    return comb(free + repeats, repeats - 1)
