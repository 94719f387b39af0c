"""What is added to `torch.autocast`: operations with weights of 16 bits and float32 beside them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zenflow.deepspeed.environment import _WIDENED, complete_autocast

PLACES = torch.tensor([3, 0, 2])
ROWS = PLACES[:, None].expand(3, 4)
MASK = torch.tensor([True, False, True, True, False])

# (weight [3, 4], vector [4], float32 zeros [5, 4], float32 statistics [4]) -> output.
OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "batch_norm": lambda w, v, z, s: F.batch_norm(z + 2, s, s + 1, v, v),
    "instance_norm": lambda w, v, z, s: F.instance_norm(z[None].mT + 2, s, s + 1, v, v, use_input_stats=False),
    "layer_norm": lambda w, v, z, s: F.layer_norm(z + s, (4,), v, v),
    "group_norm": lambda w, v, z, s: F.group_norm(z + s, 2, v, v),
    "embedding_bag": lambda w, v, z, s: F.embedding_bag(
        PLACES % 3, w, PLACES[1:2], per_sample_weights=s[:3], mode="sum"
    ),
    "dot": lambda w, v, z, s: torch.dot(v, s),
    "inner": lambda w, v, z, s: torch.inner(w, s),
    "linalg_cross": lambda w, v, z, s: torch.linalg.cross(w[:, :3], s[:3].expand(3, 3)),
    "mv": lambda w, v, z, s: torch.mv(w, s),
    "tensordot": lambda w, v, z, s: torch.tensordot(z + 1, w.mT, 1),
    "vdot": lambda w, v, z, s: torch.vdot(s, v),
    "addmv": lambda w, v, z, s: torch.addmv(s[:3], w, v.float()),
    "bilinear": lambda w, v, z, s: F.bilinear(s[None], s[None], w[:, None, :].expand(3, 4, 4)),
    "lerp": lambda w, v, z, s: torch.lerp(torch.lerp(s, v, 0.3), v, v.sigmoid()),
    "index_put": lambda w, v, z, s: z.index_put((PLACES,), w, accumulate=True),
    "index_put_": lambda w, v, z, s: z.clone().index_put_((PLACES,), w),
    "masked_scatter": lambda w, v, z, s: z.masked_scatter(MASK[:, None], w),
    "masked_scatter_": lambda w, v, z, s: z.clone().masked_scatter_(MASK[:, None], w),
    "index_add": lambda w, v, z, s: z.index_add(0, PLACES, w, alpha=2),
    "index_add_": lambda w, v, z, s: z.clone().index_add_(0, PLACES, w),
    "index_copy": lambda w, v, z, s: z.index_copy(0, PLACES, w),
    "index_copy_": lambda w, v, z, s: z.clone().index_copy_(0, PLACES, w),
    "index_reduce": lambda w, v, z, s: z.index_reduce(0, PLACES, w, "mean"),
    "index_reduce_": lambda w, v, z, s: z.clone().index_reduce_(0, PLACES, w, "amax"),
    "scatter": lambda w, v, z, s: z.scatter(0, ROWS, w),
    "scatter_": lambda w, v, z, s: z.clone().scatter_(0, ROWS, w),
    "scatter_add": lambda w, v, z, s: z.scatter_add(0, ROWS, w),
    "scatter_add_": lambda w, v, z, s: z.clone().scatter_add_(0, ROWS, w),
    "scatter_reduce": lambda w, v, z, s: z.scatter_reduce(0, ROWS, w, "sum"),
    "scatter_reduce_": lambda w, v, z, s: z.clone().scatter_reduce_(0, ROWS, w, "mean"),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_weights_of_16_bits_beside_float32(name: str, dtype: torch.dtype) -> None:
    """Result and gradients are those of weights in float32 with the same values."""
    complete_autocast("cpu")
    results = []
    for of_weights in (dtype, torch.float32):
        w, v = (torch.linspace(-1, 2, n).to(dtype).to(of_weights).requires_grad_() for n in (12, 4))
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            output = OPERATIONS[name](w.view(3, 4), v, torch.zeros(5, 4), torch.linspace(0.5, 1.5, 4))
        output.float().square().sum().backward()
        results.append([output, *(p.grad.float() for p in (w, v) if p.grad is not None)])
    assert results[0][0].dtype == results[1][0].dtype == torch.float32
    torch.testing.assert_close(results[0], results[1], rtol=4 * torch.finfo(dtype).eps, atol=1e-3)


def test_all_are_tested() -> None:
    assert {name.partition(".")[0] for name in _WIDENED} == set(OPERATIONS)


def test_inputs_of_16_bits_keep_their_type_and_statistics_are_followed() -> None:
    complete_autocast("cpu")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    mean, var = torch.zeros(4), torch.ones(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = F.batch_norm(x, mean, var, torch.ones(4).bfloat16(), torch.zeros(4).bfloat16(), training=True)
    assert output.dtype == torch.bfloat16 and mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(mean, 0.1 * x.float().mean(0))
