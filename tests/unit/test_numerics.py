import pytest
import torch
from vllm_sfa_cp.numerics import MismatchError, check_diff

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8, torch.bool])
def test_equal_tensors_give_false(dtype):
    a = torch.tensor([[1, 0, 1]]).to(dtype)
    assert check_diff(a, a.clone()) is False


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_scalar(shape):
    assert check_diff(torch.zeros(shape), torch.zeros(shape)) is False


@pytest.mark.parametrize("dtype", FLOATS)
def test_largest_absolute_and_relative_difference(dtype):
    a = torch.tensor([1.0, 8.0, 0.25]).to(dtype)
    b = torch.tensor([1.0, 6.0, 0.5]).to(dtype)
    assert check_diff(a, b) == (2.0, 0.5)


def test_relative_difference_is_to_the_second():
    assert check_diff(torch.tensor([2.0]), torch.tensor([4.0])) == (2.0, 0.5)
    assert check_diff(torch.tensor([4.0]), torch.tensor([2.0])) == (2.0, 1.0)
    assert check_diff(torch.tensor([1.0]), torch.tensor([0.0])) == (1.0, torch.inf)


def test_difference_is_not_lost_in_the_dtype():
    """In float8 240 - (-240) would saturate or overflow."""
    a = torch.tensor([240.0]).to(torch.float8_e4m3fn)
    assert check_diff(a, (-a.float()).to(a.dtype)) == (480.0, 2.0)
    assert check_diff(torch.tensor([2**62 + 1]), torch.tensor([2**62])) == (1.0, 2.0**-62)
    assert check_diff(torch.tensor([True]), torch.tensor([False])) == (1.0, torch.inf)
    assert check_diff(torch.tensor([255], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)) == (
        250,
        50,
    )


def test_infinities():
    inf = torch.tensor([torch.inf, 1.0])
    assert check_diff(inf, inf.clone()) is False
    assert check_diff(inf, -inf) == (torch.inf, torch.inf)
    assert check_diff(inf, torch.ones(2)) == (torch.inf, torch.inf)
    assert check_diff(torch.ones(2), inf) == (torch.inf, torch.inf)


def test_signed_zeros_are_equal():
    assert check_diff(torch.tensor([0.0]), torch.tensor([-0.0])) is False


def test_non_contiguous_and_requires_grad():
    a = torch.arange(6.0).view(2, 3).t().requires_grad_()
    assert check_diff(a, a.detach().clone()) is False


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shapes differ: \(2, 3\) and \(3, 2\)"),
        (torch.zeros(1), torch.zeros(()), "shapes differ"),
        (torch.zeros(2), torch.zeros(2).half(), "dtypes differ: torch.float32 and torch.float16"),
        (torch.tensor([torch.nan, 1]), torch.ones(2), "NaN in 1 and 0 of 2 elements"),
        (torch.ones(2), torch.tensor([1, torch.nan]), "NaN in 0 and 1 of 2 elements"),
        (torch.full((2,), torch.nan), torch.full((2,), torch.nan), "NaN in 2 and 2 of 2 elements"),
        (torch.zeros(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.complex64), "not supported"),
    ],
)
def test_what_cannot_be_compared_is_an_error(a, b, message):
    with pytest.raises(MismatchError, match=message):
        check_diff(a, b)
