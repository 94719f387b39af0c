"""Which slices and blocks of a step are complete."""

from lightning_zenflow.offload.arrivals import Arrivals
from lightning_zenflow.offload.rank_state import Blocks
from small_arena import make_partition


def test_each_step_begins_with_nothing() -> None:
    """Two slices over three blocks, of which both have a part in the second one."""
    arrivals = Arrivals(Blocks(make_partition()))
    for order, complete in (((0, 1), [[0], [1, 2]]), ((1, 0), [[2], [0, 1]])):
        arrivals.open()
        assert (arrivals.missing, arrivals.take_new()) == ([0, 1], set())
        assert [[block.number for block in arrivals.slice_complete(index)] for index in order] == complete
        assert (arrivals.missing, arrivals.arrived, arrivals.take_new()) == ([], {0, 1}, {0, 1})
        arrivals.slice_complete(0)
    # What is frozen is not waited for.
    arrivals.trained = {0}
    arrivals.open()
    assert arrivals.missing == [0]
    assert [block.number for block in arrivals.slice_complete(0)] == [0, 1]
