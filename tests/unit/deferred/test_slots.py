"""Slots go from blocks to windows and back, also where a step is interrupted."""

import torch

from lightning_zenflow.deferred.memory import SlotPool
from rank_states import make_rank_state
from small_arena import COUNTS, make_partition


def test_an_interrupted_step_gives_its_slots_back() -> None:
    """But for those that belong to windows."""
    partition = make_partition()
    blocks = range(len(partition.blocks))
    rank = make_rank_state(partition, [torch.zeros(n + 1) for n in COUNTS])
    slots = SlotPool(rank)
    slots.grow(2 * len(blocks))
    assert slots.n_free == slots.n_slots

    for block in blocks:
        slots.acquire(block)
    of_step = [slots.of_block(block) for block in blocks]
    slots.end_step()
    assert sorted(of_step) == list(range(slots.n_slots - slots.n_free))

    for block in (0, 1):
        slots.acquire(block)
    of_window = slots.of_block(0)
    of_blocks = slots.end_step()
    dropped = of_blocks[1]
    assert of_blocks == {0: of_window, 1: dropped}
    assert not any(map(slots.has_acquired, blocks)) and dropped not in (*of_step, of_window)

    slots.free([*of_step, of_window, dropped])
    assert slots.n_free == slots.n_slots
    # The slot freed last is taken first.
    slots.acquire(2)
    assert slots.of_block(2) == dropped
    rank.arena.close(keep_state=False)


def test_views_of_a_step_are_in_the_blocks_slots() -> None:
    partition = make_partition()
    rank = make_rank_state(partition, [torch.zeros(n + 1) for n in COUNTS])
    slots = SlotPool(rank)
    slots.grow(len(partition.blocks))
    for block in range(len(partition.blocks)):
        slots.acquire(block)
    for index in range(len(partition.slices)):
        for begin, view in slots.views_of_slice(index):
            view.copy_(partition.slices[index].begin + begin + torch.arange(float(view.numel())))
    for tile in partition.tiles:
        block = partition.block_of_tile[partition.tiles.index(tile)]
        first = tile.begin - partition.blocks[block].begin
        written = rank.arena.slots[slots.of_block(block)][first : first + tile.numel]
        assert torch.equal(written, torch.arange(float(tile.begin), float(tile.begin + tile.numel)))
    rank.arena.close(keep_state=False)
