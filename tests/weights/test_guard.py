"""Test the comparison of the streamed weights with the reports of the server's workers."""

from __future__ import annotations

import pytest

from grpo_recipes.server.plugin import find_server_name
from grpo_recipes.weights.guard import (
    TOLERANCES,
    calibrate_tolerance,
    describe_checksum_error,
    describe_logprob_error,
    find_differences,
)

WRAP = 1 << 64
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = "model.layers.0"
STREAMED = {
    "model.embed_tokens.weight": 11,
    f"{LAYER}.self_attn.q_proj.weight": 1 << 62,
    f"{LAYER}.self_attn.k_proj.weight": 1 << 62,
    f"{LAYER}.self_attn.v_proj.weight": (1 << 62) + 5,
    f"{LAYER}.self_attn.o_proj.weight": -7,
    f"{LAYER}.mlp.gate_proj.weight": 100,
    f"{LAYER}.mlp.up_proj.weight": 200,
    "lm_head.weight": 13,
}
QKV, GATE_UP = f"{LAYER}.self_attn.qkv_proj.weight", f"{LAYER}.mlp.gate_up_proj.weight"
HELD = {
    "model.embed_tokens.weight": 11,
    QKV: (3 * (1 << 62) + 5) - WRAP,
    f"{LAYER}.self_attn.o_proj.weight": -7,
    GATE_UP: 300,
    "lm_head.weight": 13,
}


def report(packed=PACKED, **changes):
    """A worker's report; ``changes`` by the last part of a name before ``.weight``."""
    parameters = dict(HELD)
    for part, value in changes.items():
        (name,) = [name for name in parameters if name.removesuffix(".weight").endswith(part)]
        parameters[name] = value
    return {"parameters": {name: [value, "bfloat16"] for name, value in parameters.items()}, "packed": packed}


def without(mapping, *names):
    return {key: value for key, value in mapping.items() if key not in names}


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        (f"{LAYER}.self_attn.k_proj.weight", QKV),
        (f"{LAYER}.mlp.up_proj.weight", GATE_UP),
        (f"{LAYER}.mlp.down_proj.weight", None),
        ("visual.blocks.0.weight", None),
    ],
)
def test_where_the_server_holds_a_parameter(name, holder):
    assert find_server_name(name, HELD, PACKED) == holder


def test_equal_weights_do_not_differ_fused_and_wrapped_around_ones_included():
    assert find_differences(STREAMED, [report()]) == []


@pytest.mark.parametrize("part", ["embed_tokens", "qkv_proj", "o_proj", "gate_up_proj", "lm_head"])
def test_one_stale_parameter_is_named(part):
    (name,) = find_differences(STREAMED, [report(**{part: 999})])
    assert name.endswith(f"{part}.weight")


def test_all_stale_parameters_are_named():
    assert len(find_differences(STREAMED, [report(embed_tokens=0, qkv_proj=0, lm_head=0)])) == 3


def test_a_tied_head_that_both_leave_out_is_no_difference():
    tied = report()
    del tied["parameters"]["lm_head.weight"]
    assert find_differences(without(STREAMED, "lm_head.weight"), [tied]) == []


def test_a_parameter_the_server_holds_and_nobody_sent_is_named():
    assert find_differences(without(STREAMED, "lm_head.weight"), [report()]) == ["lm_head.weight"]


def test_a_parameter_that_found_no_place_is_told():
    one_less = report()
    del one_less["parameters"]["lm_head.weight"]
    assert find_differences(STREAMED, [one_less]) == ["(no parameter of the server matches)"]


def test_two_shards_add_up_and_copies_agree():
    first = report(qkv_proj=1 << 61, gate_up_proj=120)
    second = report(qkv_proj=HELD[QKV] - (1 << 61), gate_up_proj=180)
    assert find_differences(STREAMED, [first, second]) == []
    assert find_differences(STREAMED, [first, report(qkv_proj=HELD[QKV] - (1 << 61), gate_up_proj=181)]) == [GATE_UP]


def test_one_of_two_copies_that_is_stale_is_named():
    assert find_differences(STREAMED, [report(), report()]) == []
    assert find_differences(STREAMED, [report(), report(o_proj=-8)]) == [f"{LAYER}.self_attn.o_proj.weight"]


def renamed(**changes):
    """The same model under names of vLLM's own."""
    plain = report(**changes)
    return {
        "parameters": {f"language_model.{name}": entry for name, entry in plain["parameters"].items()},
        "packed": {},
    }


def test_names_that_vllm_changes_are_compared_by_their_total():
    assert find_differences(STREAMED, [renamed()]) == []
    assert len(find_differences(STREAMED, [renamed(embed_tokens=12)])) == len(HELD)


def test_known_names_are_still_compared_one_by_one_when_others_are_renamed():
    mixed = report()
    mixed["parameters"]["head.own_name"] = mixed["parameters"].pop("lm_head.weight")
    assert find_differences(STREAMED, [mixed]) == []
    mixed["parameters"]["head.own_name"] = [14, "bfloat16"]
    assert find_differences(STREAMED, [mixed]) == ["head.own_name"]


def test_a_verdict_names_the_bridge_and_a_few_parameters():
    assert describe_checksum_error("file", [[]]) is None
    verdict = describe_checksum_error("file", [["a", "b", "c", "d", "e"]])
    assert "'file' bridge" in verdict and "a, b, c and 2 more" in verdict
    assert "more" not in describe_checksum_error("nccl", [["a", "b"]])


def test_a_verdict_names_both_numbers_of_a_sync():
    old = [[{"sync": 4}, {"sync": 3}]]
    assert describe_checksum_error("file", [[]], 4, [[{"sync": 4}]]) is None
    assert "bridge: it has the weights of sync 3, and the trainer sent sync 4" in describe_checksum_error(
        "file", [[]], 4, old
    )
    assert "trainer in a; it has the weights of sync 3, and" in describe_checksum_error("file", [["a"]], 4, old)
    assert describe_checksum_error("file", [[]], 0, old) is None  # nothing was sent yet


def test_a_verdict_names_the_replicas_that_are_wrong():
    new, old = [{"sync": 4}, {"sync": 4}], [{"sync": 3}, {"sync": 4}]
    assert describe_checksum_error("file", [[], []], 4, [new, new]) is None
    assert describe_checksum_error("file", [[], []], 4, [new, old]).endswith(
        "'file' bridge: replica 1: it has the weights of sync 3, and the trainer sent sync 4"
    )
    assert "bridge: replica 0: after the sync it holds other values than the trainer in a; replica 1: it has" in (
        describe_checksum_error("file", [["a"], []], 4, [new, old])
    )


@pytest.mark.parametrize(
    ("difference", "fails"), [(0.0, False), (0.01, False), (0.0101, True), (float("inf"), True), (float("nan"), True)]
)
def test_log_probs_beyond_the_tolerance_fail(difference, fails):
    verdict = describe_logprob_error("file", difference, 0.01)
    assert (verdict is not None) is fails
    if fails:
        assert "weight_guard_tolerance" in verdict and "'file' bridge" in verdict


def test_every_trained_dtype_has_a_tolerance():
    assert set(TOLERANCES) == {"float32", "float16", "bfloat16"}
    assert TOLERANCES["float32"] < TOLERANCES["bfloat16"]


def test_the_first_healthy_syncs_lower_a_tolerance_and_never_raise_it():
    assert calibrate_tolerance(5e-2, [2e-3, 1e-3]) == 5e-2  # too few
    assert calibrate_tolerance(5e-2, [2e-3, 1e-3, 1e-3]) == pytest.approx(2e-2)
    assert calibrate_tolerance(5e-2, [1e-5, 1e-5, 1e-5]) == pytest.approx(5e-3)
    assert calibrate_tolerance(5e-2, [4e-2, 1e-5, 1e-5]) == 5e-2
