"""Which cores the worker gets, on machines of every kind."""

from collections.abc import Sequence

import pytest

from lightning_zenflow.worker.cores import WorkerCores, worker_cores
from lightning_zenflow.worker.topology import Place, Quota

Request = str | int | Sequence[int]


def alone(n: int) -> dict[int, tuple[int, ...]]:
    """Physical cores of one logical core each."""
    return {core: (core,) for core in range(n)}


def pairs(n_physical: int) -> dict[int, tuple[int, ...]]:
    """Logical cores i and i + n_physical share physical core i, as Linux numbers them on most machines."""
    both = [(i, i + n_physical) for i in range(n_physical)]
    return {core: both[core % n_physical] for core in range(2 * n_physical)}


def place(allowed: Sequence[int], gpu_cores: Sequence[int] = (), quotas: Sequence[Quota] = ()) -> Place:
    return Place(host="here", allowed=tuple(allowed), gpu_cores=tuple(gpu_cores), quotas=tuple(quotas))


def limited(cpus: float, group: int = 1) -> Place:
    """One of 16 cores, whose control group has a limit on CPU time."""
    return place(range(16), quotas=[Quota(cpus=cpus, group=group), Quota(cpus=12, group=9)])


def choose(
    request: Request, siblings: dict[int, tuple[int, ...]], places: Sequence[Place], reserved: float
) -> list[WorkerCores]:
    """The choice of each rank."""
    return [
        worker_cores(request, places=places, index=index, siblings=siblings, reserved_share=reserved)
        for index in range(len(places))
    ]


NEIGHBOURS = {core: (core // 2 * 2, core // 2 * 2 + 1) for core in range(8)}
# Two sockets: physical cores 0-7 and 8-15, 16-31 are their second logical cores.
SOCKETS = pairs(16)
FIRST = (*range(8), *range(16, 24))
SECOND = (*range(8, 16), *range(24, 32))
FOUR_GPUS = [place(range(32), near) for near in (FIRST, FIRST, SECOND, SECOND)]


@pytest.mark.parametrize(
    ("request_", "siblings", "places", "reserved", "expected"),
    [
        # The trainer keeps its share.
        ("auto", alone(1), [place(range(1))], 0.5, [[0]]),
        ("auto", alone(2), [place(range(2))], 0.0, [[0, 1]]),
        ("auto", alone(2), [place(range(2))], 1.0, [[1]]),
        ("auto", alone(8), [place(range(8))], 0.25, [[2, 3, 4, 5, 6, 7]]),
        # One logical core of each physical core.
        ("auto", pairs(4), [place(range(8))], 0.5, [[2, 3]]),
        ("auto", NEIGHBOURS, [place(range(8))], 0.5, [[4, 6]]),
        ("auto", pairs(4), [place([5, 6, 7])], 0.0, [[5, 6, 7]]),
        # Ranks share no physical core while there are enough.
        ("auto", pairs(8), [place(range(16))] * 3, 0.0, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        ("auto", alone(2), [place(range(2))] * 4, 0.5, [[0], [1], [0], [1]]),
        # Numbers and lists.
        (2, alone(8), [place(range(8))] * 2, 0.5, [[2, 3], [6, 7]]),
        (8, alone(8), [place(range(8))] * 2, 0.5, [list(range(8))] * 2),
        ([3, 1], alone(4), [place(range(4))], 0.5, [[3, 1]]),
        ([0, 2, 4, 6], alone(8), [place(range(8))] * 2, 0.5, [[0, 2], [4, 6]]),
        # One core in turn, rather than all of them for every rank.
        ([0, 2], alone(8), [place(range(8))] * 3, 0.5, [[0], [2], [0]]),
        # Ranks share the cores of their GPU's socket.
        ("auto", SOCKETS, FOUR_GPUS, 0.0, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("auto", SOCKETS, FOUR_GPUS, 0.5, [[2, 3], [6, 7], [10, 11], [14, 15]]),
        ("auto", SOCKETS, [FOUR_GPUS[i] for i in (2, 0, 3)], 0.0, [[*range(8, 12)], [*range(8)], [*range(12, 16)]]),
        ("auto", SOCKETS, [place(range(32), SECOND)], 0.0, [list(range(8, 16))]),
        # The socket is not known, allowed in part, or not allowed: who has the same candidates shares them.
        ("auto", SOCKETS, [place(range(32))], 0.0, [list(range(16))]),
        ("auto", SOCKETS, [place(range(6, 11), FIRST)], 0.0, [[6, 7]]),
        ("auto", SOCKETS, [place(range(8), p.gpu_cores) for p in FOUR_GPUS], 0.0, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # As DeepSpeed's --bind_cores_to_rank does: what is bound already is not divided again.
        ("auto", SOCKETS, [place([4 * i, 4 * i + 1], FIRST) for i in range(2)], 0.0, [[0, 1], [4, 5]]),
        # A number reaches beyond the share: physical cores of the socket, of the other one, then second logical cores.
        (9, SOCKETS, FOUR_GPUS[1:2], 0.0, [[*range(8), 15]]),
        (17, SOCKETS, FOUR_GPUS[1:2], 0.0, [[*range(16), 23]]),
        # Control groups; ranks of one group share its limit.
        ("auto", alone(16), [limited(3.5)], 0.0, [[13, 14, 15]]),
        ("auto", alone(16), [limited(4)] * 2, 0.0, [[6, 7], [14, 15]]),
        ("auto", alone(16), [limited(4, 1), limited(4, 2)], 0.0, [[*range(4, 8)], [*range(12, 16)]]),
        ("auto", alone(16), [limited(0.5)], 0.0, [[15]]),
        (3, alone(16), [limited(2)], 0.0, [[13, 14, 15]]),
    ],
)  # fmt: skip
def test_cores(
    request_: Request,
    siblings: dict[int, tuple[int, ...]],
    places: Sequence[Place],
    reserved: float,
    expected: list[list[int]],
) -> None:
    assert [list(chosen.cores) for chosen in choose(request_, siblings, places, reserved)] == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "request_", "expected"),
    [(2, 1, "auto", 1), (1, 1, "auto", 1), (16, 1, "auto", 8), (16, 2, "auto", 4), (4, 1, 3, 1), (4, 1, 4, 1)],
)
def test_a_trainer_on_the_cpu_takes_the_other_cores(cores: int, ranks: int, request_: Request, expected: int) -> None:
    assert choose(request_, alone(cores), [place(range(cores))] * ranks, 0.5)[0].trainer_threads == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([0, 9], r"must be cores this process may use, which are \[0, 1, 2, 3\], got \[0, 9\]; remove \[9\]"),
        (5, "must be at most 4, .*, got 5"),
    ],
)
def test_cores_that_are_not_allowed(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=f"worker_cores {message}"):
        choose(request_, alone(4), [place(range(4))], 0.5)


def test_the_reason() -> None:
    near, far = FOUR_GPUS[0], place(range(8), SECOND)
    limited = place(range(32), quotas=[Quota(cpus=3.5, group=1)])
    cases: list[tuple[Request, Place, str]] = [
        ("auto", near, "on the GPU's socket"),
        ("auto", far, "a share of the allowed cores"),
        ("auto", limited, "a share of the allowed cores, limited by a control group to 3.5 CPUs for this rank"),
        ([3], near, "given by worker_cores"),
        (3, near, "number given by worker_cores"),
    ]
    assert [choose(request, SOCKETS, [here], 0.5)[0].reason for request, here, _ in cases] == [c[2] for c in cases]
