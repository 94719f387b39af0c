"""Multiples of momentum and gradients for "auto": means of AdamW's own, and stability of training with them."""

import numpy as np
import pytest

from lightning_zenflow.core.schedule import StalenessCompensation, UpdateSchedule, gradient_steps, momentum_steps

Multiples = tuple[float, list[float]]


def schedule_of(s: int, d: int) -> UpdateSchedule:
    return UpdateSchedule(update_interval=s, publish_lag=d)


@pytest.mark.parametrize(("s", "d"), [(1, 1), (1, 2), (4, 0), (4, 2), (16, 1)])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_the_multiples_are_means_of_adamws_own(s: int, d: int, beta1: float) -> None:
    momentum: list[float] = []
    gradients: dict[int, list[float]] = {}
    # The number of gradients since the end of the window, at each forward pass that sees its weights.
    for n in range(d, d + s):
        # AdamW's momentum and step as multiples of m and g_1, ..., g_n.
        m, moved = np.eye(n + 1)[0], np.zeros(n + 1)
        for i in range(1, n + 1):
            m = beta1 * m + (1 - beta1) * np.eye(n + 1)[i]
            moved = moved + m
        momentum.append(moved[0])
        for i in range(1, n + 1):
            gradients.setdefault(i, []).append(moved[i])
    assert momentum_steps(schedule_of(s, d), beta1) == pytest.approx(np.mean(momentum))
    for age, multiples in gradients.items():
        assert gradient_steps(schedule_of(s, d), beta1, age) == pytest.approx(np.mean(multiples))


def test_ages_that_no_regular_pass_sees() -> None:
    schedule = schedule_of(4, 1)
    assert gradient_steps(schedule, 0.9, 100) == gradient_steps(schedule, 0.9, 4)
    assert gradient_steps(schedule_of(1, 0), 0.9, 1) == momentum_steps(schedule_of(1, 0), 0.9) == 0


def test_given_numbers_are_taken() -> None:
    given = StalenessCompensation(weight_prediction=2.5, provisional_scale=0.3)
    assert given.prediction_steps(schedule_of(4, 1), 0.9) == 2.5
    assert {given.scale(schedule_of(4, 1), 0.9, age) for age in (1, 2, 3)} == {0.3}


def multiples(schedule: UpdateSchedule, beta1: float) -> Multiples:
    """AdamW's own, for a provisional update that knows the second moment."""
    return momentum_steps(schedule, beta1), [
        gradient_steps(schedule, beta1, age) for age in range(1, schedule.update_interval + schedule.publish_lag)
    ]


def growth(multiples: Multiples, schedule: UpdateSchedule, *, beta1: float, curvature: float) -> float:
    """Growth of a weight per step, on a parabola.

    Args:
        multiples: steps along the momentum, and along the gradients by their age.
        schedule: the schedule.
        beta1: decay of the first moment.
        curvature: of the parabola, times learning rate over the root of the second moment.
    """
    s, d = schedule.update_interval, schedule.publish_lag
    ahead, scales = multiples

    def shown(weight: float, momentum: float, gradients: list[float]) -> float:
        moved = sum(scale * gradient for scale, gradient in zip(scales, gradients, strict=False))
        return weight - ahead * momentum - moved

    def window(state: np.ndarray) -> np.ndarray:
        """From the end of a window to that of the next: weight and momentum now and a window ago, and the gradients in between."""
        weight, momentum, old_weight, old_momentum, *old = state
        new: list[float] = []
        for step in range(s):
            seen = shown(old_weight, old_momentum, old + new) if step < d else shown(weight, momentum, new)
            new.append(curvature * seen)
        end_weight, end_momentum = weight, momentum
        for gradient in new:
            end_momentum = beta1 * end_momentum + (1 - beta1) * gradient
            end_weight = end_weight - end_momentum
        return np.array([end_weight, end_momentum, weight, momentum, *new])

    # The window is linear: its matrix is the image of all unit states at once.
    return float(np.abs(np.linalg.eigvals(window(np.eye(4 + s)))).max() ** (1 / s))


def stable_up_to(multiples: Multiples, schedule: UpdateSchedule, beta1: float) -> float:
    """The largest curvature on which a weight does not grow."""
    curvatures = np.geomspace(0.05, 200, 160)
    grows = [c for c in curvatures if growth(multiples, schedule, beta1=beta1, curvature=c) > 1 + 1e-9]
    return float(grows[0]) if grows else float("inf")


@pytest.mark.parametrize("beta1", [0.8, 0.95])
@pytest.mark.parametrize(("s", "d"), [(1, 1), (4, 0), (4, 1), (16, 1)])
def test_late_gradients_leave_training_stable(s: int, d: int, beta1: float) -> None:
    schedule = schedule_of(s, d)
    adamw = 2 * (1 + beta1) / (1 - beta1)
    auto = stable_up_to(multiples(schedule, beta1), schedule, beta1)
    late = stable_up_to((0.0, []), schedule, beta1)
    if s == 1:
        assert auto == pytest.approx(adamw, rel=0.06)
    assert auto > max(4.0, 5 * late)
    fixed = stable_up_to((s + d - 1.0, [0.5] * (s + d - 1)), schedule, beta1)
    assert auto > 1.8 * fixed
