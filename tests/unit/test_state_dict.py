"""The plain optimizer's state through everything that carries ordinary optimizer state, and what is refused."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_mlp import BLOCKS, assert_same, batch, mlp, older_form, on_dobb, train, weights
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from megatron_dobb import Dobb
from megatron_dobb.errors import ConfigError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def dobb(model, **settings):
    return Dobb(model, lr=0.01, **{"blocks": BLOCKS, **settings})


def run(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        x = batch(step).to(next(model.parameters()).dtype)
        (model(x).float() - x[..., :10].float().sin()).square().mean().backward()
        optimizer.step()


def saved_to(path, state):
    """A state that went through a file, without pickled classes."""
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


def through_a_file(path, model, optimizer, other, resumed):
    saved = saved_to(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])


def in_the_older_form(path, model, optimizer, other, resumed):
    saved = saved_to(path, {"model": model.state_dict(), "optimizer": older_form(optimizer.state_dict())})
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])


def with_lists(value):
    """The same with lists for tuples, which torch's helpers make of `betas` in full state_dicts."""
    if isinstance(value, dict):
        return {key: with_lists(entry) for key, entry in value.items()}
    return [with_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def by_helpers_for_optimizers(options):
    def carry(path, model, optimizer, other, resumed):
        saved = saved_to(path, get_optimizer_state_dict(model, optimizer, options=options))
        other.load_state_dict(model.state_dict())
        set_optimizer_state_dict(other, resumed, saved, options=options)

    return carry


def by_helpers_for_both(options):
    def carry(path, model, optimizer, other, resumed):
        ours, theirs = get_state_dict(model, optimizer, options=options)
        saved = saved_to(path, {"model": ours, "optimizer": theirs})
        states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(other, resumed, **states, options=options)

    return carry


def by_distributed_checkpoint(options):
    def carry(path, model, optimizer, other, resumed):
        dcp.save(dict(zip("mo", get_state_dict(model, optimizer, options=options), strict=True)), checkpoint_id=path)
        state = dict(zip("mo", get_state_dict(other, resumed, options=options), strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(other, resumed, model_state_dict=state["m"], optim_state_dict=state["o"], options=options)

    return carry


CARRIERS = {
    "file": through_a_file,
    "older form": in_the_older_form,
    "optimizer helpers, nested": by_helpers_for_optimizers(NESTED),
    "optimizer helpers, flat": by_helpers_for_optimizers(FLAT),
    "state helpers, nested": by_helpers_for_both(NESTED),
    "state helpers, flat": by_helpers_for_both(FLAT),
    "state helpers, full": by_helpers_for_both(FULL),
    "distributed checkpoint, nested": by_distributed_checkpoint(NESTED),
    "distributed checkpoint, flat": by_distributed_checkpoint(FLAT),
}


@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_same_to_the_last_bit(carry, tmp_path, steps, dtype):
    model = mlp().to(dtype)
    optimizer = dobb(model, moment_dtype=torch.bfloat16)
    run(model, optimizer, range(steps))
    other = mlp().to(dtype)
    resumed = dobb(other, moment_dtype="bf16", capture_sequences=None)
    carry(tmp_path, model, optimizer, other, resumed)
    assert resumed.attempted_steps == steps
    assert_same(with_lists(resumed.state_dict()), with_lists(optimizer.state_dict()))
    run(model, optimizer, range(steps, 12))
    run(other, resumed, range(steps, 12))
    assert_same(weights(other), weights(model))
    assert_same(with_lists(resumed.state_dict()), with_lists(optimizer.state_dict()))


@pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])
def test_asking_for_the_state_before_the_first_step_is_no_step(options):
    plain, asked = mlp(), mlp()
    optimizer, other = dobb(plain), dobb(asked)
    state = get_optimizer_state_dict(asked, other, options=options)
    set_optimizer_state_dict(asked, other, state, options=options)
    assert other.attempted_steps == 0
    assert_same(weights(asked), weights(plain))
    assert_same(other.state_dict(), optimizer.state_dict())
    train(plain, optimizer, range(3))
    train(asked, other, range(3))
    assert_same(weights(asked), weights(plain))


def test_state_survives_a_deep_copy_and_keeps_fp32_for_low_precision_weights():
    model = mlp().to(torch.bfloat16)
    optimizer = dobb(model)
    run(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), state)
    first = on_dobb(state)["first.weight"]
    assert [first[key].dtype for key in ("momentum", "moment", "basis")] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]
    assert first["momentum"].unique().numel() > first["momentum"].bfloat16().unique().numel()


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.double()], ids=["bf16", "fp64"])
def test_a_model_converted_after_the_optimizer_was_built_trains_as_one_converted_before(convert):
    early, late = convert(mlp()), mlp()
    optimizers = dobb(early), dobb(late)
    convert(late)
    for model, optimizer in zip((early, late), optimizers, strict=True):
        run(model, optimizer, range(3))
    assert_same(weights(late), weights(early))


@pytest.mark.parametrize("load", ["file", "optimizer helpers, nested", "distributed checkpoint, flat"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((torch.float32, "fp32", "fp32"), (torch.float32, "bf16", "bf16")),
        ((torch.float32, "bf16", "bf16"), (torch.float32, "fp32", "fp32")),
        ((torch.float32, "fp32", "fp32"), (torch.bfloat16, "fp32", "bf16")),
        ((torch.bfloat16, "bf16", "fp32"), (torch.float32, "fp32", "fp32")),
    ],
    ids=lambda kinds: "-".join(str(kind).removeprefix("torch.") for kind in kinds),
)
def test_other_types_of_weights_and_state_keep_the_values_up_to_one_rounding(load, before, after, tmp_path):
    def build(dtype, moment_dtype, basis_dtype):
        model = mlp().to(dtype)
        return model, dobb(model, moment_dtype=moment_dtype, basis_dtype=basis_dtype)

    model, optimizer = build(*before)
    run(model, optimizer, range(4))
    other, resumed = build(*after)
    CARRIERS[load](tmp_path, model, optimizer, other, resumed)
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].to(weight.dtype))
    for left, right in zip(optimizer.on_dobb.values(), resumed.on_dobb.values(), strict=True):
        for key, dtype in zip(("momentum", "moment", "basis"), ("fp32", *after[1:]), strict=True):
            found, saved = resumed.state[right.parameter][key], optimizer.state[left.parameter][key]
            assert found.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            assert torch.equal(found, saved.to(found.dtype))
    for one, (name, parameter) in zip(model.parameters(), other.named_parameters(), strict=True):
        if name in resumed.on_adamw:
            found, saved = resumed.state[parameter], optimizer.state[one]
            assert found["step"] == saved["step"] == 4
            assert all(torch.equal(found[key], saved[key].to(parameter.dtype)) for key in ("exp_avg", "exp_avg_sq"))
    run(other, resumed, range(4, 12))
    assert all(bool(value.isfinite().all()) for value in weights(other).values())


@pytest.mark.parametrize("form", [dict, older_form], ids=["form of today", "older form"])
@pytest.mark.parametrize("given", [None, 3])
def test_the_number_of_captured_sequences_is_kept_unless_given(given, form):
    model = mlp()
    optimizer = dobb(model)
    train(model, optimizer, range(1), micro_batches=4)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["capture_sequences"] == 2
    other = dobb(mlp(), capture_sequences=given)
    other.load_state_dict(form(state))
    assert other.state_dict()["param_groups"][0]["capture_sequences"] == given or 2


# What is refused.


def without(key):
    return lambda state: state["param_groups"][0].pop(key)


def lose_names(state):
    del state["dobb"]


def lose_a_weight(state):
    on_dobb(state)["second.weight"].clear()


def lose_a_basis(state):
    del on_dobb(state)["second.weight"]["basis"]


def on_adamw(state):
    return next(key for key, entry in state["state"].items() if "exp_avg" in entry)


def lose_a_moment_of_adamw(state):
    state["state"][on_adamw(state)]["exp_avg"] = {}


def round_a_momentum(state):
    entry = on_dobb(state)["second.weight"]
    entry["momentum"] = entry["momentum"].long()


SPOILED = [
    ({}, lambda s: s.pop("state"), "no param_groups or no state: it was not saved by Dobb"),
    ({}, without("attempted_steps"), "no attempted_steps of Dobb's: it was not saved by"),
    ({}, without("dobb"), "no attempted_steps and no capture_sequences of Dobb's: it was not saved by"),
    ({"exclude": "third"}, None, r"not have on Dobb, but the state_dict has, third\.weight: .*same exclude"),
    ({"exclude": "third"}, lose_names, r"param groups of \[3, 4\] parameters, and this optimizer of \[2, 1, 4\]"),
    ({}, lambda s: s["param_groups"].pop(), r"param groups of \[3\] parameters, and this optimizer of \[3, 4\]"),
    ({}, lambda s: s["param_groups"][1].update(dobb=True), r"param groups of \[3, 4\]"),
    ({}, lose_a_weight, r"no momentum of second\.weight"),
    ({}, lose_a_basis, r"no basis of second\.weight"),
    ({}, lose_a_moment_of_adamw, r"no exp_avg of \d"),
    ({}, lambda s: s["state"].pop(on_adamw(s)), r"no step and no exp_avg and no exp_avg_sq of parameter \d"),
    ({}, lambda s: s["state"][on_adamw(s)].pop("step"), r"no step of parameter \d"),
    ({}, round_a_momentum, r"momentum of second\.weight in torch\.int64"),
    ({"source": "gram"}, None, r"side 'input' and source 'activation', and this optimizer .* 'gram'"),
    ({"blocks": 2}, None, r"moment of first\.weight as \[4, 6, 6\].*\[2, 12, 12\], with 2 blocks of 12 columns"),
]
SPOILED_OLDER_FORMS = [
    ({}, lambda s: s["dobb"].pop("attempted_steps"), "no attempted_steps of Dobb's"),
    ({"exclude": "third"}, None, r"not have on Dobb, but the state_dict has, third\.weight: .*same exclude"),
    ({}, lambda s: s["dobb"]["weights"].pop("second.weight"), r"no state of second\.weight"),
    ({}, lambda s: s["dobb"]["weights"]["second.weight"].pop("basis"), r"no basis of second\.weight"),
]


@pytest.mark.parametrize(
    ("form", "settings", "spoil", "message"),
    [*((dict, *case) for case in SPOILED), *((older_form, *case) for case in SPOILED_OLDER_FORMS)],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(form, settings, spoil, message):
    model = mlp()
    optimizer = dobb(model)
    train(model, optimizer, range(2))
    state = copy.deepcopy(form(optimizer.state_dict()))
    if spoil:
        spoil(state)
    other = dobb(mlp(), **settings)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ConfigError, match=message):
        other.load_state_dict(state)
    assert_same(other.state_dict(), before)


@pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("saving", "loading", "message"),
    [
        ({}, {"exclude": "third"}, r"third\.weight"),
        ({"exclude": "third"}, {}, r"third\.weight"),
        ({}, {"blocks": 2}, r"moment of first\.weight as \[4, 6, 6\].*with 2 blocks of 12 columns"),
    ],
)
def test_what_the_helpers_bring_is_refused_by_name_and_changes_nothing(options, saving, loading, message):
    model, other = mlp(), mlp()
    optimizer = dobb(model, **saving)
    train(model, optimizer, range(2))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    resumed = dobb(other, **loading)
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises((ConfigError, KeyError, RuntimeError), match=message):
        set_optimizer_state_dict(other, resumed, state, options=options)
    assert_same(resumed.state_dict(), before)


@pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])
def test_what_torchs_adamw_saved_is_not_taken_for_dobbs(options):
    model, other = mlp(), mlp()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, range(2))
    resumed = dobb(other)
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises((ConfigError, KeyError)):
        set_optimizer_state_dict(
            other, resumed, get_optimizer_state_dict(model, adamw, options=options), options=options
        )
    with pytest.raises(ConfigError, match="not saved by Dobb"):
        resumed.load_state_dict(adamw.state_dict())
    assert_same(resumed.state_dict(), before)


def test_parameters_added_later_resume_too():
    def build():
        model = mlp()
        optimizer = dobb(model)
        model.scale = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [model.scale], "amsgrad": True})
        return model, optimizer

    model, optimizer = build()
    model.scale.grad = torch.ones(3)
    optimizer.step()
    other, resumed = build()
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(model, optimizer))
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert resumed.state[other.scale]["max_exp_avg_sq"].any()
