"""Times of steps, and the observations that are made of them."""

from lightning_zenflow.schedule.auto_control import ScheduleObserver
from lightning_zenflow.schedule.staggered import UpdateSchedule


class TestObserver:
    def observe(self, observer: ScheduleObserver, n: int, **times: float) -> list[tuple[float, float]]:
        full = {"device_s": 1.0, "worker_s": 0.5, "stall_s": 0.0, **times}
        return [seen for seen in (observer.add(**full) for _ in range(n)) if seen is not None]

    def test_medians_and_the_share_of_waiting(self) -> None:
        observer = ScheduleObserver(UpdateSchedule(update_interval=2, publish_lag=1))
        assert self.observe(observer, 4, device_s=100.0) == [], "left out"
        assert self.observe(observer, 4, worker_s=2.0) == [(2.0, 0.0)], "the first one is short"
        assert self.observe(observer, 8) == []
        assert self.observe(observer, 1, device_s=50.0, stall_s=2.0, worker_s=9.0) == []
        assert self.observe(observer, 7) == [(0.5, 2.0 / 67.0)]

    def test_says_which_step_completes(self) -> None:
        observer = ScheduleObserver(UpdateSchedule(update_interval=4, publish_lag=1))
        for _ in range(60):
            announced = observer.completes_next
            assert (len(self.observe(observer, 1)) == 1) == announced

    def test_starts_anew_after_a_change(self) -> None:
        observer = ScheduleObserver(UpdateSchedule(update_interval=4, publish_lag=1))
        self.observe(observer, 4 + 1 + 4 + 1 + 15)
        observer.restart(
            UpdateSchedule(update_interval=4, publish_lag=1), UpdateSchedule(update_interval=16, publish_lag=2)
        )
        assert self.observe(observer, 1 + 16 + 2 + 15) == []
        assert self.observe(observer, 1) == [(0.5, 0.0)]
