"""What is captured of Megatron's Transformer Engine layers is the moment of what multiplied their weights.

The layers are stand-ins below Megatron's own wrappers (tests/testbed/transformer_engine.py), in models that Megatron
builds from its Transformer Engine specification. te_cases.py runs them in a program of its own. Where Transformer
Engine's Python package is installed, MEGATRON_DOBB_REAL_TE=1 takes its own classes, all but their forward functions.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from te_cases import BATCH, BLOCKS, CASES, MODELS, ONE

pytestmark = pytest.mark.full

ASK_FOR_REAL_CLASSES = "MEGATRON_DOBB_REAL_TE"
TOKENS = BATCH * 16
KINDS = {
    "layer norm": {"TELayerNormColumnParallelLinear", "TERowParallelLinear"},
    "grouped experts": {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "TEColumnParallelLinear"},
    "single experts": {"TEColumnParallelLinear", "TERowParallelLinear"},
    "latent experts": {"TELinear"},
    "latent attention": {"TELinear", "TEColumnParallelLinear", "TERowParallelLinear"},
    "latent attention with norms": {"TELinear", "TELayerNormColumnParallelLinear"},
}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("te") / "results"
    program = Path(__file__).with_name("te_cases.py")
    real = ["--real"] if os.environ.get(ASK_FOR_REAL_CLASSES) == "1" else []
    done = subprocess.run([sys.executable, program, path, *real], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(CASES, torch.load(path, weights_only=False), strict=True))


def moment(x):
    """`sum x_j x_j^T` of every block, in float64; the columns may be one tensor-parallel rank's."""
    return lambda width: torch.einsum("tjc,tjd->jcd", *[x.double().unflatten(1, (-1, width))] * 2)


def assert_moment(total, tokens, multiplied):
    assert tokens == len(multiplied)
    if tokens:
        torch.testing.assert_close(total.double(), moment(multiplied)(total.shape[-1]), rtol=1e-5, atol=1e-5)
    else:
        assert total is None


@every_case
def test_what_is_captured_is_the_moment_of_what_multiplied_the_weight(results, case):
    ranks = results[case]
    for number, rank in enumerate(ranks):
        for name, weight in rank["weights"].items():
            if not weight["geometry"].tokens_over_tp or weight["geometry"].replicated:
                assert_moment(weight["total"], weight["tokens"], weight["multiplied"])
                continue
            shards = [other["weights"][name] for other in tensor_parallel_ranks(ranks, number)]
            total = sum(shard["total"] for shard in shards)
            assert_moment(total, sum(shard["tokens"] for shard in shards), weight["multiplied"])


def tensor_parallel_ranks(ranks, number):
    """Of one rank; Megatron puts them next to each other."""
    size = 1 + max(other["tensor_rank"] for other in ranks)
    first = number // size * size
    return ranks[first : first + size]


@every_case
def test_whether_ranks_see_different_tokens_is_known_of_every_weight(results, case):
    """Counted, for weights that are no experts: over the ranks that the adapter names, every token comes once."""
    ranks = results[case]
    tensor = 1 + max(rank["tensor_rank"] for rank in ranks)
    for number, rank in enumerate(ranks):
        for name, weight in rank["weights"].items():
            if weight["routed"]:
                assert not weight["geometry"].tokens_over_tp
                assert not weight["geometry"].replicated
                continue
            shards = [other["weights"][name]["tokens"] for other in tensor_parallel_ranks(ranks, number)]
            assert shards == [TOKENS // (tensor if weight["geometry"].tokens_over_tp else 1)] * tensor
            assert weight["geometry"].replicated == (weight["kind"] == "TELinear" and tensor > 1)


@every_case
def test_shapes_and_names_are_those_of_the_whole_model_and_every_weight_is_held(results, case):
    ranks, whole = results[case], results[case[0], ONE][0]["weights"]
    assert set().union(*(rank["weights"] for rank in ranks)) == set(whole)
    for rank in ranks:
        for name, weight in rank["weights"].items():
            found, expected = weight["geometry"], whole[name]["geometry"]
            assert (found.rows, found.columns) == (expected.rows, expected.columns) == whole[name]["shape"]
            assert weight["shape"][1] * found.column_shards == found.columns
            assert found.columns % BLOCKS == 0


@every_case
def test_experts_and_no_other_weights_are_dealt_tokens_by_a_router(results, case):
    for rank in results[case]:
        for name, weight in rank["weights"].items():
            assert weight["routed"] == (".experts." in name)
            separate = case[1].expert > 1 or case[1].expert_tensor != case[1].tensor
            assert weight["expert_parallel"] == (weight["routed"] and separate)


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_of_a_transformer_engine_model_is_left_without_an_adapter(results, name):
    (rank,) = results[name, ONE]
    missing = {reason for reason in rank["reasons"] if "no adapter" in reason}
    assert missing <= {"no adapter for Embedding", "no adapter for TopKRouter"}
    assert KINDS.get(name, set()) <= {weight["kind"] for weight in rank["weights"].values()}


def test_the_tests_above_cover_experts_without_a_token(results):
    weights = [weight for ranks in results.values() for rank in ranks for weight in rank["weights"].values()]
    assert {weight["kind"] for weight in weights if weight["tokens"] == 0} == {
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
    }
