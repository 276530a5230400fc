"""`tools/plan.py`: the same figures however a model is given, known figures of well-known models, and its refusals."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dobb.methods.dobb.footprint import triangle
from tools.planning import cli
from tools.planning.arguments import pattern_of_layers
from tools.planning.presets import PRESETS
from tools.planning.sizes import ModelSizes, Parallel
from tools.planning.stages import layers_of_chunks

ROOT = Path(__file__).parents[2]
LLAMA3_8B = r"""
# As a launch script has them.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --ffn-hidden-size=14336  # of each of both halves
    --swiglu --disable-bias-linear --normalization RMSNorm
    --untie-embeddings-and-output-weights --position-embedding-type rope
    --vocab-size 128256 --max-position-embeddings 8192 --bf16
    --tokenizer-type "Null Tokenizer" --lr 3e-4
)
--tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce --optimizer dobb --dobb-blocks 8
"""


@pytest.fixture
def planned(tmp_path, capsys):
    """Runs the command line; gives its status, what it printed, and the JSON."""

    def run(*words):
        path = tmp_path / "plan.json"
        path.unlink(missing_ok=True)
        status = cli.main([*map(str, words), "--json", str(path)])
        printed = " ".join(capsys.readouterr().out.split())
        return status, printed, json.loads(path.read_text()) if path.exists() else None

    return run


def parameters(sizes):
    """Elements of a model on one rank, without the vocabulary's padding."""
    from tools.planning.parameters import parameters_of_chunk

    whole = parameters_of_chunk(sizes, Parallel(), range(sizes.num_layers), first=True, last=True)
    return sum(parameter.numel for parameter in whole)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-small", 0.124476),  # with a vocabulary padded to 50,304
        ("gpt2-xl", 1.5577),
        ("llama3-8b", 8.0303),
        ("llama3-70b", 70.5537),
        ("llama3-405b", 405.8534),
        ("mixtral-8x7b", 46.7028),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name, billions):
    assert parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=3e-4)


def test_a_file_of_flags_gives_the_plan_of_the_same_preset(planned, tmp_path):
    (tmp_path / "flags.txt").write_text(LLAMA3_8B)
    status, printed, from_file = planned("--args", tmp_path / "flags.txt", "--dp", 16)
    assert status == 0
    assert "not looked at" in printed
    assert from_file["ignored_flags"] == ["--tokenizer-type", "--lr", "--optimizer"]
    _, _, from_preset = planned("--preset", "llama3-8b", "--tp", 2, "--dp", 16, "--blocks", 8, "--overlap-grad-reduce")
    assert from_preset["stages"] == from_file["stages"]
    sizes = LLAMA3_8B[LLAMA3_8B.index("--num-layers") : LLAMA3_8B.index("--tokenizer")]
    words = [word for line in sizes.splitlines() for word in line.split("#")[0].rstrip("\\").split()]
    _, _, from_line = planned(
        *words, "--tp", 2, "--sequence-parallel", "--overlap-grad-reduce", "--blocks", 8, "--dp", 16
    )
    assert from_line["stages"] == from_file["stages"]


def test_the_command_line_goes_before_the_file(planned, tmp_path):
    (tmp_path / "flags.txt").write_text(LLAMA3_8B)
    _, _, data = planned("--args", tmp_path / "flags.txt", "--blocks", 4, "--tp", 1)
    assert (data["dobb"]["blocks"], data["parallel"]["tensor"], data["model"]["num_layers"]) == (4, 1, 32)


def test_llama3_8b_keeps_and_sends_what_its_shapes_say(planned):
    """Of one rank alone: 6 n^2/B bytes of A and Q; of 64, the triangles of its moments."""
    _, _, alone = planned("--preset", "llama3-8b")
    square = 32 * (3 * 4096 * 256 + 14336 * 896)
    memory = alone["stages"][0]["memory"]["dobb"]
    assert memory["moments"] == {"mean": 4 * square, "most": 4 * square}
    assert memory["bases"] == {"mean": 2 * square, "most": 2 * square}
    assert memory["sums"]["most"] == 4 * square
    assert alone["stages"][0]["refresh_bytes"]["dobb"]["total"]["most"] == 0
    _, _, many = planned("--preset", "llama3-8b", "--dp", 64, "--overlap-grad-reduce")
    (stage,) = many["stages"]
    triangles = 32 * 16 * (3 * triangle(256) + triangle(896))
    reduced = stage["refresh_bytes"]["dobb"]["reduced"]["most"]
    assert 4 * triangles < reduced <= 4 * (triangles + 128 + 2 * 64)
    assert stage["refresh_bytes"]["paper"]["most"] == 4 * square
    assert stage["memory"]["dobb"]["moments"]["mean"] == 4 * square / 64
    assert stage["memory"]["adamw"]["state"]["mean"] == 2 * stage["memory"]["dobb"]["momentum"]["mean"]
    (buffer,) = stage["buffers"]
    assert buffer["unit"] == 64 * 4 * 7  # lcm(64, 256, 896)
    assert stage["step_bytes"]["dobb"]["most"] - stage["step_bytes"]["adamw"]["most"] == 6 * buffer["padding"]


def test_context_and_data_parallel_ranks_share_the_buffers_alike(planned):
    _, _, data = planned("--preset", "gpt2-small", "--dp", 8)
    _, _, context = planned("--preset", "gpt2-small", "--dp", 2, "--cp", 4)
    assert data["stages"] == context["stages"]


def test_experts_have_buffers_and_data_parallel_ranks_of_their_own(planned):
    _, _, data = planned("--preset", "mixtral-8x7b", "--tp", 2, "--dp", 16, "--ep", 4)
    (stage,) = data["stages"]
    assert [(buffer["experts"], buffer["shards"]) for buffer in stage["buffers"]] == [(False, 16), (True, 8)]
    experts = [found for found in stage["matrices"] if found["expert"]]
    assert sum(found["count"] for found in experts) == 32 * 2 * 2
    _, _, together = planned("--preset", "mixtral-8x7b", "--dp", 16)
    assert [buffer["experts"] for buffer in together["stages"][0]["buffers"]] == [False]


def test_times_are_traffic_and_products_over_the_given_rates(planned):
    rates = ("--memory-bandwidth", "1e12", "--flops", "1e15", "--fp32-flops", "1e13", "--network-bandwidth", "1e9")
    _, _, data = planned("--preset", "gpt2-small", "--blocks", 16, *rates)
    matrices = 12 * 12 * 768**2
    (stage,) = data["stages"]
    others = stage["elements"] - matrices
    found = {name: value["most"] for name, value in stage["seconds"].items()}
    assert found["memory"] == pytest.approx((22 * matrices + 30 * others) / 1e12)
    narrow, wide = 12 * 8 * 768**2 * 6 * 48, 12 * 4 * 768**2 * 6 * 192
    assert found["products"] == pytest.approx((narrow + wide) / 1e15)
    assert found["update"] == found["memory"], "blocks of 48 and 192 are bound by memory"
    assert found["adamw"] == pytest.approx(30 * stage["elements"] / 1e12)
    assert found["exchange"] == 0
    blocks = 12 * 16 * (3 * 48**3 + 192**3)
    assert found["refresh"] == pytest.approx(blocks * (2 + 8 / 3) / 1e13)
    slow, *_ = planned("--preset", "gpt2-small", *rates[:2], "--flops", "1e12")[2]["stages"]
    assert slow["seconds"]["update"]["most"] > found["update"]


def test_keys_are_those_that_the_documentation_lists(planned):
    _, _, data = planned("--preset", "gpt2-small", "--dp", 2)
    page = (ROOT / "docs/planning.md").read_text()
    listed = {*data, *data["stages"][0], *data["heaviest"], *data["stages"][0]["seconds"]}
    assert data["format"] == 1
    assert not [key for key in sorted(listed) if f"`{key}`" not in page]


def test_the_plot_shows_every_block_count_that_works(planned, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, data = planned("--preset", "gpt2-small", "--tp", 4, "--dp", 4, "--plot", tmp_path / "plot.png")
    assert status == 0
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert [point["blocks"] for point in data["trade_off"]] == [4, 8, 16, 32, 64, 128]
    states = [point["state_bytes"] for point in data["trade_off"]]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--preset llama3-8b --tp 3", ["--tp 3", "32 heads", "1, 2, 4"]),
        ("--preset gpt2-small --pp 5", ["--pp 5", "12 layers", "1, 2, 3, 4, 6 or 12"]),
        ("--preset gpt2-small --pp 2 --vpp 4", ["--vpp 4", "6 layers", "1, 2, 3, 6"]),
        ("--preset gpt2-small --vpp 2", ["--vpp 2", "more than one pipeline stage", "--pp 2"]),
        ("--preset llama3-8b --blocks 24", ["24", "4096 input features", "16, 32"]),
        ("--preset llama3-8b --tp 16 --blocks 8", ["8 blocks", "16 tensor-parallel ranks", "16, 32"]),
        ("--preset mixtral-8x7b --dp 16 --ep 3", ["--ep 3", "16 ranks", "1, 2, 4"]),
        ("--preset mixtral-8x7b --dp 16 --ep 16", ["--ep 16", "8 experts", "1, 2, 4, 8"]),
        ("--preset mixtral-8x7b --etp 2", ["--etp 2", "1 ranks", "use one of 1"]),
        ("--preset gpt2-small --dp 0", ["--dp 0", "at least 1"]),
        ("--preset gpt2-small --dp two", ["--dp two", "whole number"]),
        ("--preset gpt2-small --flops -3", ["--flops -3", "above 0"]),
        ("--preset gpt2-small --exclude nothing", ["--dobb-exclude nothing", "matches no weight"]),
        ("--preset gpt2-small --exclude *", ["no matrix", "--dobb-exclude"]),
        ("--preset gpt2-small --blocks-for fc2", ["fc2", "PATTERN=COUNT"]),
        ("--preset gpt3", ["--preset", "'gpt3'", "gpt2-small"]),
        ("--num-layers 2", ["--hidden-size, --num-attention-heads, --vocab-size missing", "--preset"]),
        ("--preset gpt2-small --num-attention-heads 7", ["--hidden-size 768", "7", "--kv-channels"]),
        ("--preset llama3-8b --num-query-groups 5", ["--num-query-groups 5", "32", "1, 2, 4"]),
        ("--preset gpt2-small --num-experts 4", ["--num-experts 4", "--disable-bias-linear"]),
        ("--preset llama3-8b --moe-layer-freq 2", ["--moe-layer-freq", "--num-experts"]),
        ("--preset mixtral-8x7b --moe-layer-freq [0,1]", ["--moe-layer-freq", "2 layers of 32"]),
        ("--preset mixtral-8x7b --moe-layer-freq [2]", ["--moe-layer-freq [2]", "([0]*3+[1]*58)"]),
        ("--args /no/such/file", ["--args /no/such/file", "text file"]),
        ("--preset gpt2-small --plot /no/such/folder/a.png", ["--plot", "no folder"]),
        ("--preset gpt2-small --decoder-first-pipeline-num-layers 3 --pp 3", ["9 for 2 other stages", "--pp 3"]),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_works(planned, words, fragments):
    status, printed, _ = planned(*words.split())
    assert status == 2
    assert printed.startswith("error: ")
    sentence = printed.split(" What would work")[0]
    for fragment in fragments:
        assert fragment in sentence
    assert "Traceback" not in printed


@pytest.mark.parametrize("flag", ["--mtp-num-layers 1", "--ddp-num-buckets=2", "--spec a b"])
def test_a_file_that_asks_for_what_is_not_planned_for_is_refused_by_name(planned, tmp_path, flag):
    (tmp_path / "flags.txt").write_text(f"{LLAMA3_8B} {flag}")
    status, printed, data = planned("--args", tmp_path / "flags.txt")
    assert (status, data) == (2, None)
    assert flag.replace("=", " ").split()[0] in printed
    assert "leave it out" in printed


def test_an_impossible_layout_comes_with_layouts_that_work(planned):
    status, printed, data = planned("--preset", "llama3-8b", "--tp", 16, "--dp", 4, "--blocks", 8)
    assert status == 2
    assert "What would work" in printed
    offered = [found["what"] for found in data["alternatives"]]
    assert offered[:2] == ["--blocks 16", "--blocks 32"]
    assert "--tp 8 --dp 8" in offered
    assert "8 blocks" in data["error"]
    for flags in (offered[0], offered[-1]):
        words = {"--tp": "16", "--dp": "4", "--blocks": "8"}
        words |= dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
        assert planned("--preset", "llama3-8b", *(w for pair in words.items() for w in pair))[0] == 0


def test_a_unit_above_the_cap_comes_with_block_counts_that_work(planned):
    sizes = "--num-layers 2 --hidden-size 1009 --num-attention-heads 1 --ffn-hidden-size 1013"
    model = [*sizes.split(), "--vocab-size", "64"]
    status, printed, data = planned(*model, "--blocks", 1)
    assert status == 2
    assert "align only every" in printed
    assert data["alternatives"] == [], "no other count divides a prime"
    assert "--exclude" in printed
    assert planned(*model, "--blocks", 1, "--exclude", "*.linear_fc2")[0] == 0


def test_every_layer_is_dealt_out_once():
    sizes = ModelSizes(30, 8, 2)
    for parallel in (
        Parallel(pipeline=5),
        Parallel(pipeline=5, chunks=3),
        Parallel(pipeline=4, first_layers=3, last_layers=5),
        Parallel(pipeline=4, count_embedding=True, count_loss=True),
        Parallel(pipeline=4, chunks=4, count_embedding=True, count_loss=True),
    ):
        chunks = layers_of_chunks(sizes, parallel)
        assert [len(stage) for stage in chunks] == [parallel.chunks] * parallel.pipeline
        in_order = [layer for chunk in range(parallel.chunks) for stage in chunks for layer in stage[chunk]]
        assert in_order == list(range(30))


def test_patterns_of_layers_are_read_as_megatron_reads_them():
    assert pattern_of_layers("2") == 2
    assert pattern_of_layers("([0]*1+[1]*3)") == (0, 1, 1, 1)
    assert pattern_of_layers("[1,0]*2 + [1]") == (1, 0, 1, 0, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("--preset llama3-405b --tp 8 --pp 16 --dp 128", 20),
        ("--preset llama3-405b --tp 8 --pp 16 --dp 16384", 60),
    ],
)
def test_thousands_of_ranks_take_seconds(words, seconds):
    """Of the processor, which other processes do not lengthen; 4 and 10 where it was measured first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(ROOT / "tools/plan.py"), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < seconds
    assert "1-14" in done.stdout


@pytest.mark.parametrize(
    ("flag", "name", "what"),
    [
        ("--json", "folder", "is a folder: name a file in it, such as"),
        ("--plot", "folder", "is a folder: name a file in it, such as"),
        ("--plot", "plan.words", "does not end in a picture's format: use one of .png, .pdf, .svg, .jpg"),
        ("--json", "closed", "give --json and --plot files that can be written"),
    ],
)
def test_files_that_cannot_be_written_are_one_sentence(capsys, tmp_path, flag, name, what):
    (tmp_path / "folder").mkdir()
    (tmp_path / "closed").symlink_to("/dev/full")
    assert cli.main(["--preset", "gpt2-small", flag, str(tmp_path / name)]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert what in printed
    assert printed.count("error: ") == 1


def test_blocks_of_a_pattern_that_do_not_fit_are_named_by_the_pattern(planned):
    status, printed, _ = planned("--preset", "gpt2-small", "--blocks-for", "*.linear_fc2=5")
    assert status == 2
    assert "linear_fc2.weight: --dobb-blocks-for '*.linear_fc2=5' does not divide its 3072 input features" in printed
    assert "or leave it to AdamW with --dobb-exclude" in printed
    assert "give this weight its own count" not in printed
