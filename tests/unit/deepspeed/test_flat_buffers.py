"""Order of ZeRO's flat buffers, the runs that two layouts have in common, and copies of states on the disk."""

import os
import random
from pathlib import Path

import pytest
import torch

from lightning_zenflow.core.saved_tensors import DiskCopies, with_own_storage
from lightning_zenflow.deepspeed import flat_buffers
from lightning_zenflow.deepspeed.flat_buffers import Layout, balanced_order, runs
from processes import open_files


def layout(draw: random.Random, numels: dict[str, int]) -> tuple[Layout, dict[tuple[str, int], tuple[int, int]]]:
    """A layout, and for each element, by parameter and number, what its rank and its place there must be."""
    names, ranks, padding = draw.sample(list(numels), len(numels)), draw.randint(1, 4), draw.choice((0, 3))
    of_order = {name: numels[name] for name in names}
    elements = [(name, i) for name, numel in of_order.items() for i in range(numel)]
    if draw.random() < 0.5:
        found = Layout.of_pieces(of_order, n_ranks=ranks)
        pieces = {name: -(-numel // ranks) for name, numel in of_order.items()}
        begins = {name: sum(list(pieces.values())[:k]) for k, name in enumerate(pieces)}
        assert found.partition_numel == sum(pieces.values())
        return found, {(name, i): (i // pieces[name], begins[name] + i % pieces[name]) for name, i in elements}
    numel = max(1, -(-(len(elements) + padding * len(names)) // ranks))
    first = {name: sum(of_order[n] + padding for n in names[:k]) for k, name in enumerate(names)}
    found = Layout.of_partitions(of_order, [padding] * len(names), partition_numel=numel)
    return found, {(name, i): divmod(first[name] + i, numel) for name, i in elements}


@pytest.mark.parametrize("seed", range(40))
def test_runs_copy_every_element_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buffers, "_CHUNK", 1 + seed % 10)
    draw = random.Random(seed)
    numels = {f"p{i}": draw.randint(0, 9) for i in range(draw.randint(1, 7))}
    (source, before), (target, after) = layout(draw, numels), layout(draw, numels)
    elements = {place: element for element, place in before.items()}
    copied = {}
    for run in runs(source, target):
        for i in range(run.numel):
            end = run.target_rank, run.target_begin + i
            assert end not in copied
            copied[end] = elements[run.source_rank, run.source_begin + i]
    assert copied == {place: element for element, place in after.items()}
    # Of parameters that one of them does not have, nothing.
    assert not list(runs(source, Layout.of_pieces({"other": 3}, n_ranks=2)))


def model(layers: int, of_layer: list[int], vectors: list[int], first: int, last: int) -> list[tuple[int, bool]]:
    """For each parameter its elements, and whether it has part in the time of backward; in the module's order."""
    layer = [*((n, True) for n in of_layer), *((n, False) for n in vectors)]
    return [(first, False), *layer * layers, *[(last, True)] * (last > 0)]


MODELS = {
    "Llama-3 8B": model(32, [4096**2] * 2 + [4096 * 1024] * 2 + [4096 * 14336] * 3, [4096] * 2, *[128256 * 4096] * 2),
    # The head is the embedding.
    "GPT-2 medium": model(24, [n * 1024**2 for n in (3, 1, 4, 4)], [1024] * 8, 50257 * 1024, 0),
}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_gradients_from_the_beginning_of_backward_to_its_end(name: str, ranks: int) -> None:
    parameters = MODELS[name]
    numels = [numel for numel, _ in parameters]
    order = balanced_order(numels, ranks)
    assert sorted(order) == list(range(len(numels))) == balanced_order(numels, 1)
    # When a gradient arrives, as a share of backward.
    of_time = [numel * counts for numel, counts in parameters]
    arrivals = [sum(of_time[index:]) / sum(of_time) for index in range(len(numels))]
    share, end = -(-sum(numels) // ranks), 0
    of_rank: list[list[float]] = [[] for _ in range(ranks)]
    for index in order:
        begin, end = end, end + numels[index]
        for rank in range(begin // share, (end - 1) // share + 1):
            of_rank[rank].append(arrivals[index])
    assert max(min(times) for times in of_rank) < 0.2
    assert min(max(times) for times in of_rank) > 0.8


def blocks_in(folder: Path) -> int:
    """Bytes on the disk, of files that may have no name."""
    return sum(512 * os.fstat(fd).st_blocks for fd, name in open_files() if str(folder) in name)


def test_space_is_taken_at_once_and_given_back(tmp_path: Path) -> None:
    """A write to a page without space would end the process; no other user can swap a file that has no name."""
    disk = DiskCopies(tmp_path)
    copies = [disk.zeros(10_000), disk.zeros(33, torch.bfloat16), disk.zeros(0)]
    assert [c.numel() for c in copies] == [10_000, 33, 0]
    assert not any(c.any() for c in copies) and [*tmp_path.iterdir()] == []
    assert blocks_in(tmp_path) >= 40_000 + 66
    copies[0].fill_(1)
    disk.close()
    assert blocks_in(tmp_path) == 0
    assert not copies[0].any()


def test_own_storage_keeps_strides() -> None:
    flat = torch.arange(12.0, dtype=torch.bfloat16)
    part = flat.narrow(0, 3, 4).view(4, 1).as_strided((4, 1), (1, 7))
    own = with_own_storage(part)
    assert own.untyped_storage().nbytes() == 8 and own.stride() == (1, 7)
    own.fill_(0)
    assert flat.tolist() == [0, 1, 2, 0, 0, 0, 0, 7, 8, 9, 10, 11]
