"""cuBLASLt's interface: how matrices are described to it, and what it is called with. The library is a stand-in in C."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import HANDLE, LAYOUTS, STREAM, Layout, by_rows, counted, exact, rows_apart

from parbank.ops import cublaslt
from parbank.ops.cublaslt import CublasError, Matmul, lie


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5))
def test_what_lies_in_lines_is_read_from_them(rows, cols, down, right, start):
    x = torch.arange(200).as_strided((rows, cols), (down, right), start)
    found = lie(x)
    if found is None:
        gaps = x.clone(memory_format=torch.contiguous_format)
        assert lie(gaps) is not None
        return
    inner, outer = (rows, cols) if found.by_columns else (cols, rows)
    assert found.step >= inner  # what the library insists on
    lines = torch.as_strided(x, (outer, inner), (found.step, 1), start)
    torch.testing.assert_close(lines.t() if found.by_columns else lines, x)


@pytest.mark.parametrize("of_c", [None, by_rows, rows_apart])
@pytest.mark.parametrize("of_b", LAYOUTS[:5])
@pytest.mark.parametrize("of_a", LAYOUTS[:5])
def test_every_layout_reaches_the_library(of_a: Layout, of_b: Layout, of_c: Layout | None, stand_in):
    for shape in ((5, 7, 6), (1, 3, 2), (4, 1, 3), (2, 3, 1)):
        a, b, c = counted(*shape)
        a, b, c = of_a(a), of_b(b), of_c(c) if of_c else None
        of = [None if x is None else lie(x) for x in (a, b, c)]
        matmul = Matmul(stand_in, HANDLE, torch.bfloat16, *of, wanted=8, workspace=64)
        assert len(matmul) == 4
        for index in (0, 2, 3):
            out = torch.full(shape[::2], torch.nan).bfloat16()
            matmul.run(index, (a, b, c), out, HANDLE, STREAM)
            assert torch.equal(out.double(), exact(a, b, c))


def test_a_status_is_an_error_in_words(stand_in):
    a, b, _ = counted(2, 3, 4)
    with pytest.raises(CublasError, match=r"cublasLtMatmulAlgoGetHeuristic returned 15 \(not supported\)"):
        Matmul(stand_in, HANDLE, torch.float16, lie(a), lie(b), None, wanted=8, workspace=64)
    matmul = Matmul(stand_in, HANDLE, torch.bfloat16, lie(a), lie(b), None, wanted=8, workspace=64)
    with pytest.raises(CublasError, match=r"cublasLtMatmul returned 15"):
        matmul.run(1, (a, b, None), torch.empty(2, 4).bfloat16(), HANDLE, STREAM)


def test_a_library_that_is_not_loaded_is_not_found():
    if torch.version.cuda is None:
        assert cublaslt.load() is None
