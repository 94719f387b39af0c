"""The worker's kernel and AdamW in torch (`replay_reference`) have the same bits, on every instruction set, on which the CPU device's pass
over gradients has one result; and what conversions, noise and codes of moments are to be.
"""

import copy
import ctypes
import itertools
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from cpp_build import folder_of, variants
from lightning_zenflow import native
from lightning_zenflow.core.step_inputs import GroupHyperparameters
from models import generator
from replay_reference import (
    ReplayedAdamW,
    code_of_square,
    decoded,
    noise_of,
    noise_seed,
    other_noise_of,
    round_stochastically,
)

DECOUPLED = GroupHyperparameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
NO_DECAY = replace(DECOUPLED, weight_decay=0.0)
GRADIENT_DECAY = GroupHyperparameters(lr=1e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, decoupled=False)
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
FIRST_ELEMENT, LAST_STEP = 2**32 - 100, 41


class Header(ctypes.LittleEndianStructure):
    _fields_ = native.fields(
        (ctypes.c_uint32, "model moments n n_gradients has_tentative offset first_element last_step"),
        (ctypes.c_float, "prediction_steps"),
    )


class Step(ctypes.LittleEndianStructure):
    _fields_ = native.fields(
        (native.Hyperparameters, "hyperparameters"), (ctypes.c_int64, "count"), (ctypes.c_double, "clip")
    )


@dataclass(kw_only=True)
class Case:
    """A window, and the state before: moments of its type, codes and scales if they have 8 bits. Its first step is the third of a run."""

    master: Tensor
    moments: tuple[Tensor, Tensor]
    scales: Tensor
    gradients: Sequence[Tensor]
    groups: Sequence[GroupHyperparameters]
    dtype: torch.dtype
    has_tentative: bool = False
    prediction_steps: float = 0.0
    offset: int = 0

    def __bytes__(self) -> bytes:
        header = Header(
            model=native.DATA_TYPES[self.dtype],
            moments=native.DATA_TYPES[self.moments[0].dtype],
            n=len(self.master),
            n_gradients=len(self.gradients),
            has_tentative=int(self.has_tentative),
            offset=self.offset,
            first_element=FIRST_ELEMENT,
            last_step=LAST_STEP,
            prediction_steps=self.prediction_steps,
        )
        steps = [
            Step(hyperparameters=native.Hyperparameters(**vars(h)), count=count, clip=clip_of(count))
            for count, h in enumerate(self.groups, start=3)
        ]
        arrays = [self.master, *self.moments, self.scales, *self.gradients]
        return b"".join([bytes(header), *map(bytes, steps), *map(to_bytes, arrays)])

    def expected(self) -> tuple[list[Tensor], Tensor]:
        """Master weights and moments as float32 values, and published weights."""
        n, is_coded = len(self.master), self.moments[0].dtype == torch.int8
        index = torch.arange(n)
        reference = ReplayedAdamW(
            master=[self.master], elements=[index + FIRST_ELEMENT], scales=[index // 128] if is_coded else None
        )
        m, v = as_floats(self.moments, self.scales)
        reference.exp_avg, reference.exp_avg_sq, reference.counts = [m], [v], [2]
        n_committed = len(self.groups) - self.has_tentative
        pairs = list(zip(self.gradients, self.groups, strict=True))
        for gradient, h in pairs[:n_committed]:
            reference.step([gradient], [h], clip_of(reference.counts[0] + 1))
        shown = copy.deepcopy(reference)
        for gradient, h in pairs[n_committed:]:
            shown.step([gradient], [h], clip_of(shown.counts[0] + 1))
        if n_committed and self.moments[0].dtype != torch.float32:
            reference.close_windows([torch.ones(n, dtype=torch.bool)], LAST_STEP)
        published = shown.master[0]
        if pairs and self.prediction_steps:
            published = shown.predicted(0, self.groups[-1], self.prediction_steps)
        return [reference.master[0], reference.exp_avg[0], reference.exp_avg_sq[0]], published.to(self.dtype)


def clip_of(count: int) -> float:
    return float(torch.tensor(1.0 if count % 2 else 0.37, dtype=torch.float32))


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def as_floats(moments: Sequence[Tensor], scales: Tensor) -> tuple[Tensor, Tensor]:
    m, v = moments[0].float(), moments[1].float()
    if moments[0].dtype != torch.int8:
        return m, v
    each = scales.repeat_interleave(128, 0)[: len(m)]
    return decoded(m, v, each[:, 0], each[:, 1])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(17, seed))


def random_case(
    n: int, n_gradients: int, *groups: GroupHyperparameters, dtype: torch.dtype, moments: torch.dtype, **options: int
) -> Case:
    """Plausible values, with some zeros and subnormals among them."""
    index = torch.arange(n)
    m, root = 1e-3 * random(n, seed=1), 1e-3 * random(n, seed=2)
    v = root.square()
    m[index % 11 == 3], v[index % 13 == 5], v[index % 17 == 8] = 0.0, 0.0, 2.0**-140
    gradients = [1e-2 * random(n, seed=10 + i) for i in range(n_gradients)]
    for gradient in gradients:
        gradient[index % 19 == 7], gradient[index % 23 == 9] = 0.0, 2.0**-24
    scales = torch.empty(0, 2)
    if moments == torch.int8:
        both = (5e4 * m).clamp(-127, 127).to(torch.int8), (1e8 * v).clamp(1, 255).to(torch.uint8)
        scales = torch.tensor([1.5, 1e-6]).expand(-(-n // 128), 2)
    else:
        both = m.to(moments), v.to(moments)
    return Case(
        master=0.02 * random(n, seed=3),
        moments=both,
        scales=scales,
        gradients=[gradient.to(dtype) for gradient in gradients],
        groups=list(itertools.islice(itertools.cycle(groups), n_gradients)),
        dtype=dtype,
        **options,  # type: ignore[arg-type]
    )


def each_kind(n: int, n_gradients: int, *groups: GroupHyperparameters, offset: int = 0) -> Iterator[Case]:
    """All types, with and without a tentative step and prediction."""
    for dtype, moments, tentative, ahead in itertools.product(MODEL_DTYPES, MOMENT_DTYPES, (False, True), (0, 2.5)):
        if n_gradients or not tentative:
            case = random_case(n, n_gradients, *groups, dtype=dtype, moments=moments, offset=offset)
            yield replace(case, has_tentative=tentative, prediction_steps=ahead)


def run(cases: Sequence[Case], variant: str = "quick") -> Iterator[list[list[Tensor]]]:
    """For each case, and each instruction set: master weights, both moments, scales, published weights, and `routed`."""
    program = os.environ.get("ZENFLOW_REPLAY") or folder_of(variant) / "tests" / "zenflow-replay"  # of another machine
    done = subprocess.run([program], input=b"".join(map(bytes, cases)), capture_output=True)
    assert done.returncode == 0, done.stderr.decode() or "the kernel writes beside its arrays"
    templates = [[c.master, *c.moments, c.scales, c.master.to(c.dtype), *routed(c)] for c in cases]
    output = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8)
    n_sets, rest = divmod(len(output), sum(t.nbytes for template in templates for t in template))
    assert n_sets >= 1 and rest == 0
    for template in templates:
        found = []
        for _ in range(n_sets):
            pieces = output.split([t.nbytes for t in template] + [len(output) - sum(t.nbytes for t in template)])
            output = pieces[-1]
            found.append(
                [piece.clone().view(t.dtype).view(t.shape) for piece, t in zip(pieces, template, strict=False)]
            )
        yield found


def routed(case: Case) -> list[Tensor]:
    """What the pass over the first gradient leaves, but for rounding: a copy, and squared norms of three rows or of one."""
    rows = 3 if len(case.master) % 3 == 0 else 1
    return [
        part for g in case.gradients[:1] for part in (g, g.double().view(rows, len(g) // rows).square().sum(1).float())
    ]


def assert_same_bits(ours: Tensor, theirs: Tensor, case: Case) -> None:
    """All NaNs are the same."""
    ours, theirs = ours.float(), theirs.float()
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    assert same.all(), (ours[~same], theirs[~same], (~same).nonzero(), case)


def check(cases: Iterable[Case], variant: str) -> None:
    cases = list(cases)
    for case, on_each_set in zip(cases, run(cases, variant), strict=True):
        state, published = case.expected()
        for master, m, v, scales, shown, *of_gradient in on_each_set:
            for ours, theirs in zip((master, *as_floats((m, v), scales), shown), (*state, published), strict=True):
                assert_same_bits(ours, theirs, case)
            for ours, first, exact in zip(of_gradient, on_each_set[0][5:], routed(case), strict=True):
                assert_same_bits(ours, first, case)
                torch.testing.assert_close(ours, exact, rtol=5e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", variants("thread"))
def test_sizes_steps_and_types(variant: str) -> None:
    sizes = [*itertools.product((0, 1, 17, 513), (0, 1, 2, 5)), (4097, 2)]
    check((case for n, n_steps in sizes for case in each_kind(n, n_steps, DECOUPLED)), variant)


@pytest.mark.parametrize("variant", variants("thread"))
def test_decay_slow_moments_and_alignment(variant: str) -> None:
    """A first moment is slow from beta1 = 1 - 2^-8 on, which its rounding to 16 bits depends on."""
    groups = [[NO_DECAY], [GRADIENT_DECAY], [DECOUPLED, NO_DECAY, GRADIENT_DECAY]]
    groups += [[replace(DECOUPLED, beta1=beta1)] for beta1 in (1 - 2.0**-8, 0.9962)]
    check((case for of_steps in groups for case in each_kind(403, 3, *of_steps)), variant)
    check((case for offset in (1, 3, 8, 15) for case in each_kind(267, 2, DECOUPLED, offset=offset)), variant)


@pytest.mark.parametrize("variant", variants("thread"))
def test_special_values(variant: str) -> None:
    special = [0.0, -0.0, 2.0**-149, -(2.0**-130), 1e38, -1e38, math.inf, -math.inf, math.nan, 65504.0]
    values, cases = torch.tensor(special), []
    for dtype, value in itertools.product(MODEL_DTYPES, special):
        for moments in MOMENT_DTYPES[:2]:
            state = torch.full_like(values, value)
            both = state.to(moments), state.abs().to(moments)
            cases.append(
                Case(
                    master=state,
                    moments=both,
                    scales=torch.empty(0, 2),
                    gradients=[values.to(dtype)],
                    groups=[DECOUPLED],
                    dtype=dtype,
                )
            )
        # In 8 bits: one of them in a tile of others, which another scale follows.
        case = random_case(256, 1, DECOUPLED, dtype=dtype, moments=torch.int8)
        case.gradients[0][7] = value
        for scales in ((1.5, 1e-6), (2.0**-40, 2.0**-100), (2.0**30, 2.0**-100), (2.0**-40, 2.0**127), (1e4, 2.0**100)):
            cases.append(replace(case, scales=torch.tensor([case.scales[0].tolist(), scales])))
    check(cases, variant)


def test_conversions_of_all_16_bit_numbers() -> None:
    """From gradients, by a first moment that is the gradient; to published weights, from numbers around each border between two."""
    copying = replace(NO_DECAY, lr=0.0, beta1=0.0)
    for dtype in MODEL_DTYPES[1:]:
        numbers = torch.arange(2**16).to(torch.int16).view(dtype)
        gradients = random_case(2**16, 1, copying, dtype=dtype, moments=torch.float32)
        gradients = replace(gradients, gradients=[numbers], moments=(torch.full((2**16,), -0.0), torch.zeros(2**16)))
        positive = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80).to(torch.int16).view(dtype)
        following = (positive.view(torch.int16) + 1).view(dtype).double()
        above = following.nan_to_num(posinf=2.0**16 if dtype == torch.float16 else 2.0**128)
        border = ((positive.double() + above) / 2).float()
        around = [border, *(border.nextafter(torch.tensor(to)) for to in (0.0, math.inf)), positive.float()]
        odd = torch.tensor([math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-149])
        masters = torch.cat([sign * values for values in (*around, odd) for sign in (1, -1)])
        zeros, cases = torch.zeros_like(masters), [gradients]
        # Without a step, and behind one that changes nothing.
        for n_steps in (0, 1):
            case = random_case(len(masters), n_steps, copying, dtype=dtype, moments=torch.float32)
            still = [zeros.to(dtype)] * n_steps
            cases.append(replace(case, master=masters, gradients=still, moments=(zeros, zeros)))
        check(cases, "quick")


def test_noise_is_uniform_and_uncorrelated() -> None:
    """Over the elements of one step and over the steps of one element, within five standard deviations."""
    n = 1 << 18
    seeds, elements = torch.tensor([noise_seed(step) for step in range(n)]), torch.arange(n)
    for kind in (noise_of, other_noise_of):
        for noise in (kind(int(seeds[1]), elements), kind(int(seeds[-1]), elements), kind(seeds, elements * 0)):
            x = (noise.double() + 0.5) / 65536 - 0.5
            for mean, deviation in (
                (x.mean(), (1 / 12) ** 0.5),
                (x.square().mean() - 1 / 12, (1 / 180) ** 0.5),
                ((x[1:] * x[:-1]).mean(), 1 / 12),
            ):
                assert mean.abs() < 5 * deviation / n**0.5
            assert ((torch.bincount(noise // 1024, minlength=64) / (n / 64) - 1).abs() < 5 / (n / 64) ** 0.5).all()


def test_rounding_to_bfloat16_has_no_bias() -> None:
    """Each value is rounded up by as much noise as it is above its lower neighbour."""
    for bits in (0x00000001, 0x0000FFFF, 0x358637BD, 0x3F800000, 0x3F80FFFF, 0x7F7F8000):
        value = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        rounded = round_stochastically(value, torch.arange(65536)).view(torch.int32) >> 16
        assert set(rounded.tolist()) <= {bits >> 16, (bits >> 16) + 1}
        assert int((rounded - (bits >> 16)).sum()) == bits % 65536


@pytest.mark.parametrize("n", [127, 255])
def test_codes_in_8_bits_have_no_bias_and_keep_the_order(n: int) -> None:
    codes, noise = torch.arange(n).float().unsqueeze(1), torch.arange(32, 65536, 64)
    low, high = codes.square(), (codes + 1).square()
    for fraction in (0.001, 0.25, 0.5, 0.9, 0.999):
        ups = code_of_square(low + fraction * (high - low), n, noise) - codes
        assert ((ups == 0) | (ups == 1)).all()
        assert ((ups.mean(1) - fraction).abs() < 3e-3).all()
    squares = torch.cat([torch.linspace(0, n**2, 5001), torch.tensor([n**2 * (1 + 2.0**-23), math.inf])]).unsqueeze(1)
    found = code_of_square(squares, n, noise)
    assert (found.diff(dim=0) >= 0).all() and not found[0].any()
    assert (code_of_square(torch.tensor([[n**2 * (1 - 2.0**-24)]]), n, noise) == n).all()
    assert (found[5000:] == n).all()
