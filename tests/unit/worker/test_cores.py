"""Which cores the worker gets, on machines of every kind."""

from collections.abc import Sequence

import pytest
import torch

from lightning_zenflow.worker.cores import WorkerCores, worker_cores
from lightning_zenflow.worker.topology import Place, Quota, core_siblings, read_place


def alone(cores: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {core: (core,) for core in cores}


def pairs(n_physical: int) -> dict[int, tuple[int, ...]]:
    """Logical cores i and i + n_physical share physical core i, as Linux numbers them on most machines."""
    both = [(i, i + n_physical) for i in range(n_physical)]
    return {core: both[core % n_physical] for core in range(2 * n_physical)}


def place(allowed: Sequence[int], gpu_cores: Sequence[int] = (), quotas: Sequence[Quota] = ()) -> Place:
    return Place(host="here", allowed=tuple(allowed), gpu_cores=tuple(gpu_cores), quotas=tuple(quotas))


def choose(
    request: str | int | Sequence[int],
    siblings: dict[int, tuple[int, ...]],
    places: Sequence[Place],
    index: int,
    reserved: float = 0.5,
) -> WorkerCores:
    return worker_cores(request, places=places, index=index, siblings=siblings, reserved_share=reserved)


def cores_of(
    request: str | int | Sequence[int],
    siblings: dict[int, tuple[int, ...]],
    *,
    allowed: Sequence[int] | None = None,
    reserved: float = 0.5,
    rank: int = 0,
    ranks: int = 1,
) -> list[int]:
    here = place(sorted(siblings) if allowed is None else allowed)
    return list(choose(request, siblings, [here] * ranks, rank, reserved).cores)


@pytest.mark.parametrize(
    ("n", "reserved", "expected"),
    [
        (1, 0.5, [0]),
        (2, 0.5, [1]),
        (2, 0.0, [0, 1]),
        (2, 1.0, [1]),
        (8, 0.5, [4, 5, 6, 7]),
        (8, 0.25, [2, 3, 4, 5, 6, 7]),
        (8, 1.0, [7]),
    ],
)
def test_auto_leaves_the_trainer_its_share(n: int, reserved: float, expected: list[int]) -> None:
    assert cores_of("auto", alone(range(n)), reserved=reserved) == expected


def test_auto_takes_one_logical_core_of_each_physical_one() -> None:
    assert cores_of("auto", pairs(4)) == [2, 3]
    neighbours = {core: (core // 2 * 2, core // 2 * 2 + 1) for core in range(8)}
    assert cores_of("auto", neighbours) == [4, 6]
    assert cores_of("auto", pairs(4), allowed=[5, 6, 7], reserved=0.0) == [5, 6, 7], "only second siblings are allowed"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_no_physical_core(ranks: int) -> None:
    siblings = pairs(8)
    chosen = [cores_of("auto", siblings, reserved=0.0, rank=rank, ranks=ranks) for rank in range(ranks)]
    physical = [siblings[core] for of_rank in chosen for core in of_rank]
    assert len(physical) == len(set(physical)) == 8


def test_more_ranks_than_cores() -> None:
    assert [cores_of("auto", alone(range(2)), rank=rank, ranks=4) for rank in range(4)] == [[0], [1], [0], [1]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("request_", [1, 2, 3, 8])
def test_a_number_gives_that_many(request_: int, ranks: int) -> None:
    for rank in range(ranks):
        chosen = cores_of(request_, alone(range(8)), rank=rank, ranks=ranks)
        assert len(chosen) == len(set(chosen)) == request_


def test_numbers_of_two_ranks_do_not_overlap_while_there_is_room() -> None:
    chosen = [cores_of(2, alone(range(8)), rank=rank, ranks=2) for rank in range(2)]
    assert not set(chosen[0]) & set(chosen[1])


def test_lists() -> None:
    assert cores_of([3, 1], alone(range(4))) == [3, 1]
    assert [cores_of([0, 2, 4, 6], alone(range(8)), rank=rank, ranks=2) for rank in range(2)] == [[0, 2], [4, 6]]
    # Too short for the ranks: one core in turn, rather than all of them for every rank.
    assert [cores_of([0, 2], alone(range(8)), rank=rank, ranks=3) for rank in range(3)] == [[0], [2], [0]]


@pytest.mark.parametrize(
    ("cores", "ranks", "request_", "expected"),
    [(2, 1, "auto", 1), (1, 1, "auto", 1), (16, 1, "auto", 8), (16, 2, "auto", 4), (4, 1, 3, 1), (4, 1, 4, 1)],
)
def test_a_trainer_on_the_cpu_takes_the_other_cores(cores: int, ranks: int, request_: str | int, expected: int) -> None:
    assert choose(request_, alone(range(cores)), [place(range(cores))] * ranks, 0).trainer_threads == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([0, 9], r"must be cores this process may use, which are \[0, 1, 2, 3\], got \[0, 9\]; remove \[9\]"),
        (5, "must be at most 4, .*, got 5"),
    ],
)
def test_cores_that_are_not_allowed(request_: int | list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"worker_cores {message}"):
        cores_of(request_, alone(range(4)))


# Two sockets: physical cores 0-7 and 8-15, 16-31 are their second logical cores.
TWO_SOCKETS = pairs(16)
FIRST = (*range(8), *range(16, 24))
SECOND = (*range(8, 16), *range(24, 32))
FOUR_GPUS = [place(range(32), near) for near in (FIRST, FIRST, SECOND, SECOND)]


class TestTwoSockets:
    def cores(self, places: Sequence[Place], request: str | int = "auto", reserved: float = 0.0) -> list[list[int]]:
        return [list(choose(request, TWO_SOCKETS, places, i, reserved).cores) for i in range(len(places))]

    def test_ranks_share_the_physical_cores_of_their_gpus_node(self) -> None:
        assert self.cores(FOUR_GPUS) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        assert self.cores(FOUR_GPUS, reserved=0.5) == [[2, 3], [6, 7], [10, 11], [14, 15]]

    def test_eight_ranks_whose_gpus_are_not_in_order(self) -> None:
        places = [place(range(32), near) for near in (SECOND, FIRST) * 4]
        assert self.cores(places) == [[8, 9], [0, 1], [10, 11], [2, 3], [12, 13], [4, 5], [14, 15], [6, 7]]

    def test_one_rank_stays_on_its_gpus_socket(self) -> None:
        assert self.cores([place(range(32), SECOND)]) == [[8, 9, 10, 11, 12, 13, 14, 15]]

    def test_a_gpu_whose_node_is_not_known(self) -> None:
        [cores] = self.cores([place(range(32))])
        assert cores == list(range(16))

    def test_taskset_leaves_a_part_of_the_node(self) -> None:
        assert self.cores([place(range(6, 11), FIRST)]) == [[6, 7]]

    def test_taskset_leaves_nothing_of_the_node(self) -> None:
        """The ranks whose node is forbidden share what is allowed with those whose node it is."""
        places = [place(range(8), near) for near in (FIRST, FIRST, SECOND, SECOND)]
        assert self.cores(places) == [[0, 1], [2, 3], [4, 5], [6, 7]]

    def test_each_rank_is_bound_to_cores_of_its_own(self) -> None:
        """As DeepSpeed's --bind_cores_to_rank does: what is bound already is not divided again."""
        places = [place(range(4 * i, 4 * i + 4), near) for i, near in enumerate([FIRST] * 2 + [SECOND] * 2)]
        assert self.cores(places) == [list(range(4 * i, 4 * i + 4)) for i in range(4)]
        assert self.cores([place(p.allowed) for p in places]) == self.cores(places)

    def test_numbers_reach_beyond_the_share(self) -> None:
        """First the share, then physical cores of the node, then of the other one, then second logical cores."""
        assert self.cores(FOUR_GPUS, 2)[1] == [6, 7]
        assert self.cores(FOUR_GPUS, 8)[1] == list(range(8))
        assert self.cores(FOUR_GPUS, 9)[1] == [*range(8), 15]
        assert self.cores(FOUR_GPUS, 17)[1] == [*range(16), 23]

    def test_the_reason(self) -> None:
        assert choose("auto", TWO_SOCKETS, FOUR_GPUS, 3).reason == "on the GPU's socket"
        assert choose("auto", TWO_SOCKETS, [place(range(32))], 0).reason == "a share of the allowed cores"
        assert choose("auto", TWO_SOCKETS, [place(range(8), SECOND)], 0).reason == "a share of the allowed cores"
        assert choose([3], TWO_SOCKETS, FOUR_GPUS, 0).reason == "given by worker_cores"
        assert choose(3, TWO_SOCKETS, FOUR_GPUS, 0).reason == "number given by worker_cores"


class TestQuota:
    def choose(self, quotas: Sequence[Sequence[Quota]], request: str | int = "auto") -> WorkerCores:
        return choose(request, alone(range(16)), [place(range(16), quotas=q) for q in quotas], 0, 0.0)

    def test_no_more_threads_than_a_control_group_allows(self) -> None:
        chosen = self.choose([[Quota(cpus=3.5, group=1), Quota(cpus=8, group=2)]])
        assert len(chosen.cores) == 3
        assert chosen.reason == "a share of the allowed cores, limited by a control group to 3.5 CPUs for this rank"

    @pytest.mark.parametrize(("groups", "expected"), [((1, 1), 2), ((1, 2), 4)])
    def test_ranks_of_one_group_share_its_limit(self, groups: tuple[int, int], expected: int) -> None:
        assert len(self.choose([[Quota(cpus=4, group=group)] for group in groups]).cores) == expected

    def test_at_least_one_and_no_more_than_the_share(self) -> None:
        assert len(self.choose([[Quota(cpus=0.5, group=1)]]).cores) == 1
        chosen = self.choose([[Quota(cpus=16, group=1)]])
        assert (len(chosen.cores), chosen.reason) == (16, "a share of the allowed cores")

    def test_a_number_overrides_it(self) -> None:
        assert len(self.choose([[Quota(cpus=2, group=1)]], request=5).cores) == 5


def test_this_machine() -> None:
    here = read_place(torch.device("cpu"))
    chosen = choose("auto", core_siblings(here.allowed), [here], 0)
    assert chosen.cores
    assert set(chosen.cores) <= set(here.allowed)
