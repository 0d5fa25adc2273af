"""Schedules whose tasks are right and stand in the wrong order, on one worker or in a circle over several."""

from broken_schedule import ONE, TURN, TWO, broken, work

BROKEN_ORDERS = [
    broken(
        "backward before its forward",
        "0F0 0B0\n1B0 1F0",
        work(TWO, 1),
        "schedule: worker 1 has 1B0 (place 0) before 1F0 (place 1): 1B0 needs 1F0",
        "worker 0:  0F0   0B0",
        "worker 1: >1B0< >1F0<",
    ),
    broken(
        "forward before the stage before",
        "1F0 0F0 1B0 0B0",
        work(TWO, 1),
        "schedule: worker 0 has 1F0 (place 0) before 0F0 (place 1): 1F0 needs 0F0",
        "worker 0: >1F0< >0F0<  1B0   0B0",
    ),
    broken(
        "backward before the turn",
        "0F0 1B0 1X0 0B0",
        work(TURN, 1),
        "schedule: worker 0 has 1B0 (place 1) before 1X0 (place 2): 1B0 needs 1X0",
        "worker 0:  0F0  >1B0< >1X0<  0B0",
    ),
    broken(
        "W before I",
        "0F0 0W0 0I0",
        work(ONE, 1),
        "schedule: worker 0 has 0W0 (place 1) before 0I0 (place 2): 0W0 needs 0I0",
        "worker 0:  0F0  >0W0< >0I0<",
    ),
    broken(
        "B before a halved pass's I",
        "0F0 1F0 0B0 1I0 1W0",
        work(TWO, 1),
        "schedule: worker 0 has 0B0 (place 2) before 1I0 (place 3): 0B0 needs 1I0",
        "worker 0:  0F0   1F0  >0B0< >1I0<  1W0",
    ),
    broken(
        "gradients out of order",
        "0X0 0X2 0X1",
        work("X0:3", 3),
        "schedule: worker 0 has 0X2 (place 1) before 0X1 (place 2): gradients are summed in microbatch order",
        "worker 0:  0X0  >0X2< >0X1<",
    ),
    broken(
        "weight gradients out of order",
        "0F0 0F1 0I0 0I1 0W1 0W0",
        work(ONE, 2),
        "schedule: worker 0 has 0W1 (place 4) before 0W0 (place 5): gradients are summed in microbatch order",
        "worker 0:  0F0   0F1   0I0   0I1  >0W1< >0W0<",
    ),
    broken(
        "gradients out of order in the second block",
        "0X0 0X1 0X3 0X2",
        work("X0:3", 4, num_blocks=2),
        "schedule: worker 0 has 0X3 (place 2) before 0X2 (place 3): gradients are summed in microbatch order",
        "worker 0:  0X0   0X1  >0X3< >0X2<",
    ),
    broken(
        "two workers wait for each other",
        "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1",
        work(TWO, 2),
        "schedule: deadlock: worker 0 waits at 0B0 for 1B0, which stands on worker 1 after 1F1; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 0B0",
        "worker 0:  0F0  >0B0< >0F1<  0B1",
        "worker 1: >1F1<  1F0  >1B0<  1B1",
    ),
    broken(
        "three workers wait for each other",
        "1F0 0F1\n1F1 0F2\n1F2 0F0\n1B0 1B1 1B2 0B0 0B1 0B2",
        work(TWO, 3),
        "schedule: deadlock: worker 0 waits at 1F0 for 0F0, which stands on worker 2 after 1F2; "
        "worker 2 waits at 1F2 for 0F2, which stands on worker 1 after 1F1; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 1F0",
        "worker 0: >1F0< >0F1<",
        "worker 1: >1F1< >0F2<",
        "worker 2: >1F2< >0F0<",
        "worker 3:  1B0   1B1   1B2   0B0   0B1   0B2",
    ),
    broken(
        "many workers wait for each other",
        "\n".join(f"1F{m} 0F{(m + 1) % 10}" for m in range(10)) + "\n" + " ".join(f"1B{m} 0B{m}" for m in range(10)),
        work(TWO, 10),
        "schedule: deadlock: worker 0 waits at 1F0 for 0F0, which stands on worker 9 after 1F9; "
        "worker 9 waits at 1F9 for 0F9, which stands on worker 8 after 1F8; "
        "worker 8 waits at 1F8 for 0F8, which stands on worker 7 after 1F7; "
        "worker 7 waits at 1F7 for 0F7, which stands on worker 6 after 1F6; "
        "worker 6 waits at 1F6 for 0F6, which stands on worker 5 after 1F5; "
        "worker 5 waits at 1F5 for 0F5, which stands on worker 4 after 1F4; "
        "worker 4 waits at 1F4 for 0F4, which stands on worker 3 after 1F3; "
        "and so on over 2 more; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 1F0",
        "worker 0: >1F0< >0F1<",
        "worker 3: >1F3< >0F4<",
        "worker 4: >1F4< >0F5<",
        "worker 5: >1F5< >0F6<",
        "worker 6: >1F6< >0F7<",
        "worker 7: >1F7< >0F8<",
        "worker 8: >1F8< >0F9<",
        "worker 9: >1F9< >0F0<",
    ),
    broken(
        "two cycles, the shorter is told",
        "1X1 0F0\n1X2 0F1\n1X0 0F2\n0B0 0B1 0B2",
        work("F0:1 X1:2 B0:1", 3),
        "schedule: deadlock: worker 0 waits at 1X1 for 0F1, which stands on worker 1 after 1X2; "
        "worker 1 waits at 1X2 for 1X1, which comes next on worker 0",
        "worker 0: >1X1<  0F0",
        "worker 1: >1X2< >0F1<",
        "worker 2:  1X0   0F2",
        "worker 3:  0B0   0B1   0B2",
    ),
    broken(
        "two deadlocks",
        "1F0 0F1\n1F1 0F0\n1F2 0F3\n1F3 0F2\n1B0 1B1 1B2 1B3 0B0 0B1 0B2 0B3",
        work(TWO, 4),
        "schedule: 2 problems",
        "  - deadlock: worker 0 waits at 1F0 for 0F0, which stands on worker 1 after 1F1; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 1F0",
        "  - deadlock: worker 2 waits at 1F2 for 0F2, which stands on worker 3 after 1F3; "
        "worker 3 waits at 1F3 for 0F3, which stands on worker 2 after 1F2",
        "worker 0: >1F0< >0F1<",
        "worker 1: >1F1< >0F0<",
        "worker 2: >1F2< >0F3<",
        "worker 3: >1F3< >0F2<",
        "worker 4:  1B0   1B1   1B2   1B3   0B0   0B1   0B2   0B3",
    ),
    broken(
        "order and deadlock at once",
        "0F0 0B0 0F1 0B1\n1F1 1B0 1F0 1B1",
        work(TWO, 2),
        "schedule: 2 problems",
        "  - worker 1 has 1B0 (place 1) before 1F0 (place 2): 1B0 needs 1F0",
        "  - deadlock: worker 0 waits at 0B0 for 1B0, which stands on worker 1 after 1F1; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 0B0",
        "worker 0:  0F0  >0B0< >0F1<  0B1",
        "worker 1: >1F1< >1B0< >1F0<  1B1",
    ),
    broken(
        "a deadlock though tasks are missing",
        "0F0 0B0 0F1\n1F1 1F0 1B0 1B1",
        work(TWO, 2),
        "schedule: 2 problems",
        "  - 0B1 is missing",
        "  - deadlock: worker 0 waits at 0B0 for 1B0, which stands on worker 1 after 1F1; "
        "worker 1 waits at 1F1 for 0F1, which stands on worker 0 after 0B0",
        "worker 0:  0F0  >0B0< >0F1<",
        "worker 1: >1F1<  1F0  >1B0<  1B1",
    ),
    broken(
        "the next iteration before an update",
        "0F0 0F1 0B0 0B1",
        work(ONE, 1, num_iterations=2),
        "schedule: worker 0 has 0F1 (place 1) before 0B0 (place 2): "
        "0F1 awaits the update of iteration 0, which needs 0B0",
        "worker 0:  0F0  >0F1< >0B0<  0B1",
    ),
    broken(
        "deadlock over an update",
        "0F0 0F1 1F1\n1F0 1B0 1B1 0B0 0B1",
        work(TWO, 1, num_iterations=2),
        "schedule: deadlock: worker 0 waits at 0F1 for the update of iteration 0; "
        "the update of iteration 0 waits for 0B0, which stands on worker 1 after 1B1; "
        "worker 1 waits at 1B1 for 1F1, which stands on worker 0 after 0F1",
        "worker 0:  0F0  >0F1< >1F1<",
        "worker 1:  1F0   1B0  >1B1< >0B0<  0B1",
    ),
    broken(
        "one step stale, two ahead",
        "0F0 0F1 0F2 0B0 0B1 0B2",
        work(ONE, 1, num_iterations=3, staleness=1),
        "schedule: worker 0 has 0F2 (place 2) before 0B0 (place 3): "
        "0F2 awaits the update of iteration 0, which needs 0B0",
        "worker 0:  0F0   0F1  >0F2< >0B0<  0B1   0B2",
    ),
    broken(
        "one step stale, into a buffer that is not taken",
        "0F0 0F1 0B1 0B0",
        work(ONE, 1, num_iterations=2, staleness=1),
        "schedule: worker 0 has 0B1 (place 2) before 0B0 (place 3): "
        "the gradients of iteration 0 go into the same buffer",
        "worker 0:  0F0   0F1  >0B1< >0B0<",
    ),
    broken(
        "deadlock over a buffer",
        "0F0 1F0 0F1 1F1 1B1\n0B1 1B0\n0B0",
        work(TWO, 1, num_iterations=2, staleness=1),
        "schedule: deadlock: worker 0 waits at 1B1 for 1B0, which stands on worker 1 after 0B1; "
        "worker 1 waits at 0B1 for 1B1, which comes next on worker 0",
        "worker 0:  0F0   1F0   0F1   1F1  >1B1<",
        "worker 1: >0B1< >1B0<",
        "worker 2:  0B0",
    ),
]
