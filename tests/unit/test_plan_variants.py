"""`tools/plan.py` for the other variants of the method: known figures, and the run's own refusals."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_dobb import DobbConfig
from megatron_dobb.methods.dobb import update as reference
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard
from tools.planning import cli
from tools.planning.arguments import read
from tools.planning.request import request_of
from tools.planning.timing import DOBB_BYTES, norm_bytes, update_bytes

FEATURES = 12 * (3 * 768 + 3072)
"""Inputs of all matrices of GPT-2 Small."""


@pytest.fixture
def planned(tmp_path, capsys):
    """Runs the command line; gives its status, what it printed, and the only stage of the JSON, or all of it."""

    def run(words):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        status = cli.main([*words.split(), "--json", str(path)])
        printed = " ".join(capsys.readouterr().out.split())
        data = json.loads(path.read_text()) if path.exists() else None
        return status, printed, data["stages"][0] if status == 0 else data

    return run


def test_every_flag_of_a_run_is_taken_with_and_without_dobb():
    given = (
        "--nesterov --capture all --momentum 0.9 --moment-beta 0.8 --backend reference --stagger --norm l2 "
        "--moment-transport bf16 --log-diagnostics-interval 5 --update-scale 0.3 --load-other-optimizer "
        "--no-overlap-refresh --exclude *.linear_fc1 *.linear_qkv"
    )
    of_a_run = given.replace("--", "--dobb-").replace("--dobb-no-", "--no-dobb-")
    configs = [request_of(read(["--preset", "gpt2-small", *w.split()])[0])[0].config for w in (given, of_a_run)]
    assert configs[0] == configs[1]
    expected = DobbConfig(
        **{"nesterov": True, "capture": "all", "momentum": 0.9, "moment_beta": 0.8, "backend": "reference"},
        **{"stagger": True, "moment_transport": "bf16", "norm": "l2", "log_diagnostics_interval": 5},
        **{"update_scale": 0.3, "load_other_optimizer": True, "overlap_refresh": False},
        exclude=("*.linear_fc1", "*.linear_qkv"),
    )
    assert configs[0] == expected


def test_l2_sends_one_number_for_each_column_of_a_cut_weight(planned):
    _, printed, stage = planned("--preset gpt2-small --dp 8 --norm l2")
    assert stage["step_bytes"]["column_norms"] == {"mean": 4 * FEATURES, "most": 4 * FEATURES}
    plain = planned("--preset gpt2-small --dp 8")[2]
    assert stage["step_bytes"]["dobb"]["most"] - plain["step_bytes"]["dobb"]["most"] == 4 * FEATURES
    assert "every step: Dobb, column norms of it" in printed
    assert "column norms from a second projection" in printed
    assert planned("--preset gpt2-small --norm l2")[2]["step_bytes"]["column_norms"]["most"] == 0
    _, _, rows = planned("--preset gpt2-small --dp 8 --norm l2 --side output --blocks 96")
    assert rows["step_bytes"]["column_norms"]["most"] == 0, "row blocks are whole"


def test_without_a_source_there_are_no_moments_and_no_bases(planned):
    status, _, stage = planned("--preset gpt2-small --dp 8 --side output --norm l2 --source none")
    assert status == 0
    assert [stage["memory"]["dobb"][name]["most"] for name in ("moments", "bases", "sums")] == [0, 0, 0]
    assert {most["most"] for most in stage["refresh_bytes"]["dobb"].values()} == {0}
    assert stage["refresh_bytes"]["paper"]["most"] == stage["seconds"]["products"]["most"] == 0
    assert {found["blocks"] for found in stage["matrices"]} == {None}


def test_row_blocks_that_pad_too_much_come_with_what_works(planned):
    words = "--preset gpt2-small --dp 8 --tp 2 --side output"
    status, printed, data = planned(words)
    assert status == 2
    assert "keeps whole row blocks together" in printed
    offered = [found["what"] for found in data["alternatives"]]
    assert "--blocks 32" in offered
    assert "--num-distributed-optimizer-instances 2" in offered
    assert offered[-1] == "--side input"
    for flags in ("--blocks 48", offered[-2]):
        assert planned(f"{words} {flags}")[0] == 0
    status, _, stage = planned(f"{words} --blocks 48")
    assert {found["width"] * 48 for found in stage["matrices"]} == {768, 2304, 3072}
    assert {found["blocks_on_a_rank"] for found in stage["matrices"]} == {24, 48}


def test_a_staggered_step_refreshes_about_its_share(planned):
    words = "--preset llama3-8b --dp 8 --tp 2 --pp 4"
    whole, staggered = planned(words)[2], planned(f"{words} --stagger")[2]
    sent, in_turn = whole["refresh_bytes"]["dobb"], staggered["refresh_bytes"]["dobb"]
    assert in_turn["reduced"]["most"] < 2 / 9 * sent["reduced"]["most"], "a stage has not every step's share at once"
    assert in_turn["first"]["most"] == pytest.approx(sent["total"]["most"], rel=0.05)
    assert sent["first"] == sent["total"]
    assert staggered["seconds"]["refresh_step"]["most"] < whole["seconds"]["refresh_step"]["most"] / 2
    assert staggered["seconds"]["amortised"]["mean"] == pytest.approx(whole["seconds"]["amortised"]["mean"], rel=0.05)


def test_instances_share_the_buffers_among_fewer_ranks_and_the_moments_among_all(planned):
    words = "--preset gpt2-small --dp"
    one, half = planned(f"{words} 8")[2], planned(f"{words} 4")[2]
    two = planned(f"{words} 8 --num-distributed-optimizer-instances 2")[2]
    assert two["buffers"] == half["buffers"]
    assert two["memory"]["dobb"]["momentum"] == half["memory"]["dobb"]["momentum"]
    assert two["memory"]["dobb"]["moments"]["mean"] == one["memory"]["dobb"]["moments"]["mean"]
    shard = two["buffers"][0]["elements"] / 4
    assert two["step_bytes"]["dobb"]["most"] - half["step_bytes"]["dobb"]["most"] == 4 * shard


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("gpt2-small --side output --source activation", ["these second moments belong to the input axis"]),
        ("gpt2-small --source none --blocks 4", ["--dobb-blocks 4", "has no bases"]),
        ("gpt2-small --source gram --stagger", ["--dobb-stagger is incompatible with --dobb-source gram"]),
        ("gpt2-small --source gram --capture all", ["--dobb-capture all", "captures no sequences"]),
        ("gpt2-small --side output --fp16", ["--optimizer dobb does not work with", "loss scale"]),
        ("gpt2-small --side output --recompute-granularity full", ["recompute of whole layers", "core_attn"]),
        ("gpt2-small --side output --calculate-per-token-loss", ["--calculate-per-token-loss", "gram"]),
        (
            "mixtral-8x7b --dp 8 --side output",
            ["layers.0.mlp.experts.linear_fc1.weight0, a TEColumnParallelGroupedLinear of an expert"],
        ),
        ("mixtral-8x7b --dp 8 --tp 2 --etp 2 --ep 2 --norm l2", ["--dobb-norm l2", "--expert-tensor-parallel-size"]),
        ("gpt2-small --source none --plot plan.png", ["--plot", "leave it out"]),
        ("gpt2-small --norm l3", ["--norm", "'l3'", "'l2'"]),
        ("gpt2-small --side output --blocks 48 --tp 5 --dp 2", ["--tp 5"]),
        ("gpt2-small --side output --blocks 3 --tp 2", ["3 blocks", "2 tensor-parallel ranks", "output features"]),
        ("gpt2-small --dp 8 --num-distributed-optimizer-instances 3", ["instances 3", "8 data-parallel", "1, 2, 4, 8"]),
    ],
)
def test_what_a_run_refuses_is_refused_with_its_sentence(planned, words, fragments):
    status, printed, data = planned(f"--preset {words}")
    assert status == 2
    assert data is None or data["error"] in printed
    assert printed.startswith("error: ")
    for fragment in fragments:
        assert fragment in printed.split(" What would work")[0]


class Passes(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if not function.is_view and name not in ("aten::_unsafe_view", "aten::new_zeros"):
            read = args[1:] if name == "aten::copy_" else (args, kwargs)
            tensors = [leaf for leaf in tree_leaves((read, result)) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result


def passed_by(config):
    """Bytes for each element, of the column norms and of the update in plain PyTorch."""
    rows, columns, width = 512, 512, 4 if config.source != "none" else 1
    output_side = config.side == "output"
    basis = torch.eye(width).repeat(columns // width, 1, 1) if config.source != "none" else None
    shard = Shard(0, rows * columns, columns, width)
    weight, momentum, gradient = (torch.randn(rows * columns) for _ in range(3))
    segment = Segment("a", shard, rows, columns, weight, momentum, basis, output_side)
    settings = {"momentum": config.momentum, "nesterov": config.nesterov}
    scales = None
    with Passes() as norms:
        if config.norm == "l2":
            squares = reference.column_squares(segment, gradient, **settings)
            scales = [reference.column_scales(squares, segment.column_length)]
    with Passes() as update:
        settings |= {"learning_rate": 1e-3, "weight_decay": 0.1, "update_scale": 0.2, "column_scales": scales}
        reference.update([segment], [gradient], **settings)
    return norms.bytes / weight.numel(), update.bytes / weight.numel()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("side", ["input", "output"])
def test_memory_traffic_of_a_variant_is_what_its_operations_read_and_write(side, nesterov):
    """Norms and updates without a basis run as they are here; of the kernel's update only the transposing is."""
    for norm, source in (("sign", "gram"), ("l2", "gram"), ("sign", "none"), ("l2", "none")):
        config = DobbConfig(norm=norm, side=side, source=source, nesterov=nesterov)
        norms, update = passed_by(config)
        assert norms == pytest.approx(norm_bytes(config), abs=0.2)
        if source == "none":
            assert update == pytest.approx(update_bytes(config), abs=0.2)
        elif side == "output":
            plain = passed_by(DobbConfig(norm=norm, source=source, nesterov=nesterov))[1]
            assert update - plain == pytest.approx(update_bytes(config) - DOBB_BYTES, abs=0.2)
