"""Closed forms: the exact share of idle time of each schedule, where all tasks of a kind take the same time.

Written with N workers, M microbatches and S stages or slots; derivations are in docs/schedules.md. Transfers and
updates take no time. Results are fractions, so that comparison is exact.
"""

from __future__ import annotations

from fractions import Fraction

from rpfunc.checks import count_problems, shown
from rpfunc.errors import ScheduleError
from rpfunc.schedule.building import num_rounds
from rpfunc.schedule.round_robin import check_rounds


def gpipe(num_workers: int, num_microbatches: int) -> Fraction:
    """Returns the bubble of `gpipe`, (N - 1) / (M + N - 1), for any time of F and of B.

    Source: GPipe (arXiv 1811.06965), section 2.3.

    >>> gpipe(num_workers=4, num_microbatches=8)
    Fraction(3, 11)
    """
    return looped_bfs(num_workers, num_microbatches, num_workers)


def one_f_one_b(num_workers: int, num_microbatches: int) -> Fraction:
    """Returns the bubble of `one_f_one_b`, the same as `gpipe`'s. Source: Megatron-LM (arXiv 2104.04473), 2.2.1."""
    return looped_bfs(num_workers, num_microbatches, num_workers)


def interleaved(num_workers: int, num_microbatches: int, num_stages: int) -> Fraction:
    """Returns the bubble of `interleaved`, (N - 1) / (MS/N + N - 1) where M >= N, for any time of F and of B.

    `num_stages` is a multiple of `num_workers`. Source: Megatron-LM (arXiv 2104.04473), 2.2.2, for M a multiple of N;
    that it holds for all M >= N, and what it is for others: own.

    >>> interleaved(num_workers=4, num_microbatches=8, num_stages=8)
    Fraction(3, 19)
    """
    _check(num_workers, num_microbatches, num_stages)
    if num_stages % num_workers:
        raise ScheduleError(
            f"bubbles: {num_stages} stages on {num_workers} workers, needs as many for each worker; "
            f"{-(-num_stages // num_workers) * num_workers} stages would do"
        )
    return looped_bfs(num_workers, num_microbatches, num_stages)


def looped_bfs(num_workers: int, num_microbatches: int, num_stages: int) -> Fraction:
    """Returns the bubble of `looped_bfs`, that of `round_robin` with S forward stages for slots; any time of F and B.

    Source: breadth-first pipelines (arXiv 2211.05953), for N a divisor of S and of M; for the rest: own.

    >>> looped_bfs(num_workers=4, num_microbatches=8, num_stages=8) == interleaved(4, 8, 8)
    True
    """
    return round_robin(num_workers, num_microbatches, num_stages)


def zb_h1(num_workers: int, num_microbatches: int) -> Fraction:
    """Returns the bubble of `zb_h1`, (N - 1) / (3M + N - 1) where M >= N; F, I and W take the same time.

    Source: zero-bubble pipelines (arXiv 2401.10241), section 2; for fewer microbatches: own.

    >>> zb_h1(num_workers=4, num_microbatches=8)
    Fraction(1, 9)
    """
    _check(num_workers, num_microbatches)
    makespan = 3 * num_microbatches + num_workers - 1 + max(0, num_workers - num_microbatches)
    return _idle(num_workers, makespan, 3 * num_microbatches * num_workers)


def zb_v(num_workers: int, num_microbatches: int) -> Fraction:
    """Returns the bubble of `zb_v`, (N - 1) / (6M + N - 1) where M >= 2N - 1; F, I and W take the same time.

    Raises ScheduleError for fewer microbatches: no closed form is known. Source: zero-bubble pipelines
    (arXiv 2401.10241), section 6: no bubble but while the pipeline fills.

    >>> zb_v(num_workers=4, num_microbatches=8)
    Fraction(1, 17)
    """
    _check(num_workers, num_microbatches)
    if num_microbatches < 2 * num_workers - 1:
        raise ScheduleError(
            f"bubbles: no closed form of zb_v for {num_microbatches} microbatches on {num_workers} workers; "
            f"{2 * num_workers - 1} microbatches would do"
        )
    return _idle(num_workers, 6 * num_microbatches + num_workers - 1, 6 * num_microbatches * num_workers)


def round_robin(
    num_workers: int, num_microbatches: int, num_slots: int, round_size: int | None = None, num_iterations: int = 1
) -> Fraction:
    """Returns the bubble of `round_robin` where all slots take the same time.

    With one round N(N - 1) / (MS + N(N - 1)) if N divides S and M >= N, or M = N, as RoundPipe has it (arXiv
    2604.27085); the general form: own. The last slot must write gradients. Several iterations are asynchronous
    (staleness 1), and need S >= N and rounds of equal sizes: raises ScheduleError for others, of which no closed form
    is known. Synchronous iterations drain, and have the bubble of one.

    >>> round_robin(num_workers=4, num_microbatches=8, num_slots=12)
    Fraction(1, 9)
    >>> round_robin(num_workers=4, num_microbatches=8, num_slots=12, num_iterations=100)
    Fraction(1, 801)
    """
    _check(num_workers, num_microbatches, num_slots, num_iterations)
    check_rounds("bubbles", num_workers, round_size)
    rounds = 1 if round_size is None else num_rounds(num_microbatches, round_size)
    size, larger = divmod(num_microbatches, rounds)
    if num_iterations > 1:
        _check_joined(num_workers, num_slots, f"rounds of {size} and {size + 1} microbatches" if larger else None)
    if num_microbatches >= num_workers and num_slots >= num_workers:
        cards = num_slots * rounds * num_iterations
        last_worker = (cards - 1) % num_workers
        makespan = last_worker + size * -(-cards // num_workers) + -(-larger * num_slots // num_workers)
    else:
        makespan = (
            _last_start(num_workers, num_microbatches, num_slots, num_iterations) + num_slots - 1 + num_microbatches
        )
    return _idle(num_workers, makespan, num_microbatches * num_slots * num_iterations)


def round_robin_steady(num_workers: int, num_microbatches: int, num_slots: int) -> Fraction:
    """Returns the bubble of asynchronous `round_robin` over ever more iterations, in one round each, with S >= N.

    None where M >= N. With fewer microbatches workers wait for each other. Source: own.

    >>> round_robin_steady(num_workers=4, num_microbatches=8, num_slots=6)
    Fraction(0, 1)
    >>> round_robin_steady(num_workers=4, num_microbatches=3, num_slots=6)
    Fraction(1, 10)
    """
    _check(num_workers, num_microbatches, num_slots)
    _check_joined(num_workers, num_slots)
    if num_microbatches >= num_workers:
        return Fraction(0)
    two_iterations = _last_start(num_workers, num_microbatches, num_slots, 3)
    return _idle(num_workers, two_iterations, 2 * num_microbatches * num_slots)


def _last_start(num_workers: int, num_microbatches: int, num_slots: int, num_iterations: int) -> int:
    """Returns when the last iteration's first slot starts, if there are fewer microbatches, or slots, than workers."""
    join = num_slots - num_workers + num_microbatches  # the earliest start of an iteration after that of the one before
    drain = num_slots - 1 + num_microbatches  # the same after the second before, whose update it awaits
    pairs, odd = divmod(num_iterations - 1, 2)
    return pairs * max(2 * join, drain) + odd * join


def _idle(num_workers: int, makespan: int, busy: int) -> Fraction:
    return 1 - Fraction(busy, num_workers * makespan)


def _check(*counts: int) -> None:
    named = {str(place): count for place, count in enumerate(counts)}
    if count_problems(named):
        raise ScheduleError(f"bubbles: numbers {', '.join(map(shown, counts))} must be whole and at least 1")


def _check_joined(num_workers: int, num_slots: int, uneven: str | None = None) -> None:
    """Raises ScheduleError where no closed form is known for iterations that join."""
    problems = [] if uneven is None else [f"{uneven}, needs rounds of one size"]
    if num_slots < num_workers:
        problems.append(f"{num_slots} slots on {num_workers} workers, needs at least {num_workers}")
    if problems:
        raise ScheduleError.listing("bubbles: no closed form for iterations that join", problems)
