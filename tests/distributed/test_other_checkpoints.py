"""Checkpoints that are not simply continued: of other optimizers, blocks and types, of other models, damaged ones."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import FORMATS, go_on, load, save
from global_form import merge
from layout_runs import Layout, Run, start

from megatron_dobb import DobbConfig
from megatron_dobb.errors import CheckpointError
from megatron_dobb.megatron.dobb.extra_state import DobbExtraState
from megatron_dobb.megatron.dobb.refresh_log import log_load
from megatron_dobb.megatron.dobb.run_metadata import DobbRunMetadata
from testbed import processes

CONFIG = DobbConfig(blocks=4, refresh_interval=3)
PAIR = Layout(2, micro_batch=3)
BUCKETS = Layout(2, micro_batch=3, bucket_size=20_000)
TENSOR = Layout(2, tensor=2, micro_batch=12)
EXPERTS = Layout(2, expert=2, experts=True, micro_batch=12)
NO_EXPERT_PARALLELISM = Layout(2, experts=True, micro_batch=12)


def error_of(run, path):
    """What a load says, which must be the same on every rank and leave model and optimizer as they were."""
    before = run.snapshot()
    with pytest.raises(CheckpointError) as raised:
        load(run, path)
    after = run.snapshot()
    assert all(torch.equal(after.parameters[name], before.parameters[name]) for name in before.parameters)
    assert all(torch.equal(a.values, b.values) for a, b in zip(after.momenta, before.momenta, strict=True))
    assert all(torch.equal(after.bases[block], before.bases[block]) for block in before.bases)
    return str(raised.value)


# Other optimizers.


def first_moments(run):
    """AdamW's, of this process's whole parameters, by name."""
    (stock,) = run.optimizer.chained_optimizers
    return {
        name: stock._get_main_param_and_optimizer_states(parameter)["exp_avg"].clone()
        for name, parameter in run.weights.items()
    }


def size(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


def exchange_with_adamw(layout, path):
    start(layout)
    stock = Run(layout, None)
    go_on(stock, 0, 2)
    for sharding in FORMATS:
        save(stock, path / sharding, sharding)
    results = {"refused": error_of(Run(layout, CONFIG), path / FORMATS[0])}
    moments = first_moments(stock)
    for sharding in FORMATS:
        run = Run(layout, replace(CONFIG, load_other_optimizer=True))
        load(run, path / sharding)
        assert all(torch.equal(run.weights[name], weight) for name, weight in stock.weights.items())
        found = first_moments(run)
        assert all(torch.equal(found[name], moments[name]) for name in moments)
        assert run.dobb.taken_steps == 2
        assert run.dobb.attempted_steps == 0
        assert all(not group.moment.any() for group in run.groups)
        assert all(torch.equal(group.basis[0], torch.eye(group.width).bfloat16()) for group in run.groups)
        results[sharding] = go_on(run, 2, 4)
        assert all(group.moment.any() for group in run.groups)
    save(run, path / "dobb", "fully_reshardable")
    results["sizes"] = [size(path / name) for name in ("fully_reshardable", "dobb")]
    results["blocks"] = sum(t.nbytes for group in run.groups for t in (group.moment, group.basis))
    with pytest.raises(CheckpointError) as raised:
        load(Run(layout, None), path / "dobb")
    return results | {"back": str(raised.value)}


def test_adamw_is_continued_by_dobb_only_when_asked_and_dobb_never_by_adamw(tmp_path):
    (results,) = processes.run(1, exchange_with_adamw, Layout(micro_batch=12), tmp_path)
    assert "--dobb-load-other-optimizer" in results["refused"]
    assert "--no-load-optim" in results["refused"]
    assert results[FORMATS[0]] == results[FORMATS[1]]
    adamw, dobb = results["sizes"]
    assert dobb < adamw + results["blocks"], "second moments of the gradients are not saved for weights on Dobb"
    assert "Dobb's" in results["back"]
    assert "--optimizer dobb" in results["back"]
    assert "--no-load-optim" in results["back"]


# Other blocks and types.

RELOADED = {
    "8 blocks": replace(CONFIG, blocks=8),
    "2 blocks": replace(CONFIG, blocks=2),
    "mixed": replace(CONFIG, blocks_for={"*.layers.0.mlp.linear_fc2": 8, "*.layers.1.mlp.linear_fc2": 2}),
    "other types": replace(CONFIG, moment_dtype="bf16", basis_dtype="fp32"),
    "same blocks": replace(CONFIG, blocks=None, blocks_for={"*": 4}),
    "more on Dobb": CONFIG,
    "other sequences": replace(CONFIG, capture_sequences=5),
    "no bases": replace(CONFIG, blocks=None, source="none"),
}


def save_on_tensor_ranks(path):
    start(TENSOR)
    run = Run(TENSOR, CONFIG)
    go_on(run, 0, 2)
    save(run, path / "all", "fully_reshardable")
    snapshot = run.snapshot()
    fewer = Run(TENSOR, replace(CONFIG, exclude=("*.layers.0.mlp.linear_fc1",)))
    save(fewer, path / "fewer", "fully_reshardable")
    return snapshot


def load_with_other_blocks(path):
    start(PAIR)
    results = {}
    for name, config in RELOADED.items():
        run = Run(PAIR, config)
        load(run, path / ("fewer" if name == "more on Dobb" else "all"))
        loaded, asked = run.snapshot(), run.dobb.refresh_is_asked
        counters = run.dobb.attempted_steps, run.dobb.captures[0].sequences
        go_on(run, 2, 3)
        results[name] = loaded, asked, counters, run.snapshot()
    return results


@pytest.fixture(scope="module")
def reblocked(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks")
    saved = merge(processes.run(2, save_on_tensor_ranks, path))
    ranks = processes.run(2, load_with_other_blocks, path)
    found = {}
    for name in RELOADED:
        loaded, asked, counters, later = zip(*(rank[name] for rank in ranks), strict=True)
        assert len(set(asked)) == len(set(counters)) == 1
        found[name] = merge(loaded), asked[0], counters[0], merge(later)
    return saved, found


def sub_blocks(moments, parts):
    """The diagonal blocks `[B parts, b / parts, b / parts]` of `[B, b, b]`."""
    width = moments.shape[1] // parts
    return torch.stack([m[i : i + width, i : i + width] for m in moments for i in range(0, moments.shape[1], width)])


def is_identity(bases):
    return torch.equal(bases.float(), torch.eye(bases.shape[1]).expand_as(bases))


def test_smaller_blocks_take_the_diagonal_of_the_saved_moments_and_refresh_at_once(reblocked):
    saved, found = reblocked
    loaded, asked, (attempted, _), later = found["8 blocks"]
    assert asked
    assert attempted == 2
    for name, moments in loaded.moments.items():
        assert torch.equal(moments, sub_blocks(saved.moments[name], 2))
        assert is_identity(loaded.bases[name])
        assert not is_identity(later.bases[name])
        assert torch.equal(loaded.momenta[name], saved.momenta[name])


def test_other_blocks_start_anew_and_refresh_at_once(reblocked):
    _, found = reblocked
    loaded, asked, (attempted, _), later = found["2 blocks"]
    assert asked
    assert attempted == 2
    assert all(not moments.any() for moments in loaded.moments.values())
    assert all(is_identity(bases) for bases in loaded.bases.values())
    assert all(not is_identity(bases) for bases in later.bases.values())


def test_without_bases_nothing_asks_for_a_refresh(reblocked):
    saved, found = reblocked
    loaded, asked, (attempted, _), _ = found["no bases"]
    assert not asked
    assert attempted == 2
    assert not loaded.moments
    assert all(torch.equal(loaded.momenta[name], saved.momenta[name]) for name in saved.momenta)


@pytest.mark.parametrize(("source", "says"), [("none", ""), ("activation", "moments and bases start anew")])
def test_a_load_of_adamws_checkpoint_announces_a_refresh_where_there_are_bases(source, says, capsys):
    log_load([], None, DobbConfig(source=source))
    assert says in (printed := capsys.readouterr().out)
    assert bool(printed) == bool(says)


def test_every_weight_is_reblocked_by_itself(reblocked):
    saved, found = reblocked
    loaded, asked, _, _ = found["mixed"]
    assert asked
    smaller, wider = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"
    for name, moments in loaded.moments.items():
        if name == smaller:
            assert torch.equal(moments, sub_blocks(saved.moments[name], 2))
        elif name == wider:
            assert not moments.any()
        else:
            assert torch.equal(moments, saved.moments[name])
            assert torch.equal(loaded.bases[name], saved.bases[name])


def test_a_weight_new_to_dobb_starts_anew(reblocked):
    loaded, asked, _, _ = reblocked[1]["more on Dobb"]
    assert asked
    new = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not loaded.moments[new].any()


def test_the_same_blocks_stated_otherwise_change_nothing(reblocked):
    saved, found = reblocked
    loaded, asked, _, _ = found["same blocks"]
    assert not asked
    assert all(torch.equal(loaded.bases[name], saved.bases[name]) for name in saved.bases)


def test_the_number_of_captured_sequences_settled_at_the_first_launch_stays_unless_stated(reblocked):
    _, found = reblocked
    assert found["same blocks"][2] == (2, TENSOR.micro_batch), "not the first global micro-batch of this layout"
    assert found["other sequences"][2] == (2, 5)


def test_other_types_of_storage_keep_the_values(reblocked):
    saved, found = reblocked
    loaded, asked, _, _ = found["other types"]
    assert not asked
    for name in saved.moments:
        assert torch.equal(loaded.moments[name], saved.moments[name].bfloat16())
        assert torch.equal(loaded.bases[name], saved.bases[name].float())
        assert loaded.bases[name].dtype == torch.float32


IN_BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def of_type(dtype, config):
    return Run(PAIR, config, IN_BF16, **IN_BF16) if dtype == torch.bfloat16 else Run(PAIR, config)


def exchange_types(path):
    start(PAIR)
    run = Run(PAIR, CONFIG)
    go_on(run, 0, 2)
    states, dtypes = [run.snapshot()], (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        for sharding in FORMATS:
            save(run, path / f"{sharding} for {dtype}", sharding)
        run = of_type(dtype, replace(CONFIG, moment_dtype="bf16", basis_dtype="fp32"))
        refused = error_of(run, path / f"dp_reshardable for {dtype}")
        load(run, path / f"fully_reshardable for {dtype}")
        states.append(run.snapshot())
    return states, refused, go_on(run, 2, 4)


def test_a_model_of_another_type_continues_from_the_same_values(tmp_path):
    for states, refused, losses in processes.run(2, exchange_types, tmp_path):
        first, in_bf16, back = states
        for state in (in_bf16, back):
            for mine, saved in zip(state.masters + state.momenta, first.masters + first.momenta, strict=True):
                assert mine.values.dtype == torch.float32
                assert torch.equal(mine.values, saved.values)
            assert all(torch.equal(state.moments[key], first.moments[key].bfloat16()) for key in first.moments)
            assert all(torch.equal(state.bases[key], first.bases[key].float()) for key in first.bases)
        for name, weight in first.parameters.items():
            assert torch.equal(in_bf16.parameters[name], weight.bfloat16())
            assert torch.equal(back.parameters[name], weight), "the masters', not the rounded weights"
        assert "--bf16 or --fp16" in refused
        assert losses[1] < losses[0]


# What cannot be loaded.


def damaged(path, name, damage):
    """A copy of a checkpoint with one of its files damaged by rank 0."""
    copy = path.with_name(name)
    if dist.get_rank() == 0:
        shutil.copytree(path, copy)
        damage(copy)
    dist.barrier()
    return copy


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def of_a_newer_version(metadata):
    return lambda *args, **kwargs: replace(metadata(*args, **kwargs), version=DobbRunMetadata.version + 1)


def try_to_load(path):
    start(PAIR)
    run = Run(PAIR, CONFIG)
    go_on(run, 0, 1)
    good, buckets, newer = path / "good", path / "buckets", path / "newer"
    save(run, good, "fully_reshardable")
    save(run, buckets, "dp_reshardable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DobbExtraState, "metadata", of_a_newer_version(DobbExtraState.metadata))
        save(run, newer, "fully_reshardable")
    biggest = max(good.glob("*.distcp"), key=lambda file: file.stat().st_size).name
    fresh = Run(PAIR, CONFIG)
    return {
        "cut": error_of(fresh, damaged(good, "cut", lambda copy: cut_in_half(copy / biggest))),
        "lost": error_of(fresh, damaged(good, "lost", lambda copy: (copy / biggest).unlink())),
        "index": error_of(fresh, damaged(good, "index", lambda copy: cut_in_half(copy / ".metadata"))),
        "newer": error_of(fresh, newer),
        "model": error_of(Run(PAIR, CONFIG, {"ffn_hidden_size": 128}), good),
        "layers": error_of(Run(PAIR, CONFIG, {"num_layers": 3}), good),
        "buckets": error_of(Run(BUCKETS, CONFIG), buckets),
        "exclude": error_of(Run(PAIR, replace(CONFIG, exclude=("*.layers.1.*",))), good),
    }


@pytest.mark.parametrize("sharding", [*FORMATS])
def test_expert_parallelism_cannot_appear_or_vanish(sharding, tmp_path):
    def save_experts():
        start(EXPERTS)
        run = Run(EXPERTS, CONFIG)
        save(run, tmp_path / sharding, sharding)

    def load_elsewhere():
        start(NO_EXPERT_PARALLELISM)
        return error_of(Run(NO_EXPERT_PARALLELISM, CONFIG), tmp_path / sharding)

    processes.run(2, save_experts)
    for error in processes.run(2, load_elsewhere):
        assert "--expert-model-parallel-size above 1" in error


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    first, second = processes.run(2, try_to_load, tmp_path_factory.mktemp("damaged"))
    return first, second


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("cut", ["is cut off", "use the checkpoint of another iteration"]),
        ("lost", ["lacks its file", "use the checkpoint of another iteration"]),
        ("index", [".metadata", "use the checkpoint of another iteration"]),
        ("newer", [f"of version {DobbRunMetadata.version + 1}", f"reads up to version {DobbRunMetadata.version}"]),
        ("model", ["of another model"]),
        ("layers", ["of another model"]),
        ("exclude", ["decoder.layers.1.", "was on Dobb", "--dobb-exclude", "--no-load-optim"]),
        ("buckets", ["--ddp-bucket-size", "--dist-ckpt-optim-fully-reshardable"]),
    ],
)
def test_what_cannot_be_continued_is_refused_by_every_rank_before_anything_is_loaded(errors, case, texts):
    for error in errors:
        assert all(text in error[case] for text in texts), error[case]


def reblock_one_stage(path):
    stages = Layout(2, pipeline=2, micro_batch=6)
    start(stages)
    run = Run(stages, CONFIG)
    go_on(run, 0, 1)
    save(run, path / "stages", "fully_reshardable")
    other = Run(stages, replace(CONFIG, blocks_for={"decoder.layers.1.*": 8}))
    load(other, path / "stages")
    return [optimizer.refresh_is_asked for optimizer in other.dobbs]


def test_all_stages_of_a_pipeline_refresh_when_one_has_other_blocks(tmp_path):
    assert processes.run(2, reblock_one_stage, tmp_path) == [[True], [True]]
