"""A second method in Megatron's training loop, started by its flags."""

import pytest
import sign_momentum
from pretrain_runs import train


@pytest.fixture(autouse=True)
def method():
    with sign_momentum.registered():
        yield


def test_sign_momentum_trains_saves_and_resumes_by_its_flags(tmp_path):
    common = [
        "--optimizer",
        "signmomentum",
        "--signmomentum-update-scale",
        "0.1",
        "--train-iters",
        "4",
        "--eval-iters",
        "0",
        "--eval-interval",
        "100",
    ]
    common += ["--save-interval", "2", "--ckpt-format", "torch_dist"]
    whole = train([*common, "--save", str(tmp_path / "a")])
    rest = train([*common, "--load", str(tmp_path / "a"), "--ckpt-step", "2", "--save", str(tmp_path / "b")])
    assert [step.iteration for step in rest[0].steps] == [3, 4]
    assert rest[0].losses == whole[0].losses[2:]
    assert whole[0].losses[-1] < whole[0].losses[0]
