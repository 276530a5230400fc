"""The plain optimizer under DistributedDataParallel: two processes compute what one does with the same global batch."""

import copy

import flips
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from megatron_dobb import Dobb
from megatron_dobb.errors import CaptureError, LayoutError, NonFiniteError
from testbed import processes

BATCH, LENGTH, STEPS, LR = 8, 16, 12, 0.01


class Mlp(nn.Module):
    """Two ragged layers and one that is used only when asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 12, bias=False)
        self.spare = nn.Linear(24, 12)

    def forward(self, x, spare=False):
        y = self.second(self.first(x).tanh())
        return y + self.spare(x) if spare else y


def mlp():
    torch.manual_seed(3)
    return Mlp()


def batch(step):
    return torch.randn(BATCH, LENGTH, 24, generator=torch.Generator().manual_seed(step))


def dealt(x, micro_batches):
    """This rank's micro-batches of a global batch, dealt out in turns."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return list(x.chunk(micro_batches * ranks))[rank::ranks]


def backward(model, x, micro_batches=1, **inputs):
    parts = dealt(x, micro_batches)
    for part in parts:
        ((model(part, **inputs) - part[..., :12].sin()).square().mean() / len(parts)).backward()


def setup(unused=True, **settings):
    """A model, wrapped where there are other ranks, and its optimizer."""
    model = mlp()
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = DistributedDataParallel(model, find_unused_parameters=unused)
    return model, Dobb(model, lr=LR, blocks=4, **settings)


def train(model, optimizer, steps, micro_batches=1):
    for step in steps:
        optimizer.zero_grad()
        backward(model, batch(step), micro_batches)
        optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What torch imports for the first optimizer, the ranks then need not import again."""
    setup()


def snapshot(model, optimizer):
    return copy.deepcopy((getattr(model, "module", model).state_dict(), optimizer.state_dict()))


def on_dobb(state):
    """The tensors of the weights on Dobb, by name."""
    group = next(group for group in state["param_groups"] if group["dobb"])
    return {name: state["state"][key] for key, name in zip(group["params"], state["dobb"]["names"], strict=True)}


def assert_same(one, other):
    """Equal to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_two_processes_equal_one_to_the_last_bit_where_sums_are_exact():
    """Whole numbers add up the same in any order, so moments, bases and weights must be the same too."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(24, 16, bias=False), nn.Linear(16, 20, bias=False)

        def forward(self, x):
            return torch.cat([self.wide(x[..., :24]), self.narrow(x[..., 24:])], dim=-1)

    def run():
        torch.manual_seed(0)
        model = Layers()
        if dist.get_world_size() > 1:
            model = DistributedDataParallel(model)
        optimizer = Dobb(model, lr=LR, blocks=4)
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            x, target = (
                torch.randint(-4, 5, (BATCH, LENGTH, features), generator=generator).float() for features in (40, 36)
            )
            optimizer.zero_grad()
            for part, weights in zip(dealt(x, 2), dealt(target, 2), strict=True):
                ((model(part) * weights).sum() / len(part)).backward()
            optimizer.step()
        return snapshot(model, optimizer), optimizer._bases.groups[0].ownership.work()

    (one, _), *_ = processes.run(1, run)
    for two, work in processes.run(2, run):
        assert two[1]["param_groups"][0]["capture_sequences"] == BATCH // 2
        assert_same(two[0], one[0])
        assert_same(on_dobb(two[1]), on_dobb(one[1]))
        assert min(work) == max(work) > 0


@pytest.mark.parametrize("settings", [{"basis_dtype": "fp32"}, {"basis_dtype": "bf16", "moment_dtype": "bf16"}])
def test_ranks_hold_the_same_bits_and_train_as_one_process_does(settings):
    """Each refresh step starts from the single process's state; every difference must be a flip within rounding."""
    settings = {"capture_sequences": 6, **settings}
    model, optimizer = setup(**settings)
    before, after = {}, {}
    for step in range(STEPS):
        before[step] = snapshot(model, optimizer)
        train(model, optimizer, [step])
        after[step] = snapshot(model, optimizer)

    def run():
        found = []
        for step in (0, 1, 9):
            model, optimizer = setup(**settings)
            weights, state = copy.deepcopy(before[step])
            model.module.load_state_dict(weights)
            optimizer.load_state_dict(state)
            train(model, optimizer, [step], micro_batches=2)
            found.append((step, snapshot(model, optimizer)))
        return found

    ranks = processes.run(2, run)
    assert_same(ranks[0], ranks[1])
    loose = settings["basis_dtype"] == "bf16"  # where a basis differs by one rounding
    for step, (weights, state) in ranks[0]:
        expected_weights, expected_state = after[step]
        for name, tensors in on_dobb(state).items():
            expected = on_dobb(expected_state)[name]
            scale = expected["moment"].abs().amax()
            assert (tensors["moment"] - expected["moment"]).abs().amax() <= (8e-3 if loose else 1e-5) * scale
            signs = (tensors["basis"].float() * expected["basis"].float()).sum(1, keepdim=True).sign()
            assert (tensors["basis"] * signs - expected["basis"]).abs().amax() <= (8e-3 if loose else 1e-4)
            if loose or name == "spare.weight":
                continue
            rows, columns = weights[name].shape
            found, _ = flips.find(
                weights[name] - expected_weights[name],
                flips.coefficients(expected["momentum"], expected["basis"]),
                expected["basis"],
                step_size=LR * 0.2 * (max(rows, columns) / rows) ** 0.5,
                tolerance=1e-6,
                name=name,
                step=step,
            )
            print(f"step {step}, {name}: {len(found)} flips", *found, sep="\n")
            assert len(found) <= 2


def test_the_first_sequences_of_the_global_batch_are_captured_on_every_layout():
    x = batch(0)[:5].double().flatten(0, 1)[:, :6]
    expected = 0.05 * x.T @ x / len(x)

    def run(micro_batches):
        model, optimizer = setup(capture_sequences=5)
        train(model, optimizer, [0], micro_batches)
        return on_dobb(optimizer.state_dict())["first.weight"]["moment"][0]

    for world, micro_batches in ((1, 1), (1, 4), (2, 1), (2, 2), (2, 4)):
        for moment in processes.run(world, run, micro_batches):
            torch.testing.assert_close(moment.double(), expected, rtol=1e-5, atol=1e-7)


def test_one_rank_saves_alone_and_any_number_of_ranks_resumes():
    def first_half():
        model, optimizer = setup()
        train(model, optimizer, range(5))
        middle = snapshot(model, optimizer) if dist.get_rank() == 0 else None  # no other rank takes part
        train(model, optimizer, range(5, STEPS))
        return middle, snapshot(model, optimizer)

    (middle, end), (_, other_end) = processes.run(2, first_half)
    assert_same(end, other_end)

    def second_half():
        model, optimizer = setup()
        getattr(model, "module", model).load_state_dict(middle[0])
        optimizer.load_state_dict(middle[1])
        restored = snapshot(model, optimizer)
        train(model, optimizer, range(5, STEPS))
        return restored, snapshot(model, optimizer)

    for restored, resumed in processes.run(2, second_half):
        assert_same(restored, middle)
        assert_same(resumed, end)
    [(restored, resumed)] = processes.run(1, second_half)
    assert_same(restored, middle)
    assert resumed[1]["param_groups"][0]["capture_sequences"] == BATCH
    for name, tensors in on_dobb(resumed[1]).items():
        torch.testing.assert_close(tensors["moment"], on_dobb(end[1])[name]["moment"], rtol=0.05, atol=1e-2)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_and_broadcast_states_carry_everything_to_any_number_of_ranks(flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def states(model, optimizer):
        return dict(zip(("weights", "state"), get_state_dict(model, optimizer, options=options), strict=True))

    def save():
        model, optimizer = setup()
        train(model, optimizer, range(5))
        dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
        saved = snapshot(model, optimizer)
        train(model, optimizer, range(5, STEPS))
        return saved, snapshot(model, optimizer)

    def load():
        model, optimizer = setup()
        loaded = states(model, optimizer)
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["weights"], optim_state_dict=loaded["state"], options=options
        )
        restored = snapshot(model, optimizer)
        train(model, optimizer, range(5, STEPS if dist.get_world_size() == 2 else 6))
        return restored, snapshot(model, optimizer), from_rank_0(optimizer, model)

    def from_rank_0(trained, model):
        first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        full = get_optimizer_state_dict(model, trained, options=StateDictOptions(full_state_dict=True))
        again, optimizer = setup()
        set_optimizer_state_dict(again, optimizer, full if dist.get_rank() == 0 else {}, options=first)
        assert_same(on_dobb(optimizer.state_dict()), on_dobb(trained.state_dict()))
        return optimizer.attempted_steps

    (saved, end), (_, other_end) = processes.run(2, save)
    assert_same(end, other_end)
    for restored, resumed, steps in processes.run(2, load):
        assert_same(restored, saved)
        assert_same(resumed, end)
        assert steps == STEPS
    [(restored, _, steps)] = processes.run(1, load)
    assert_same(restored, saved)
    assert steps == 6


def test_what_goes_wrong_is_raised_on_every_rank_and_changes_nothing():
    def run():
        model, optimizer = setup()
        train(model, optimizer, range(1))
        unused = optimizer.refresh_counts.skipped, model.module.spare.weight.grad
        model.module.first.weight.grad[0, 0] = torch.nan
        before = snapshot(model, optimizer)
        with pytest.raises(NonFiniteError, match=r"first\.weight"):
            optimizer.step()
        assert_same(snapshot(model, optimizer), before)
        optimizer.attempted_steps = 9
        optimizer.zero_grad()
        model.module.second.eval()
        backward(model, batch(0))
        before = snapshot(model, optimizer)
        with pytest.raises(CaptureError, match=r"second\.weight was captured for the refresh of step 10"):
            optimizer.step()
        assert_same(snapshot(model, optimizer), before)
        return unused

    assert processes.run(2, run) == [(0, None)] * 2


def test_a_layer_used_on_one_rank_only_is_refreshed_on_all():
    def run():
        model, optimizer = setup(capture="all")
        backward(model, batch(0), spare=dist.get_rank() == 1)
        optimizer.step()
        return on_dobb(optimizer.state_dict())["spare.weight"]

    first, second = processes.run(2, run)
    assert_same(first, second)
    x = batch(0)[4:].double().flatten(0, 1)[:, :6]
    torch.testing.assert_close(first["moment"][0].double(), 0.05 * x.T @ x / len(x), rtol=1e-5, atol=1e-7)


def test_ranks_with_different_weights_on_dobb_are_refused():
    def run():
        with pytest.raises(LayoutError, match="manage different weights"):
            Dobb(mlp(), blocks=4, exclude=["spare"] if dist.get_rank() else ())
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        model = mlp()
        optimizer = Dobb(model, blocks=4, exclude=["spare"] if dist.get_rank() else (), process_group=alone)
        model(batch(0)).mean().backward()
        optimizer.step()
        return len(optimizer.on_dobb)

    assert processes.run(2, run) == [3, 2]


def test_the_first_rank_logs_the_diagnostics_of_one_process():
    def run():
        logs = {}
        settings = {"diagnostics": logs.__setitem__} if dist.get_rank() == 0 else {}
        model, optimizer = setup(log_diagnostics_interval=2, basis_dtype="fp32", **settings)
        train(model, optimizer, range(2))
        return logs

    (alone,) = processes.run(1, run)
    first, second = processes.run(2, run)
    assert list(first) == [2]
    assert first[2] == pytest.approx(alone[2], rel=1e-5)
    assert "dobb/orthogonality/first.weight" in first[2]
    assert second == {}
