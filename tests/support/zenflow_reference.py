"""ZenFlow's algorithm, synchronous and in plain torch: what the package does asynchronously, with the same numbers.

To be read first. It is the oracle of the tests (`tests/support/oracle.py`). t counts steps from 1.
S is `update_interval`, d `publish_lag`, C `max_norm`, lambda `weight_decay`. A scheduler may change lr, beta1, beta2, eps and lambda in
every step, for each parameter group. Source: ZenFlow, arXiv 2505.12242, section 3. `AdamWState` has the exact state.

**The shown weights.** ZenFlow decides only which step's exact weight the model shows, for each element:

* *Device-owned* elements show w_t after each step t. These are all elements of *resident* blocks; of the others in a matrix, viewed as
  [out, rest], the columns of the largest importance, the squared norm of the column's gradient: the share `topk_ratio` of them, at least
  one. Vectors are device-owned as a whole.
* *Host-owned* elements are all others. All elements are divided into blocks. The window of block b closes in the steps t with t = b modulo
  S, and becomes a *job*, which applies the window's S gradients, to device-owned elements too. The job is published at the end of step
  t + d: the block's host-owned elements show w_t until its next job is published.
* With d = 0, a job may begin during the backward pass, before N_t is known. Unless `clip_prediction` is false, the block then shows w_t
  with a *predicted* factor in the place of c_t. The exact state has c_t. Prediction: P_t is the sum of squares of the gradients that have
  arrived when the job begins, r_t the block's running geometric mean sqrt(r_(t-1) N_t^2 / P_t), and r_(t-1) P_t is taken for N_t^2.
* In *synchronous* steps all elements show w_t. These are the warm-up, the steps that select the columns, and where weights
  are late, the one behind a change of what is trained.

With S = 1, d = 0 and true factors, every step shows w_t: the training is AdamW's.

Left out are weight prediction and provisional updates, which add an estimate of the missing updates to shown weights
(`core/schedule.py`), the choice of S and d (`offload/plan.py`), short moments and loss scales.
"""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_zenflow.core.step_inputs import GroupHyperparameters

Gradients: TypeAlias = Sequence[Tensor | None]
"""One a parameter, the mean over ranks; None: the parameter is frozen."""
Groups: TypeAlias = Sequence[GroupHyperparameters]
"""One a parameter: the hyperparameters of its group in one step."""


@dataclass(kw_only=True)
class AdamWState:
    """The exact state; each list has one tensor a parameter, all of one element type.

    g_t is the gradient of step t, at the weights that the model shows in that step. AdamW (arXiv 1711.05101, algorithm 2) applies every
    gradient once, in order. Its state after step t is the *exact* state, which checkpoints hold::

        N_t = norm of the whole g_t                       c_t = 1 / max(1, (N_t + 1e-6) / C), or 1 without clipping
        m_t = beta1 m_(t-1) + (1 - beta1) c_t g_t         v_t = beta2 v_(t-1) + (1 - beta2) (c_t g_t)^2
        w_t = (1 - lr lambda) w_(t-1) - lr (m_t / (1 - beta1^n)) / (sqrt(v_t / (1 - beta2^n)) + eps)

    n counts the steps whose norm is finite; the other steps change nothing. Adam adds lambda w_(t-1) to c_t g_t instead of decaying the
    weight. A frozen parameter has no gradient and keeps its state; its n does not count the step. The paper instead applies the mean of S
    gradients as one update.
    """

    weights: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    counts: list[int]
    """n of each parameter."""
    count: int = 0
    """Steps that were applied, whatever was frozen in them."""
    skipped: int = 0
    """Steps whose norm was not finite."""

    @classmethod
    def start(cls, weights: Sequence[Tensor], dtype: torch.dtype) -> "AdamWState":
        """Zero moments, and copies of the weights in `dtype`."""
        copies = [w.detach().to(dtype, copy=True) for w in weights]
        exp_avg, exp_avg_sq = ([torch.zeros_like(w) for w in copies] for _ in range(2))
        return cls(weights=copies, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, counts=[0] * len(copies))

    def step(self, gradients: Gradients, groups: Groups, *, max_norm: float = 0.0) -> float:
        """One step; `max_norm` 0 means no clipping. Returns c_t, or NaN where the norm is not finite."""
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
        if not math.isfinite(norm):
            self.skipped += 1
            return math.nan
        factor = 1 / max(1.0, (norm + 1e-6) / max_norm) if max_norm else 1.0
        self.weights, self.exp_avg, self.exp_avg_sq = self.updated(gradients, groups, [factor] * len(gradients))
        self.count += 1
        self.counts = [n + (g is not None) for n, g in zip(self.counts, gradients, strict=True)]
        return factor

    def updated(
        self, gradients: Gradients, groups: Groups, factors: Sequence[Tensor | float]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Weights, first and second moments after a step with given factors, one a parameter or one an element; changes nothing."""
        weights, exp_avg, exp_avg_sq = list(self.weights), list(self.exp_avg), list(self.exp_avg_sq)
        for i, (gradient, h, factor) in enumerate(zip(gradients, groups, factors, strict=True)):
            if gradient is None:
                continue
            w, m, v, n = weights[i], exp_avg[i], exp_avg_sq[i], self.counts[i] + 1
            g = gradient.to(w.dtype) * factor
            if h.decoupled:
                w = w - h.lr * h.weight_decay * w
            else:
                g = g + h.weight_decay * w
            m = h.beta1 * m + (1 - h.beta1) * g
            v = h.beta2 * v + (1 - h.beta2) * g * g
            m_hat = m / (1 - h.beta1**n)
            v_hat = v / (1 - h.beta2**n)
            weights[i] = w - h.lr * m_hat / (v_hat.sqrt() + h.eps)
            exp_avg[i], exp_avg_sq[i] = m, v
        return weights, exp_avg, exp_avg_sq


def owned_elements(gradient: Tensor, topk_ratio: float) -> Tensor:
    """Elements of a parameter that the device owns if this gradient selects them: bool, of the parameter's shape."""
    if topk_ratio == 0 or gradient.dim() < 2:
        return torch.full_like(gradient, topk_ratio > 0, dtype=torch.bool)
    importance = gradient.flatten(1).double().square().sum(0).tolist()
    # Among equal columns the first ones are selected.
    best_first = sorted(range(len(importance)), key=lambda column: (-importance[column], column))
    owned = torch.zeros_like(gradient.flatten(1), dtype=torch.bool)
    owned[:, best_first[: max(1, round(topk_ratio * len(importance)))]] = True
    return owned.view(gradient.shape)


@dataclass(kw_only=True)
class SynchronousZenFlow:
    """A training's exact state, and the weights that the model shows.

    Args:
        weights: initial weights, one tensor a parameter.
        blocks: for each parameter, the number of each element's block, int64.
        topk_ratio: share of the columns that the device owns; 0: the host owns all elements.
        warm_up: applied steps at the start that are synchronous.
        max_norm: C; 0: no clipping.
        select_interval: steps from one selection of columns to the next; 0: there is one only.
        resident: for each parameter, the elements of resident blocks, bool; empty: there are none.

    Attributes:
        number: t, the last step.
        exact: exact state after that step, float32.
        shown: weights that the model shows in the next step, float32, one tensor a parameter.
        owned: for each parameter, the elements that the device owns, bool; empty until columns are selected.
    """

    weights: InitVar[Sequence[Tensor]]
    blocks: Sequence[Tensor]
    topk_ratio: float
    update_interval: int
    publish_lag: int
    warm_up: int = 0
    max_norm: float = 0.0
    select_interval: int = 0
    resident: Sequence[Tensor] = ()

    def __post_init__(self, weights: Sequence[Tensor]) -> None:
        self.number = 0
        self.exact = AdamWState.start(weights, torch.float32)
        self.start_over(changed=False)

    def start_over(self, *, changed: bool = True) -> None:
        """Begins the training, or goes on after parameters were frozen or unfrozen (`changed`), before the next forward pass."""
        self.flush()
        self.owned: list[Tensor] = []
        # With S = 1, d = 0 no weight is late, and the device owns no columns.
        is_late = (self.update_interval, self.publish_lag) != (1, 0)
        selects = self.topk_ratio > 0 and is_late
        self._synchronous_until = self.number + max(selects, is_late and changed, self.warm_up - self.exact.count)
        # The number of the step that selects; 0: none does.
        self._selection = self._synchronous_until if selects else 0

    def flush(self) -> None:
        """Closes all windows and publishes all jobs: every element shows its exact weight."""
        # New weights of all blocks whose windows closed in a step, by its number.
        self._jobs: dict[int, list[Tensor]] = {}
        self.shown = list(self.exact.weights)

    def step(self, gradients: Gradients, groups: Groups, predicted: Sequence[Tensor] | None = None) -> float:
        """Step t with the gradients g_t, at the weights `shown`. Returns c_t, or NaN where the step changes nothing exact.

        `predicted` has with d = 0 for each parameter the factor that this step's job has at each element, float32; NaN: the job's weights
        lack g_t. None: the job has the true factor.
        """
        self.number += 1
        tentative = None if predicted is None else self._tentative(gradients, groups, predicted)
        factor = self.exact.step(gradients, groups, max_norm=self.max_norm)
        if self.number <= self._synchronous_until or self.number == self._selection:
            self.flush()
            if self.number == self._selection:
                self._select(gradients, is_finite=not math.isnan(factor))
            return factor
        # submit
        self._jobs[self.number] = tentative or self.exact.weights
        # publish, unless a flush has published the job before
        closed = self.number - self.publish_lag
        for i, weights in enumerate(self._jobs.pop(closed, [])):
            is_new = self.blocks[i] % self.update_interval == closed % self.update_interval
            self.shown[i] = torch.where(is_new, weights, self.shown[i])
        # update
        for of_parameters in (self.owned, self.resident):
            for i, owned in enumerate(of_parameters):
                self.shown[i] = torch.where(owned, self.exact.weights[i], self.shown[i])
        return factor

    def _tentative(self, gradients: Gradients, groups: Groups, predicted: Sequence[Tensor]) -> list[Tensor]:
        with_gradient, _, _ = self.exact.updated(gradients, groups, predicted)
        triples = zip(predicted, self.exact.weights, with_gradient, strict=True)
        return [torch.where(factor.isnan(), before, after) for factor, before, after in triples]

    def _select(self, gradients: Gradients, *, is_finite: bool) -> None:
        if is_finite:
            pairs = zip(gradients, self.exact.weights, strict=True)
            self.owned = [owned_elements(torch.zeros_like(w) if g is None else g, self.topk_ratio) for g, w in pairs]
            self._selection = self.number + self.select_interval if self.select_interval else 0
        else:
            # The next step is synchronous too, and selects.
            self._selection += 1
