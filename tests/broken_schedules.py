"""Every schedule with a fault; those of this file hold more than a worker may, or have several kinds at once."""

from broken_orders import BROKEN_ORDERS
from broken_schedule import ONE, TWO, broken, work
from broken_tasks import BROKEN_TASKS

BROKEN = [
    *BROKEN_TASKS,
    *BROKEN_ORDERS,
    broken(
        "bound weights on two workers",
        "0F0 0B0\n0F1 0B1",
        work(ONE, 2),
        "schedule: stage 0 stands on 2 workers, bound weights stay on one: 0F0 on worker 0, 0F1 on worker 1",
        "worker 0: >0F0<  0B0",
        "worker 1: >0F1<  0B1",
        bound=True,
    ),
    broken(
        "bound weights, forward and backward apart",
        "0F0 1F0\n1B0 0B0",
        work(TWO, 1),
        "schedule: 2 problems",
        "  - stage 0 stands on 2 workers, bound weights stay on one: 0F0 on worker 0, 0B0 on worker 1",
        "  - stage 1 stands on 2 workers, bound weights stay on one: 1F0 on worker 0, 1B0 on worker 1",
        "worker 0: >0F0< >1F0<",
        "worker 1: >1B0< >0B0<",
        bound=True,
    ),
    broken(
        "too many activations",
        "0F0 0F1 0F2 0B0 0B1 0B2",
        work(ONE, 3),
        "schedule: worker 0 holds 2 activations at 0F1, 3 at 0F2; in_flight is 1",
        "worker 0:  0F0  >0F1< >0F2<  0B0   0B1   0B2",
        in_flight=1,
    ),
    broken(
        "too many activations between I and W",
        "0F0 0F1\n0I0 0I1 0W0 0W1",
        work(ONE, 2),
        "schedule: worker 1 holds 2 activations at 0I1; in_flight is 1",
        "worker 0:  0F0   0F1",
        "worker 1:  0I0  >0I1<  0W0   0W1",
        in_flight=1,
    ),
    broken(
        "everything at once",
        "0B0 0F0 0F1 0F1\n0B1 0I0 5F0",
        work(ONE, 3),
        "schedule: 7 problems",
        "  - 0F2 is missing",
        "  - 0B2 is missing",
        "  - 0F1 stands 2 times: worker 0 place 2, worker 0 place 3",
        "  - 0I0 stands beside 0B0: a backward pass is one task, B, or two, I and W",
        "  - 5F0 is no part of the work: its stages are F 0, B 0",
        "  - worker 0 has 0B0 (place 0) before 0F0 (place 1): 0B0 needs 0F0",
        "  - stage 0 stands on 2 workers, bound weights stay on one: 0B0 on worker 0, 0B1 on worker 1",
        "worker 0: >0B0< >0F0< >0F1< >0F1<",
        "worker 1: >0B1< >0I0< >5F0<",
        bound=True,
        in_flight=1,
    ),
]
