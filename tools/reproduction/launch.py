"""The paper's true configuration, which needs GPUs, as commands to run on a cluster."""

from typing import Any

from rich.console import Console

from ..common.tables import Result
from .paper import FINAL_LOSS
from .runs import Method

LAUNCH = """\
# GPT-2 Small, {label}: 12 layers of width 768 on OpenWebText, 10,000 steps of 480 x 1024 = 491,520 tokens.
# Make DATA_text_document with Megatron-LM's tools/preprocess_data.py; takes a node of 8 GPUs.
torchrun --nproc-per-node 8 -m megatron_dobb pretrain_gpt.py \\
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 \\
    --attention-dropout 0 --hidden-dropout 0 --bf16 \\
    --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \\
    --data-path DATA_text_document --split 999,1,0 \\
    --micro-batch-size 10 --global-batch-size 480 --train-iters 10000 \\
    --lr 3.54e-3 --lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 0 --weight-decay 0.1 --clip-grad 1.0 \\
    --adam-beta1 0.9 --adam-beta2 0.95 --use-distributed-optimizer --seed {seed} \\
    --eval-interval 500 --eval-iters 40 --log-interval 10 \\
    {optimizer}"""
"""The paper's Small configuration as a command. Warm-up, decay and weight decay are ours: the paper's are not known."""


def launch_commands(methods: dict[str, Method], seeds: int) -> Result:
    """The paper's configuration as Megatron commands: nothing is trained."""
    console = Console(soft_wrap=True)
    for name, method in methods.items():
        nesterov = "--muon-nesterov " if method.settings.get("nesterov", True) else ""
        flags = {
            "adamw": "--optimizer adam",
            "muon": f"--optimizer muon --muon-momentum 0.95 {nesterov}--muon-scale-mode spectral "
            "--muon-extra-scale-factor 0.2",
            "dobb": " ".join(["--optimizer dobb", *(_flag(*setting) for setting in method.settings.items())]),
        }
        if method.optimizer not in flags:
            console.print(f"# {name}: Megatron has no {method.optimizer}; train it with its own repository's script\n")
            continue
        command = LAUNCH.format(label=name, optimizer=flags[method.optimizer], seed="$SEED")
        console.print(f"{command}  # SEED in {', '.join(map(str, range(1, seeds + 1)))}\n", markup=False)
    rows = [(name, FINAL_LOSS.get(method.paper)) for name, method in methods.items()]
    return Result(
        "The paper's final validation losses on Small",
        ("optimizer", "paper"),
        rows,
        ["--preset paper trains nothing here: it needs GPUs. Run the commands above on a cluster."],
    )


def _flag(name: str, value: Any) -> str:
    flag = "--dobb-" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"
