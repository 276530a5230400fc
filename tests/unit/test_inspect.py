"""tools/inspect.py: figures are those of the saved tensors, whatever the layout; what it cannot read is refused."""

import json
import math
import os
import shutil
import tarfile
from argparse import Namespace
from collections import defaultdict
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from made_checkpoints import FACTS, megatron_folder, of_dobb, plain_file, small_dobb, state_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from megatron_dobb.megatron.dobb.run_metadata import DobbRunMetadata
from tools.inspection import cli
from tools.inspection.megatron import places
from tools.inspection.tables import kind_of

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "tests/data/checkpoints").iterdir())
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"


class Backend(Enum):
    """What Megatron's arguments contain, and this tool does not know."""

    FLASH = 1


class Marker:
    """Makes a folder when it is unpickled the usual way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def inspected(tmp_path, capsys):
    """Runs the command line; gives its status, what it printed, and the JSON."""

    def run(*words):
        path = tmp_path / "figures.json"
        path.unlink(missing_ok=True)
        status = cli.main([*map(str, words), "--json", str(path)])
        printed = " ".join(capsys.readouterr().out.split())
        return status, printed, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The kept checkpoints of Megatron, unpacked, by version and layout."""
    folder = tmp_path_factory.mktemp("kept")
    for version in KEPT:
        with tarfile.open(version / "gpt.tar.xz") as archive:
            archive.extractall(folder / version.name, filter="data")
    return folder


def by_name(data):
    return {weight["name"]: weight for weight in data["weights"]}


def effective_rank(values):
    p = values[values > 0] / values.sum()
    return math.exp(-float((p * p.log()).sum())) / len(values)


def expected(momentum, moment, basis, norm="sign"):
    """The figures of one weight in float64, of whole block-diagonal matrices and singular values."""
    momentum, moment, basis = momentum.double(), torch.block_diag(*moment.double()), torch.block_diag(*basis.double())
    coefficients = momentum @ basis
    scaled = coefficients.sign() if norm == "sign" else coefficients / coefficients.norm(dim=0)
    values, spectrum = torch.linalg.svdvals(scaled @ basis.T), torch.linalg.svdvals(moment)
    rotated = basis.T @ moment @ basis
    return {
        "rows": len(momentum),
        "columns": len(basis),
        "moment_effective_rank": effective_rank(spectrum),
        "basis_residual": float((rotated - rotated.diagonal().diag()).norm() / moment.norm()),
        "orthogonality": float(values.sum() / (values.norm() * math.sqrt(len(values)))),
        "update_effective_rank": effective_rank(values),
        "basis_error": float((basis.T @ basis - torch.eye(len(basis))).abs().max()),
    }


def assert_figures(found, right):
    for key, value in right.items():
        assert found[key] == pytest.approx(value, rel=2e-5), (found["name"], key)


# What is in it.


@pytest.mark.parametrize("version", KEPT, ids=lambda version: version.name)
@pytest.mark.parametrize("layout", ["dp_reshardable", "fully_reshardable"])
def test_figures_of_kept_megatron_checkpoints_are_those_of_their_tensors(inspected, kept, version, layout):
    status, _, data = inspected(kept / version.name / layout)
    assert status == 0
    assert (data["facts"]["kind"], data["facts"]["layout"]) == ("megatron", layout)
    assert (data["facts"]["attempted_steps"], data["facts"]["capture_sequences"]) == (4, 6)
    assert data["facts"]["format_version"] == (1 if version.name.endswith("dev1") else DobbRunMetadata.version)
    saved = json.loads((version / "values.json").read_text())["gpt"]["tensors"]
    assert sorted(by_name(data)) == sorted(
        name.removeprefix("basis of ") for name in saved if name.startswith("basis of ")
    )
    # Momenta have names in the other layout only, which holds the same run.
    folder = kept / version.name / "fully_reshardable"
    stacks = {
        f"optimizer.state.exp_avg.decoder.layers.{kind}.weight": torch.empty(2, *shape)
        for kind, shape in {
            "mlp.linear_fc1": (32, 16),
            "mlp.linear_fc2": (16, 32),
            "self_attention.linear_proj": (16, 16),
            "self_attention.linear_qkv": (48, 16),
        }.items()
    }
    wanted = {**stacks}
    for name, found in by_name(data).items():
        shape = (found["blocks"], found["width"], found["width"])
        for kind, dtype in (("moment", torch.float32), ("basis", torch.bfloat16)):
            wanted[f"optimizer.dobb.{kind}.{name}"] = torch.empty(shape, dtype=dtype)
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    for name, found in by_name(data).items():
        number = int(name.split(".")[2])
        momentum = wanted[f"optimizer.state.exp_avg.{name.replace(f'layers.{number}.', 'layers.')}"][number]
        moment, basis = (wanted[f"optimizer.dobb.{kind}.{name}"] for kind in ("moment", "basis"))
        assert_figures(found, expected(momentum, moment, basis))
        assert found["no_update"] is None


@pytest.mark.parametrize("version", KEPT, ids=lambda version: version.name)
def test_figures_of_kept_plain_checkpoints_are_those_of_their_tensors(inspected, version):
    status, printed, data = inspected(version / "plain.pt")
    assert status == 0
    assert data["facts"]["attempted_steps"] == 4
    state = torch.load(version / "plain.pt", weights_only=True)["optimizer"]["state"]
    for number, name in enumerate(("0.weight", "2.weight")):
        assert_figures(by_name(data)[name], expected(**state[number]))
    assert "skipped_blocks, fallback_blocks: counted from each start on, and saved in no checkpoint" in printed
    assert "basis_residual: not judged before step 100" in printed


def test_every_form_of_a_plain_optimizers_state_has_the_same_figures(inspected, tmp_path):
    model, optimizer = small_dobb()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    forms = {
        "nested": {"optimizer": get_optimizer_state_dict(model, optimizer)},
        "flat": {"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)},
        "numbers": optimizer.state_dict(),
    }
    for name, form in forms.items():
        dcp.save(form, checkpoint_id=tmp_path / name, no_dist=True)
    torch.save(optimizer.state_dict(), tmp_path / "file")
    torch.save(forms["nested"], tmp_path / "nested file")
    _, _, right = inspected(tmp_path / "file")
    assert [weight["name"] for weight in right["weights"]] == ["0.weight", "2.weight"]
    assert right["facts"]["attempted_steps"] == 2
    assert right["facts"]["capture_sequences"] == 8
    for name in (*forms, "nested file"):
        status, printed, data = inspected(tmp_path / name)
        assert status == 0, printed
        assert data["weights"] == right["weights"], name
        assert data["facts"] | {"layout": None} == right["facts"] | {"layout": None}, name


@pytest.mark.parametrize("norm", ["sign", "l2"])
def test_blocks_over_the_output_axis_are_those_of_the_transposed_weight(inspected, tmp_path, norm):
    state = state_of(rows=20)
    turned = {**state, "momentum": state["momentum"].t().contiguous()}
    path = plain_file(tmp_path / "file", {"w": turned}, side="output", source="output-gradient")
    _, printed, data = inspected(path, "--norm", norm)
    found = expected(**state, norm=norm)
    assert_figures(by_name(data)["w"], {**found, "rows": 16, "columns": 20})
    assert "norm: not named" not in printed


def test_a_variant_without_bases_says_so_and_shows_its_update(inspected, tmp_path):
    ones = torch.ones(16, 1, 1)
    path = plain_file(tmp_path / "file", {"w": {**state_of(), "moment": 0 * ones, "basis": ones}}, source="none")
    _, printed, data = inspected(path)
    values = torch.linalg.svdvals(state_of()["momentum"].sign().double())
    assert by_name(data)["w"]["update_effective_rank"] == pytest.approx(effective_rank(values))
    assert by_name(data)["w"]["basis_residual"] is None
    assert "moments, bases: this variant has none" in printed
    assert data["unhealthy"] == []


def test_layers_and_experts_find_their_momenta_in_megatrons_stacks(inspected, tmp_path):
    grouped = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
    apart = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    states = {name: state_of(seed=number) for number, name in enumerate((FC1, grouped, apart))}
    prefix = "optimizer.state.exp_avg.decoder.layers.mlp."
    rows = {name: states[name]["momentum"] for name in states}
    stacks = {
        f"{prefix}linear_fc1.weight_w": torch.zeros(2, 6, 16),
        f"{prefix}linear_fc1.weight_v": torch.zeros(2, 6, 16),
    }
    stacks[f"{prefix}linear_fc1.weight_v"][1], stacks[f"{prefix}linear_fc1.weight_w"][1] = rows[FC1].chunk(2)
    for name, layer in ((grouped, "linear_fc1"), (apart, "linear_fc2")):
        stack = stacks[f"{prefix}experts.experts.{layer}.weight"] = torch.zeros(2, 4, 12, 16)
        stack[1, 2] = rows[name]
    of_all = {key: tensor for name, state in states.items() for key, tensor in of_dobb(name, state).items()}
    arguments = Namespace(optimizer="dobb", dobb_norm="sign", tensor_model_parallel_size=2, backend=Backend.FLASH)
    _, _, data = inspected(megatron_folder(tmp_path / "one", {**stacks, **of_all}, args=arguments, iteration=70))
    for name, state in states.items():
        assert_figures(by_name(data)[name], expected(**state))
    assert (data["facts"]["iteration"], data["facts"]["norm"]) == (70, "sign")
    assert data["facts"]["run"]["tensor_model_parallel_size"] == 2


def test_without_bases_the_weights_of_a_megatron_checkpoint_are_those_without_second_moments(inspected, tmp_path):
    whole = {number: state_of(seed=number)["momentum"] for number in range(5)}
    prefix, layers = "optimizer.state.exp_avg.", "decoder.layers.mlp."
    halves = [whole[number].chunk(2) for number in (0, 1)]
    tensors = {
        f"{prefix}{layers}linear_fc1.weight_w": torch.stack([half for half, _ in halves]),
        f"{prefix}{layers}linear_fc1.weight_v": torch.stack([half for _, half in halves]),
        f"{prefix}{layers}experts.experts.linear_fc2.weight": torch.stack([whole[2], whole[3]])[None],
        f"{prefix}decoder.layers.7.self_attention.linear_proj.weight": whole[4],
        f"{prefix}output_layer.weight": torch.zeros(4, 4),
        "optimizer.state.exp_avg_sq.output_layer.weight": torch.zeros(4, 4),
    }
    dobb = {**FACTS, "blocks": None, "block_width": 1, "source": "none", "side": "output"}
    _, printed, data = inspected(megatron_folder(tmp_path / "names", tensors, dobb=dobb))
    experts = "decoder.layers.0.mlp.experts.linear_fc2.weight"
    names = [FC1.replace(".1.", ".0."), FC1, f"{experts}0", f"{experts}1"]
    names.append("decoder.layers.7.self_attention.linear_proj.weight")
    assert sorted(by_name(data)) == sorted(names)
    for name, momentum in zip(names, whole.values(), strict=True):
        found = by_name(data)[name]["update_effective_rank"]
        assert found == pytest.approx(effective_rank(torch.linalg.svdvals(momentum.sign().double())))
    assert "moments, bases: this variant has none" in printed
    status, printed, _ = inspected(megatron_folder(tmp_path / "none", {"weight": torch.zeros(3)}, dobb=dobb))
    assert status == 2
    assert "--dist-ckpt-optim-fully-reshardable" in printed


def test_without_bases_a_weight_that_is_excluded_in_other_layers_is_found_by_its_empty_second_moment(
    inspected, tmp_path
):
    prefix, layers = "optimizer.state.exp_avg", "decoder.layers.mlp."
    momenta = torch.stack([state_of(seed=number)["momentum"] for number in range(2)])
    tensors = {
        f"{prefix}.{layers}linear_fc1.weight": momenta,
        f"{prefix}_sq.{layers}linear_fc1.weight": momenta.square() * torch.tensor([1, 0]).view(2, 1, 1),
        f"{prefix}.{layers}router.weight": momenta,
        f"{prefix}_sq.{layers}router.weight": momenta.square(),
    }
    dobb = {**FACTS, "blocks": None, "block_width": 1, "source": "none", "exclude": ["*.layers.0.*"]}
    _, _, data = inspected(megatron_folder(tmp_path / "names", tensors, dobb=dobb))
    assert list(by_name(data)) == [FC1]


def test_every_place_of_a_weight_is_tried():
    assert ("decoder.layers.mlp.linear_fc1.weight", (1,)) in list(places(FC1))
    assert (FC1, ()) in list(places(FC1))
    found = list(places("mtp.layers.0.block.layers.3.self_attention.linear_qkv.weight"))
    assert ("mtp.layers.0.block.layers.self_attention.linear_qkv.weight", (3,)) in found
    assert ("mtp.layers.block.layers.self_attention.linear_qkv.weight", (0, 3)) in found


def test_a_momentum_that_cannot_be_put_together_is_named_with_the_reason(inspected, tmp_path):
    state = state_of()
    weight, bucket = torch.randn(12, 16), "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0"
    half = {
        f"{bucket}.param": weight[:6].flatten().clone(),
        f"{bucket}.exp_avg": state["momentum"][:6].flatten().clone(),
    }
    tensors = {**of_dobb(FC1, state), **half, "decoder.layers.mlp.linear_fc1.weight": torch.stack([weight, weight])}
    status, printed, data = inspected(megatron_folder(tmp_path / "one", tensors, "dp_reshardable"))
    assert status == 0
    assert by_name(data)[FC1]["orthogonality"] is None
    assert by_name(data)[FC1]["basis_residual"] == pytest.approx(expected(**state)["basis_residual"])
    assert f"figures of the update of {FC1}: dp_reshardable keeps momenta by their place" in printed
    assert "--dist-ckpt-optim-fully-reshardable" in printed


@pytest.mark.parametrize("way", ["whole", "rows", "columns", "gated"])
def test_a_momentum_in_buckets_is_found_by_its_rounded_masters(inspected, tmp_path, way):
    """Of each tensor-parallel rank a bucket, which begins with its part of the weight; others begin alike."""
    state, other, master = state_of(), torch.randn(12 * 16), torch.randn(12, 16)

    def parts(whole):
        if way == "gated":
            first, second, third, fourth = whole.chunk(4)
            return [torch.cat([first, third]), torch.cat([second, fourth])]
        return {"whole": [whole], "rows": whole.chunk(2), "columns": whole.chunk(2, 1)}[way]

    tensors = {}
    for number, both in enumerate(zip(parts(master), parts(state["momentum"]), strict=True)):
        for kind, part in zip(("param", "exp_avg"), both, strict=True):
            flat = torch.cat([part.flatten(), other])
            tensors[f"optimizer.distributed.dp_group_idx_{number}.bucket_idx_0.{kind}"] = flat
            alike = flat.clone()
            alike[part.numel() - 1] += 1
            tensors[f"optimizer.distributed.dp_group_idx_{number}.bucket_idx_1.{kind}"] = alike
    stack = torch.stack([torch.zeros(12, 16), master]).bfloat16()
    tensors |= {**of_dobb(FC1, state), "decoder.layers.mlp.linear_fc1.weight": stack}
    _, _, data = inspected(megatron_folder(tmp_path / "one", tensors, "dp_reshardable"))
    assert_figures(by_name(data)[FC1], expected(**state))


def test_the_latest_iteration_is_opened_and_its_weights_can_be_chosen(inspected, kept, tmp_path):
    for number, version in enumerate(KEPT, start=1):
        shutil.copytree(kept / version.name / "fully_reshardable", tmp_path / f"iter_{number:07d}")
    status, printed, data = inspected(tmp_path)
    assert (status, data) == (2, None)
    assert f"such as {tmp_path}/iter_{len(KEPT):07d}" in printed
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    _, _, data = inspected(tmp_path, "--weights", "*.layers.0.*fc?.*", "*.layers.1.*proj*")
    assert [name.split(".layers.")[1] for name in by_name(data)] == [
        *("0.mlp.linear_fc1.weight", "0.mlp.linear_fc2.weight", "1.self_attention.linear_proj.weight")
    ]
    status, printed, _ = inspected(tmp_path, "--weights", "*.fc1")
    assert status == 2
    assert "--weights *.fc1 matches no weight on Dobb; one of them is decoder.layers.0.mlp.linear_fc1.weight" in printed


def test_a_file_that_cannot_be_written_is_refused_before_the_checkpoint_is_read(tmp_path, capsys):
    assert cli.main([str(tmp_path / "nothing"), "--json", str(tmp_path)]) == 2
    assert (
        f"--json {tmp_path} is a folder: name a file in it, such as {tmp_path}/figures.json" in capsys.readouterr().out
    )


def test_pictures_are_drawn(inspected, kept, tmp_path):
    inspected(kept / KEPT[0].name / "fully_reshardable", "--plot", tmp_path / "pictures")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["layers.png", "spectra.png"]
    assert (
        kind_of("decoder.layers.11.mlp.experts.linear_fc1.weight2") == "decoder.layers.*.mlp.experts.linear_fc1.weight*"
    )


def test_many_weights_are_shown_by_kind(inspected, tmp_path):
    weights = {f"layers.{number}.{kind}": state_of() for number in range(31) for kind in ("up", "down")}
    _, printed, data = inspected(plain_file(tmp_path / "file", weights))
    assert "layers.*.up (31)" in printed
    assert len(data["weights"]) == 62


# What looks unhealthy.


def unhealthy():
    healthy = state_of()
    eye = torch.eye(8).expand(2, 8, 8)
    one = torch.outer(torch.ones(8), torch.ones(8)).expand(2, 8, 8) * torch.tensor([1.0, 0.0])[:, None, None]
    cases = {
        "not_finite": {**healthy, "momentum": healthy["momentum"].clone().fill_(math.nan)},
        "basis_error": {**healthy, "basis": healthy["basis"] * 1.001},
        "basis_residual": {**healthy, "basis": torch.linalg.qr(state_of(seed=3)["moment"] + 2).Q},
        "orthogonality": {
            **healthy,
            "basis": torch.linalg.qr(state_of(seed=3)["moment"] + 2).Q,
            "momentum": torch.outer(torch.ones(12), torch.arange(1.0, 17)),
        },
        "one_direction": {**healthy, "moment": one + 1e-9 * eye},
        "empty_blocks": {**healthy, "moment": healthy["moment"] * torch.tensor([1.0, 0.0])[:, None, None]},
        "never_refreshed": {**healthy, "basis": eye.contiguous()},
        "dead_features": {**healthy, "moment": healthy["moment"].clone()},
        "zero_momentum_rows": {**healthy, "momentum": healthy["momentum"].clone()},
    }
    cases["dead_features"]["moment"][0, 2], cases["dead_features"]["moment"][0, :, 2] = 0, 0
    cases["zero_momentum_rows"]["momentum"][4] = 0
    return {"healthy": healthy, **cases}


def test_each_sign_is_found_in_the_weight_that_shows_it(inspected, tmp_path):
    cases = unhealthy()
    status, printed, data = inspected(plain_file(tmp_path / "file", cases))
    assert status == 0
    found = {finding["sign"]: finding["weights"] for finding in data["unhealthy"]}
    assert not any("healthy" in weights for weights in found.values())
    for sign in cases.keys() - {"healthy"}:
        assert sign in found[sign], (sign, found)
        assert sign in printed
    assert found["not_finite"] == {"not_finite": "momentum"}
    assert found["empty_blocks"] == {"empty_blocks": 1}
    assert found["dead_features"] == {"dead_features": 1}
    assert found["zero_momentum_rows"] == {"zero_momentum_rows": 1}
    assert found["never_refreshed"] == {"never_refreshed": 2}
    assert set(found["basis_error"]) == {"basis_error"}


def test_a_basis_that_was_rounded_is_not_called_damaged(inspected, tmp_path):
    weights = {
        dtype: {**state_of(), "basis": state_of()["basis"].to(getattr(torch, dtype))}
        for dtype in ("bfloat16", "float32")
    }
    _, _, data = inspected(plain_file(tmp_path / "file", weights))
    assert data["unhealthy"] == []
    assert by_name(data)["bfloat16"]["basis_error"] > 1e-4


def test_nothing_but_damage_is_judged_before_there_was_a_step(inspected, tmp_path):
    empty = {"momentum": torch.zeros(4, 16), "moment": torch.zeros(2, 8, 8), "basis": torch.eye(8).repeat(2, 1, 1)}
    _, printed, data = inspected(plain_file(tmp_path / "file", {"w": empty}, steps=0))
    assert data["unhealthy"] == []
    assert by_name(data)["w"]["identity_blocks"] == by_name(data)["w"]["empty_blocks"] == 2
    assert "figures of the update of w: its momentum is zero" in printed
    _, _, data = inspected(plain_file(tmp_path / "file", {"w": empty}, steps=1))
    assert [finding["sign"] for finding in data["unhealthy"]] == ["empty_blocks", "zero_momentum_rows"]


# What cannot be read.


def cut(folder):
    [file] = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])


def overwrite(folder):
    [file] = folder.glob("*.distcp")
    file.write_bytes(bytes(len(file.read_bytes())))


def test_what_is_no_whole_checkpoint_of_dobb_is_refused_in_one_sentence(inspected, tmp_path):
    good = of_dobb(FC1, state_of())
    torch.save({"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}, tmp_path / "adamw")
    shape = {**state_of(), "momentum": torch.zeros(3, 4)}
    folders = {
        "cut off": (megatron_folder(tmp_path / "cut", good), cut),
        "cannot read": (megatron_folder(tmp_path / "zeros", good), overwrite),
        "cannot read ": (
            megatron_folder(tmp_path / "index", good),
            lambda path: (path / ".metadata").write_bytes(b"no"),
        ),
        "lacks its file": (megatron_folder(tmp_path / "lost", good), lambda path: next(path.glob("*.distcp")).unlink()),
    }
    for folder, damage in folders.values():
        assert inspected(folder)[0] == 0
        damage(folder)
    newer = {**FACTS, "version": DobbRunMetadata.version + 1}
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text("70")
    adam = megatron_folder(tmp_path / "adam", {"weight": torch.zeros(3)}, dobb=None, args=Namespace(optimizer="adam"))
    refused = {
        **{text: folder for text, (folder, _) in folders.items()},
        f"version {DobbRunMetadata.version + 1}, and this megatron_dobb": megatron_folder(
            tmp_path / "new", good, dobb=newer
        ),
        "it was written by --optimizer adam": adam,
        "it was not saved by Dobb": tmp_path / "adamw",
        "which do not fit": plain_file(tmp_path / "shape", {"w": shape}),
        "names iter_0000070": tmp_path / "latest",
        "does not exist": tmp_path / "nothing",
        "is no checkpoint": ROOT / "docs",
        "was not written by torch.save": ROOT / "README.md",
        f"has no basis of {FC1}": megatron_folder(tmp_path / "half", {k: v for k, v in good.items() if "moment" in k}),
    }
    for text, path in refused.items():
        status, printed, data = inspected(path)
        assert (status, data) == (2, None), (text, printed)
        assert printed.startswith("error: "), printed
        assert text.strip() in printed, (text, printed)
        assert "Traceback" not in printed


def test_nothing_in_a_checkpoint_is_run(inspected, tmp_path):
    made = tmp_path / "made"
    others = {"other": Marker(str(made)), "losses": defaultdict(list, {0: [2.0]})}
    torch.save({**others, **torch.load(plain_file(tmp_path / "file", {"w": state_of()}))}, tmp_path / "file")
    assert inspected(tmp_path / "file")[0] == 0
    assert inspected(megatron_folder(tmp_path / "one", of_dobb(FC1, state_of()), marker=Marker(str(made))))[0] == 0
    assert not made.exists()
    torch.load(tmp_path / "file", weights_only=False)
    assert made.exists(), "the marker does nothing, so this test shows nothing"
