"""The summary of a training, and its sentence of advice."""

from dataclasses import replace

import pytest
from test_interval_metrics import reading

from lightning_zenflow import ZenFlowConfig
from lightning_zenflow.monitor.summary import Situation, Training, advice, quantile, summary
from lightning_zenflow.schedule.auto_policy import relative_cost
from lightning_zenflow.schedule.staggered import UpdateSchedule

AUTO = ZenFlowConfig()
FIXED = ZenFlowConfig(update_interval=4, publish_lag=1)
CALM = Situation(
    steps=200,
    selections=4,
    config=FIXED,
    schedule=UpdateSchedule(update_interval=4, publish_lag=1),
    step_s=1.0,
    stall_s={"publish_wait": 0.005, "select": 0.001},
    worker_busy_s=0.5,
    worker_cores=10,
    skipped_share=0.0,
)
SLOW = replace(CALM, step_s=1.4, stall_s={"publish_wait": 0.4, "select": 0.0}, worker_busy_s=1.2)


class TestAdvice:
    def test_nothing_limits(self) -> None:
        assert advice(CALM) is None
        assert advice(replace(CALM, stall_s={})) is None

    def test_a_slow_worker(self) -> None:
        assert advice(SLOW) == (
            "The CPU needs 1.2 steps per update: raise update_interval to 9 or give the worker 5 more cores."
        )

    def test_the_advised_interval_hides_the_work_and_none_below_does(self) -> None:
        present = relative_cost(4)
        assert 1.2 * relative_cost(9) / present <= 0.85 < 1.2 * relative_cost(8) / present

    def test_auto_took_the_largest_it_may(self) -> None:
        largest = UpdateSchedule(update_interval=16, publish_lag=2)
        situation = replace(SLOW, worker_busy_s=1.0, schedule=largest, config=AUTO)
        assert advice(situation) == (
            "The CPU needs 1.0 steps per update: raise max_update_interval to 64 or give the worker 2 more cores."
        )

    def test_only_cores_help(self) -> None:
        hopeless = replace(SLOW, worker_busy_s=9.0, worker_cores=1)
        assert advice(hopeless) == "The CPU needs 9.0 steps per update: give the worker 10 more cores."
        undecided = replace(SLOW, config=AUTO)
        assert advice(undecided) == "The CPU needs 1.2 steps per update: give the worker 5 more cores."
        one = replace(undecided, worker_cores=2)
        assert advice(one) == "The CPU needs 1.2 steps per update: give the worker 1 more core."

    def test_without_overlap(self) -> None:
        immediate = replace(SLOW, schedule=UpdateSchedule(update_interval=4, publish_lag=0))
        assert advice(immediate) == (
            "29% of the time is spent waiting for the CPU, since publish_lag is 0: set it to 1, or to auto if runs need not repeat."
        )
        assert advice(replace(immediate, config=FIXED.replace(overlap_step=False, publish_lag=0))) == (
            "29% of the time is spent waiting for the CPU, since overlap_step is false: set it to true."
        )

    def test_late_blocks(self) -> None:
        late = replace(
            SLOW, late_share=0.2, config=FIXED.replace(publish_lag=0), schedule=replace(SLOW.schedule, publish_lag=0)
        )
        start = (
            "29% of the time is spent waiting for the CPU: 20% of the blocks were not updated when backward ended. Set "
            "publish_lag to 1, or if runs need not repeat, "
        )
        assert advice(late) == start + "tail to device, or publish_lag to auto."
        assert advice(replace(late, config=late.config.replace(tail="device"))) == start + "publish_lag to auto."

    def test_late_although_fast(self) -> None:
        jitter = replace(SLOW, worker_busy_s=0.6)
        assert advice(jitter) == (
            "29% of the time is spent waiting for the CPU, although it needs only 0.6 steps per update:"
            " raise publish_lag to 2 or keep other processes off the worker's cores."
        )

    @pytest.mark.parametrize(
        ("cause", "remedy"),
        [("publish_buffer", "full_warm_up_rounds"), ("flush", "checkpoints")],
    )
    def test_other_causes(self, cause: str, remedy: str) -> None:
        sentence = advice(replace(CALM, stall_s={"publish_wait": 0.1, cause: 0.2}))
        assert sentence is not None
        assert sentence.startswith("20% of the time") and remedy in sentence

    def test_selections(self) -> None:
        """Advised only where the cost of selections is known and will stay."""
        fixed = replace(CALM, config=FIXED.replace(select_interval=50), stall_s={"select": 0.1})
        # 50 steps between selections take 10 % of the time, so 250 take the negligible 2 %.
        assert advice(fixed) == "10% of the time is spent selecting columns: raise select_interval to 250."
        assert advice(replace(fixed, selections=2)) is None
        automatic = replace(fixed, config=FIXED)
        assert advice(automatic) is None
        assert advice(replace(automatic, steps=1024, selections=32)) == (
            "10% of the time is spent selecting columns: raise select_interval to 160."
        )

    def test_the_next_cause_where_nothing_can_be_done_about_the_largest(self) -> None:
        sentence = advice(
            replace(CALM, stall_s={"reserve": 0.3, "select": 0.2, "flush": 0.1, "publish_wait": 0.01}, selections=1)
        )
        assert sentence is not None and sentence.startswith("10% of the time is spent completing updates")
        assert advice(replace(CALM, stall_s={"reserve": 0.3, "flush": 0.01})) is None

    def test_skipped_steps_come_first(self) -> None:
        sentence = advice(replace(SLOW, skipped_share=0.5))
        assert sentence is not None and sentence.startswith("50% of the steps were skipped")


class TestSummary:
    TRAINING = Training(
        step_s=[9.0, 0.5, 0.5, 0.5, 2.5],
        config=FIXED,
        worker_cores=2,
        dtype_bytes=2,
        accumulate_grad_batches=1,
    )
    NOW = reading(
        steps=5,
        host_stall_s={"publish_wait": 0.2},
        device_stall_s={"publish_wait": 0.04},
        worker_busy_s=2.0,
        d2h_bytes=400,
        h2d_bytes=100,
        model_bytes=100,
        update_interval=4,
        publish_lag=1,
    )

    def test_by_hand(self) -> None:
        assert summary(self.TRAINING, reading(steps=1), self.NOW).splitlines() == [
            "ZenFlow: 5 steps; the averages leave out the first one",
            "step, median and p99  500 and 2500 ms",
            "waits                 device 1.0%, training thread 5.0% of the time",
            "CPU work              500 ms a step, 98.0% hidden",
            "copies a step         d2h 1.00, h2d 0.25 model sizes (ZeRO-Offload: 2.00 and 1.00)",
            "schedule at the end   update_interval=4, publish_lag=1",
        ]

    def test_advice_follows(self) -> None:
        now = replace(self.NOW, device_stall_s={"publish_wait": 1.0}, worker_busy_s=4.0)
        last = summary(self.TRAINING, reading(steps=1), now).splitlines()[-1]
        assert last.startswith("The CPU needs 1.3 steps per update: raise update_interval to ")

    def test_accumulated_gradients_go_both_ways_in_zero_offload(self) -> None:
        text = summary(replace(self.TRAINING, accumulate_grad_batches=4), reading(steps=1), self.NOW)
        assert "(ZeRO-Offload: 6.00 and 4.00)" in text

    def test_quantiles(self) -> None:
        values = [float(i) for i in range(100, 0, -1)]
        assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50, 99, 7)
