"""Which cores the worker gets."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_zenflow.affinity import allowed_cores, core_siblings, trainer_threads, worker_cores


def alone(cores: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {core: (core,) for core in cores}


def pairs(n_physical: int) -> dict[int, tuple[int, ...]]:
    """Logical cores i and i + n_physical share physical core i, as Linux numbers them on most machines."""
    both = [(i, i + n_physical) for i in range(n_physical)]
    return {core: both[core % n_physical] for core in range(2 * n_physical)}


def cores_of(
    request: str | int | Sequence[int],
    siblings: dict[int, tuple[int, ...]],
    *,
    allowed: Sequence[int] | None = None,
    reserved: float = 0.5,
    rank: int = 0,
    ranks: int = 1,
) -> list[int]:
    return worker_cores(
        request,
        allowed=sorted(siblings) if allowed is None else allowed,
        siblings=siblings,
        reserved_share=reserved,
        local_rank=rank,
        local_world_size=ranks,
    )


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
    siblings = pairs(4)
    chosen = cores_of("auto", siblings, reserved=0.5)
    assert len(chosen) == 2
    assert len({siblings[core] for core in chosen}) == 2


def test_auto_with_neighbours_as_siblings() -> None:
    siblings = {core: (core // 2 * 2, core // 2 * 2 + 1) for core in range(8)}
    assert cores_of("auto", siblings, reserved=0.5) == [4, 6]


def test_auto_where_only_the_second_sibling_is_allowed() -> None:
    assert cores_of("auto", pairs(4), allowed=[5, 6, 7], reserved=0.0) == [5, 6, 7]


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


def test_a_list_is_taken_as_it_is() -> None:
    assert cores_of([3, 1], alone(range(4))) == [3, 1]


def test_a_list_is_shared_by_the_ranks() -> None:
    assert [cores_of([0, 2, 4, 6], alone(range(8)), rank=rank, ranks=2) for rank in range(2)] == [[0, 2], [4, 6]]


def test_a_list_that_is_too_short_for_the_ranks() -> None:
    """One core in turn, rather than all of them for every rank."""
    assert [cores_of([0, 2], alone(range(8)), rank=rank, ranks=3) for rank in range(3)] == [[0], [2], [0]]


@pytest.mark.parametrize(
    ("cores", "ranks", "n_worker_cores", "expected"),
    [(2, 1, 1, 1), (1, 1, 1, 1), (16, 1, 8, 8), (16, 2, 4, 4), (4, 1, 3, 1)],
)
def test_a_trainer_on_the_cpu_takes_the_other_cores(cores: int, ranks: int, n_worker_cores: int, expected: int) -> None:
    siblings = alone(range(cores))
    assert trainer_threads(n_worker_cores, allowed=range(cores), siblings=siblings, local_world_size=ranks) == expected


@pytest.mark.parametrize("request_", [[0, 9], [4]])
def test_a_core_that_is_not_allowed(request_: list[int]) -> None:
    with pytest.raises(ValueError, match=r"worker_cores=\[.*\]: allowed are .*\[0, 1, 2, 3\]"):
        cores_of(request_, alone(range(4)))


def test_more_cores_than_there_are() -> None:
    with pytest.raises(ValueError, match="worker_cores=5: allowed is a number from 1 to 4"):
        cores_of(5, alone(range(4)))


def test_siblings_are_read_from_the_system(tmp_path: Path) -> None:
    for core, text in {0: "0,4\n", 1: "1-3\n"}.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    assert core_siblings([0, 1, 7], root=tmp_path) == {0: (0, 4), 1: (1, 2, 3), 7: (7,)}


def test_this_machine() -> None:
    allowed = allowed_cores()
    chosen = worker_cores(
        "auto", allowed=allowed, siblings=core_siblings(allowed), reserved_share=0.5, local_rank=0, local_world_size=1
    )
    assert chosen
    assert set(chosen) <= set(allowed)
