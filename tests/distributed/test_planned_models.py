"""The parameters that tools/planning describes are those of Megatron's models: names, shapes, order, who has them."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import planned_models
import pytest

import testbed

testbed.enable()

from testbed import processes  # noqa: E402  (Megatron is imported after the patches)

PROGRAM = Path(planned_models.__file__)
LOCAL = planned_models.cases(transformer_engine=False)


def check(ranks, parallel):
    """Names of experts differ between expert-parallel ranks, and the plan has the first one's."""
    assert len(ranks) == planned_models.ranks_of(parallel)
    for rank, chunks in enumerate(ranks):
        assert len(chunks) == parallel.chunks
        for real, planned in chunks:
            if rank // parallel.expert_tensor % parallel.expert:
                assert [entry[1:] for entry in planned] == [entry[1:] for entry in real]
            else:
                assert planned == real


@pytest.mark.parametrize("case", LOCAL)
def test_parameters_are_those_of_megatrons_own_layers(case):
    sizes, parallel = LOCAL[case]
    check(processes.run(planned_models.ranks_of(parallel), planned_models.compare, sizes, parallel), parallel)


@pytest.fixture(scope="module")
def with_transformer_engine(tmp_path_factory):
    results = tmp_path_factory.mktemp("planned") / "results.pickle"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(results)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(results.read_bytes())


@pytest.mark.full
@pytest.mark.parametrize("case", planned_models.cases(transformer_engine=True))
def test_parameters_are_those_of_transformer_engines_layers(case, with_transformer_engine):
    _, parallel = planned_models.cases(transformer_engine=True)[case]
    check(with_transformer_engine[case], parallel)
