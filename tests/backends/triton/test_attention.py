"""The Triton kernels of attention in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

attending = pytest.importorskip("attending")  # it imports kernels
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="interprets kernels: TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", attending.TYPES, ids=str)
@pytest.mark.parametrize("shape", attending.SHAPES, ids=str)
def test_it_is_near_torch_in_f64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    attending.assert_near_f64(shape, dtype, CPU)


def test_a_row_has_the_same_bits_alone_padded_and_after_a_prompt() -> None:
    attending.assert_one_answer(torch.bfloat16, CPU, 260)


def test_strided_operands_give_the_bits_of_dense_ones() -> None:
    attending.assert_strides_do_not_matter(CPU)


def test_special_values_end_as_in_torch() -> None:
    attending.assert_special_values(CPU)
