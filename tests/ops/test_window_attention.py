"""Attention over a running window, held against a masked softmax in float64."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from aot import Job, build
from checking import TOLERANCE, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

from parbank.errors import ParbankError
from parbank.ops import backend, configs, reference, window_attention
from parbank.ops.window_attention import WIDTHS, launch_config, without_tma

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {
    "plain": launch_config(16, 16, 4, 1),
    "wide": launch_config(16, 32, 4, 1),
    "stacked": launch_config(32, 16, 4, 1, stack=True),
    "descriptors": launch_config(16, 16, 4, 1, stack=True, tma=True),
}
"""Tiles so small that short texts have edges, a middle and a diagonal. On a GPU a product has at least 64 rows a warpgroup."""
if DEVICE.type == "cuda":
    SMALL = {
        "plain": launch_config(64, 64, 4, 2),
        "wide": launch_config(64, 128, 4, 2),
        "stacked": launch_config(128, 32, 8, 2, stack=True),
        "descriptors": launch_config(64, 64, 4, 2, stack=True, tma=True),
    }


def exact(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int) -> Tensor:
    """The definition, written out: one matrix of all scores in float64."""
    keys, values = (torch.cat(pair, 1).double() for pair in ((past_k, k), (past_v, v)))
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (keys, values))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) / q.shape[3] ** 0.5
    key = torch.arange(keys.shape[1], device=q.device)
    own = past_k.shape[1] + torch.arange(q.shape[1], device=q.device)[:, None]
    seen = (key <= own) & (key > own - window) & ((key >= low[:, None]) | (key == own))
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def made(time: int, carried: int, dtype: torch.dtype, *, batch=1, heads=2, kv_heads=1, width=16) -> list[Tensor]:
    shapes = [(time, heads), (carried, kv_heads), (carried, kv_heads), (time, kv_heads), (time, kv_heads)]
    return [torch.randn(batch, length, n, width, device=DEVICE).to(dtype) for length, n in shapes]


def documents(time: int, carried: int, starts: list[int]) -> Tensor:
    """The first key of each query's document: one has begun before the segment, the others at these places of it."""
    low = torch.zeros(time, dtype=torch.int64, device=DEVICE)
    for first, last in pairwise([*starts, time]):
        low[first:last] = carried + first
    return low


def check(tensors: list[Tensor], low: Tensor, window: int, config: str = "plain") -> None:
    with configs.force("window_attention", SMALL[config]), configs.force("window_attention_float32", SMALL[config]):
        found = window_attention(*tensors, low, window)
    expected = exact(*tensors, low, window)
    assert (found.dtype, found.shape) == (tensors[0].dtype, tensors[0].shape)
    assert (found.double() - expected).abs().max() <= 2 * TOLERANCE[found.dtype]


@pytest.mark.parametrize("config", SMALL)
@pytest.mark.parametrize(
    ("time", "carried", "window", "starts"),
    [
        (1, 0, 1, []),
        (1, 8, 9, []),
        (37, 0, 100, []),
        (50, 19, 20, []),
        (24, 70, 71, []),
        (40, 5, 33, []),
        (70, 40, 41, [0, 3, 17, 18, 55]),
        (33, 20, 12, [16, 32]),
        (300, 99, 100, [77, 200]),
    ],
)
def test_matches_a_masked_softmax(config, time, carried, window, starts, dtype, poison):
    if time == 300 and DEVICE.type == "cpu":
        time, starts = 100, [77]
    check(made(time, carried, dtype), documents(time, carried, starts), window, config)


def test_each_text_of_a_batch_has_its_own_keys(dtype, poison):
    check(made(20, 9, dtype, batch=3), documents(20, 9, []), 10)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (6, 2), (4, 4)])
def test_any_grouping_of_heads(heads, kv_heads, dtype, poison):
    """Of three heads that share a key none can be stacked; the tiles are then of one head each."""
    for config in ("plain", "stacked"):
        check(made(20, 15, dtype, heads=heads, kv_heads=kv_heads), documents(20, 15, [9]), 16, config)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_in_the_table_s_own_tiles(width, dtype, poison):
    tensors = made(150, 60, dtype, width=width)
    low = documents(150, 60, [140])
    found = window_attention(*tensors, low, 61)
    assert (found.double() - exact(*tensors, low, 61)).abs().max() <= 2 * TOLERANCE[dtype]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_window_and_any_documents(data: st.DataObject) -> None:
    time, carried = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 30))
    window = data.draw(st.integers(1, 60))
    starts = sorted(data.draw(st.sets(st.integers(0, time - 1), max_size=5)))
    config = data.draw(st.sampled_from(list(SMALL)))
    with backend.use_backend("triton"):
        check(made(time, carried, torch.float32, batch=1), documents(time, carried, starts), window, config)


def test_a_query_sees_itself_whatever_low_says(dtype):
    tensors = made(20, 4, dtype)
    low = torch.full((20,), 1000, device=DEVICE)
    found = window_attention(*tensors, low, 5)
    torch.testing.assert_close(found, tensors[4].repeat_interleave(2, 2))
    torch.testing.assert_close(reference.window_attention(*tensors, low, 5), found)


def test_keys_out_of_reach_are_never_used(dtype):
    """Not-a-numbers where the first query's reach has not begun, as in the carry at the start of a text."""
    tensors = made(40, 30, dtype)
    low = torch.full((40,), 23, device=DEVICE)
    expected = window_attention(*tensors, low, 31)
    tensors[1][:, :23] = float("nan")
    assert torch.equal(window_attention(*tensors, low, 31), expected)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's, from the interpreter: the overflow is what is looked for
@pytest.mark.parametrize("config", ["plain", "wide"])
def test_large_scores_do_not_overflow(config, dtype):
    tensors = made(40, 10, dtype)
    tensors[0] *= 100
    low = documents(40, 10, [])
    with configs.force("window_attention", SMALL[config]), configs.force("window_attention_float32", SMALL[config]):
        found = window_attention(*tensors, low, 11)
    assert (found.double() - exact(*tensors, low, 11)).abs().max() <= 0.02


@pytest.mark.parametrize("config", SMALL)
def test_views_are_read_where_they_lie(config, dtype):
    """Queries, keys and values as slices of one product, and the carry as slices of a longer one, time inside the heads."""
    row = torch.randn(2, 24, 8, 16, device=DEVICE).to(dtype)
    q, k, v = row.split([4, 2, 2], dim=2)
    past = torch.randn(2, 4, 90, 16, device=DEVICE).to(dtype).transpose(1, 2)[:, 33:64]
    past_k, past_v = past.split(2, dim=2)
    check([q, past_k, past_v, k, v], documents(24, 31, []), 32, config)


def test_strided_channels_are_copied(dtype):
    tensors = [x[..., ::2] for x in made(20, 7, dtype, width=32)]
    check(tensors, documents(20, 7, []), 8)


def test_low_may_be_of_any_whole_type_and_strided(dtype):
    tensors, low = made(20, 7, dtype), documents(20, 7, [11])
    expected = window_attention(*tensors, low, 8)
    assert torch.equal(window_attention(*tensors, low.int(), 8), expected)
    assert torch.equal(window_attention(*tensors, low.repeat_interleave(2)[::2], 8), expected)


def test_nothing_in_nothing_out(dtype):
    assert window_attention(*made(0, 7, dtype), documents(0, 7, []), 8).shape == (1, 0, 2, 16)
    with backend.use_backend("reference"):
        assert window_attention(*made(0, 7, dtype), documents(0, 7, []), 8).shape == (1, 0, 2, 16)


def test_the_reference_is_the_definition():
    for time, carried, window, starts in ((300, 99, 100, [77, 200]), (5, 9, 3, []), (200, 0, 1, []), (90, 20, 64, [0])):
        tensors, low = made(time, carried, torch.float64), documents(time, carried, starts)
        found = reference.window_attention(*tensors, low, window)
        torch.testing.assert_close(found, exact(*tensors, low, window))


def test_other_widths_and_types_take_the_reference():
    odd, low = made(20, 7, torch.float32, width=24), documents(20, 7, [])
    assert torch.equal(window_attention(*odd, low, 8), reference.window_attention(*odd, low, 8))
    with backend.use_backend("auto"):
        wide = made(20, 7, torch.float64)
        torch.testing.assert_close(window_attention(*wide, low, 8), exact(*wide, low, 8))


def test_a_gradient_is_refused_in_words_and_had_from_the_reference():
    tensors, low = [x.requires_grad_() for x in made(9, 3, torch.float32)], documents(9, 3, [])
    with pytest.raises(ParbankError, match=r"no backward.*use_backend"):
        window_attention(*tensors, low, 4).sum().backward()
    with backend.use_backend("reference"):
        window_attention(*tensors, low, 4).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": (1, 5, 2, 16)}, "do not fit"),
        ({"past_v": (1, 3, 1, 16)}, "do not fit"),
        ({"q": (1, 6, 3, 16)}, "a multiple of kv_heads"),
        ({"q": (6, 4, 16)}, "do not fit"),
        ({"low": (5,)}, r"one a query, \(6,\)"),
        ({"window": 0}, "at least 1 key"),
        ({"dtype": torch.float16}, "cast them to one type"),
    ],
)
def test_wrong_arguments_are_named(change, said):
    shapes = {"q": (1, 6, 4, 16), **dict.fromkeys(("past_k", "past_v"), (1, 3, 2, 16))}
    shapes |= dict.fromkeys(("k", "v"), (1, 6, 2, 16)) | {n: s for n, s in change.items() if isinstance(s, tuple)}
    low = torch.zeros(shapes.pop("low", (6,)), dtype=torch.int64, device=DEVICE)
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    tensors["v"] = tensors["v"].to(change.get("dtype", torch.float32))
    with pytest.raises(ParbankError, match=said):
        window_attention(**tensors, low=low, window=change.get("window", 4))


def test_opcheck():
    arguments = (*made(9, 3, torch.float32), documents(9, 3, []), 4)
    torch.library.opcheck(torch.ops.parbank.window_attention.default, arguments)


def test_it_is_one_graph_and_compiled_once():
    torch._dynamo.reset()
    counters.clear()
    compiler = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda *x: window_attention(*x, 8) * 2, fullgraph=True, dynamic=False, backend=compiler)
    for _ in range(3):
        tensors, low = made(20, 7, torch.float32), documents(20, 7, [5])
        torch.testing.assert_close(compiled(*tensors, low), window_attention(*tensors, low, 8) * 2)
    assert counters["stats"]["unique_graphs"] == 1


def aot_job(launch: configs.Launch, capability: int, width: int, kind: str, group: int) -> Job:
    signature = dict.fromkeys(("q", "past_k", "past_v", "k", "v", "y"), f"*{kind}") | {
        "low": "*i64",
        "scale": "fp32",
    }
    strides = [f"{name}_{axis}" for name in ("q", "pk", "pv", "k", "v") for axis in "bth"]
    signature |= dict.fromkeys(("time", "carried", "window", *strides), "i32")
    blocks = dict(launch.blocks)
    if blocks["TMA"]:
        described = f"tensordesc<{kind}[1,{blocks['BLOCK_N']},1,{width}]>"
        signature |= dict.fromkeys(("past_k", "past_v", "k", "v"), described)
    constexprs = blocks | {"STACK": group if blocks["STACK"] else 1, "HEADS": 8, "GROUP": group, "WIDTH": width}
    aligned = [n for n, t in signature.items() if (t[0] == "*" or t == "i32") and n != "carried"]  # window - 1 is odd
    options = (launch.num_warps, launch.num_stages, dict(launch.options), aligned)
    return Job("parbank.ops.window_attention:_window_attention_kernel", signature, constexprs, capability, *options)


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    jobs = []
    for arch, capability in configs.ARCHITECTURES.items():
        for op, kind in (("window_attention", "bf16"), ("window_attention_float32", "fp32")):
            for limit, launch in configs.tables()[op][arch]:
                width, group = 64 if limit == 64 else 128, 2
                jobs.append(aot_job(launch, capability, width, kind, group))
                if launch.blocks["TMA"]:  # keys that the copy engine cannot address
                    jobs.append(aot_job(without_tma(launch), capability, width, kind, group))
    for job, built in zip(jobs, build(jobs), strict=True):
        described = job.constexprs["TMA"]
        assert built.stack == 0 or (job.capability != 90 and not described), (job, built)
        arch = next(name for name, capability in configs.ARCHITECTURES.items() if capability == job.capability)
        assert built.shared <= configs.SHARED_LIMIT[arch], (job, built)


def flash(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    keys, values = torch.cat([past_k, k], 1)[0], torch.cat([past_v, v], 1)[0]
    runs = [torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (q.shape[1], len(keys))]
    y, *_ = torch.ops.aten._flash_attention_forward(
        q[0], keys, values, *runs, q.shape[1], len(keys), 0.0, False, False,
        window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return y[None]


def golf(dtype: torch.dtype, time: int = 5000) -> list[Tensor]:
    return made(time, 2047, dtype, batch=1, heads=8, kv_heads=4, width=64)


def exact_end(tensors: list[Tensor], low: Tensor) -> Tensor:
    """Of the last 500 queries of a text longer than a window; all the scores of a long one would not fit."""
    q, _, _, k, v = tensors
    earlier = [x[:, -2547:-500] for x in (k, v)]
    shifted = (low[-500:] - (q.shape[1] - 500)).clamp(min=0)
    return exact(q[:, -500:], *earlier, k[:, -500:], v[:, -500:], shifted, 2048)


def error(found: Tensor, tensors: list[Tensor], low: Tensor) -> float:
    return (found[:, -500:].double() - exact_end(tensors, low)).norm().item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_exact_as_flash_attention(dtype):
    tensors, low = golf(dtype), documents(5000, 2047, [])
    ours, theirs = (error(y, tensors, low) for y in (window_attention(*tensors, low, 2048), flash(*tensors, 2048)))
    # Both round p relative to the largest score so far, which depends on the blocks: parts in a thousand either way.
    assert ours <= 1.005 * theirs, (ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_same_bits_every_time(compiled):
    tensors, low = golf(torch.bfloat16, 20_000), documents(20_000, 2047, [333, 9000])
    call: Callable[..., Tensor] = torch.compile(window_attention, fullgraph=True) if compiled else window_attention
    assert_same_bits(lambda *x: call(*x, low, 2048), tensors, backward=False)
    assert torch.equal(window_attention(*tensors, low, 2048), call(*tensors, low, 2048))


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False])
def test_more_than_two_to_the_31_elements(tma):
    """In the keys and values too, of which there are half as many; through descriptors and through pointers."""
    time = 2**22 + 77
    shapes = [(time, 16), (2047, 8), (2047, 8), (time, 8), (time, 8)]
    tensors = [torch.randn(1, length, n, 64, device=DEVICE, dtype=torch.bfloat16) for length, n in shapes]
    low = documents(time, 2047, [333, time - 200])
    with configs.force("window_attention", launch_config(128, 64, 8, 3, stack=True, tma=tma)):
        found = window_attention(*tensors, low, 2048)
    assert (found[:, -500:].double() - exact_end(tensors, low)).abs().max() <= 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
def test_where_a_text_is_cut_changes_rounding_only():
    tensors, low = golf(torch.bfloat16, 6000), documents(6000, 2047, [2500])
    whole = window_attention(*tensors, low, 2048)
    q, past_k, past_v, k, v = tensors
    carry = [torch.cat([p, x[:, :2345]], 1)[:, -2047:] for p, x in ((past_k, k), (past_v, v))]
    later = (low[2345:] - 2345).clamp(min=0)
    part = window_attention(q[:, 2345:], *carry, k[:, 2345:], v[:, 2345:], later, 2048)
    torch.testing.assert_close(part, whole[:, 2345:], rtol=2e-2, atol=5e-3)
