"""Slots go from blocks to windows and back, also where a step is interrupted."""

import torch

from lightning_zenflow.deferred.slots import SlotPool
from rank_states import make_rank_state
from small_arena import COUNTS, make_partition


def test_an_interrupted_step_gives_its_slots_back() -> None:
    """But for those that belong to windows; sums of micro-batches before a step stay."""
    partition = make_partition()
    blocks = range(len(partition.blocks))
    rank = make_rank_state(partition, [torch.zeros(n + 1) for n in COUNTS])
    slots = SlotPool(partition, rank.arena, rank.books)
    slots.grow(2 * len(blocks))
    assert not slots.is_open and slots.n_free == slots.n_slots
    first_tiles = [block.tiles[0] for block in partition.blocks]

    slots.open()
    for tile in first_tiles:
        slots.of_tile(tile)
    of_step = [slots.hand_over(block) for block in blocks]
    slots.close()
    assert sorted(of_step) == list(range(slots.n_slots - slots.n_free))

    slots.of_tile(first_tiles[0])
    assert slots.drop_open() == [] and not slots.is_open
    slots.open()
    of_window = slots.hand_over(0)
    slots.of_tile(first_tiles[1])
    (dropped,) = slots.drop_open()
    assert not slots.is_open and dropped not in (*of_step, of_window)

    slots.free([*of_step, of_window, dropped])
    assert slots.n_free == slots.n_slots
    # The slot freed last is taken first.
    slots.of_tile(first_tiles[2])
    assert slots.hand_over(2) == dropped
    rank.arena.close(keep_state=False)
