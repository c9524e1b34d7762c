"""A number per tensor that sees every change and adds up over parts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from grpo_recipes.server import plugin as module  # noqa: E402
from grpo_recipes.server.plugin import fingerprint  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRAP = 1 << 64


@pytest.fixture(params=DTYPES, ids=str)
def tensor(request):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 48, generator=generator).to(request.param)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def nudged(tensor, **steps):
    """Return a copy with elements changed at these flat indices, each by so many units in the last place."""
    copy = tensor.clone()
    for index, step in steps.items():
        bits(copy).view(-1)[int(index[1:])] += step
    return copy


def test_it_is_one_number_and_repeatable(tensor):
    value = fingerprint(tensor)
    assert value.dtype == torch.int64 and value.shape == ()
    assert int(value) == int(fingerprint(tensor.clone()))


@pytest.mark.parametrize("index", [0, 1, 1000, 64 * 48 - 1])
@pytest.mark.parametrize("step", [1, -1])
def test_one_unit_in_the_last_place_of_one_element_changes_it(tensor, index, step):
    assert int(fingerprint(nudged(tensor, **{f"i{index}": step}))) != int(fingerprint(tensor))


def test_a_step_up_and_a_step_down_elsewhere_do_not_cancel(tensor):
    before = int(fingerprint(tensor))
    for other in range(1, 200):
        assert int(fingerprint(nudged(tensor, i0=1, **{f"i{other}": -1}))) != before


def test_zero_padding_adds_nothing(tensor):
    padded = torch.cat([tensor, torch.zeros(5, 48, dtype=tensor.dtype)])
    assert int(fingerprint(padded)) == int(fingerprint(tensor))


def test_the_parts_of_a_fused_tensor_add_up_to_the_whole(tensor):
    parts = tensor.split([10, 20, 34])
    assert sum(int(fingerprint(part)) for part in parts) % WRAP == int(fingerprint(tensor)) % WRAP
    columns = tensor.split([16, 32], dim=1)
    assert sum(int(fingerprint(part)) for part in columns) % WRAP == int(fingerprint(tensor)) % WRAP


@pytest.mark.parametrize("chunk", [1, 7, 3072, 1 << 22])
def test_how_much_is_summed_at_a_time_does_not_matter(tensor, chunk, monkeypatch):
    whole = int(fingerprint(tensor))
    monkeypatch.setattr(module, "_CPU_CHUNK", chunk)
    assert int(fingerprint(tensor)) == whole


def test_words_of_several_elements_see_and_add_up_the_same(tensor):
    whole = int(fingerprint(tensor, 8))
    assert int(fingerprint(tensor.clone(), 8)) == whole != int(fingerprint(tensor))
    for index in (0, 1, 2, 3, 1000, 64 * 48 - 1):
        assert int(fingerprint(nudged(tensor, **{f"i{index}": 1}), 8)) != whole
    for other in range(1, 200):
        assert int(fingerprint(nudged(tensor, i0=1, **{f"i{other}": -1}), 8)) != whole
    for parts in (tensor.split([10, 20, 34]), tensor.split([16, 32], dim=1)):
        assert sum(int(fingerprint(part, 8)) for part in parts) % WRAP == whole % WRAP
    padded = torch.cat([tensor, torch.zeros(5, 48, dtype=tensor.dtype)])
    assert int(fingerprint(padded, 8)) == whole


def test_a_word_may_begin_anywhere_in_a_larger_storage(tensor):
    part = tensor.view(-1)[1 : 1 + 48]
    assert int(fingerprint(part, 8)) == int(fingerprint(part.clone(), 8))


@pytest.mark.parametrize(("shape", "unit"), [((3, 8), 8), ((3, 4, 4), 8), ((3, 3), 2), ((3, 6), 2), ((8,), 2), ((), 2)])
def test_words_are_taken_where_rows_are_whole_words(shape, unit):
    assert module.choose_unit(torch.zeros(shape, dtype=torch.bfloat16)) == unit


def test_it_is_the_sum_of_the_mixed_bits(tensor):
    def signed(value):
        return (value + WRAP // 2) % WRAP - WRAP // 2

    total = 0
    for element in bits(tensor).view(-1).tolist():
        mixed = signed(element * 0x9E3779B97F4A7C1)
        total += (mixed ^ (mixed >> 29)) * 0x3C79AC492BA7B653
    assert int(fingerprint(tensor)) == signed(total)


def test_a_view_that_is_not_contiguous_counts_its_own_elements(tensor):
    assert int(fingerprint(tensor.t())) == int(fingerprint(tensor))
    assert int(fingerprint(tensor[:, ::2])) == int(fingerprint(tensor[:, ::2].contiguous()))


def test_the_tensor_is_left_as_it_was(tensor):
    before = tensor.clone()
    fingerprint(torch.nn.Parameter(tensor))
    assert torch.equal(bits(before), bits(tensor))
    wide = tensor.double()  # already as wide as the sum
    fingerprint(wide)
    assert torch.equal(wide, before.double())


@pytest.mark.parametrize("empty", [torch.empty(0), torch.zeros(4)])
def test_nothing_and_zeros_have_the_number_0(empty):
    assert int(fingerprint(empty)) == 0


def test_a_single_number_has_one_too():
    assert int(fingerprint(torch.tensor(1.5))) != int(fingerprint(torch.tensor(-1.5)))
