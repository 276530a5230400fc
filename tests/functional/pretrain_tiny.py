"""A training script as users have it, on made-up data and a CPU. It knows nothing of Dobb: see `test_launcher`."""

import sys
import time
from functools import partial
from pathlib import Path

PROGRAM_START = time.time()
sys.path.append(str(Path(__file__).resolve().parents[1]))

import testbed  # noqa: E402

testbed.enable(training=True)

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training import get_args, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402


def datasets_provider(samples, vp_stage=None):
    """Megatron's mock data."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="99,1,0",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()


datasets_provider.is_distributed = True


def loss_func(mask, losses):
    """The summed loss of a micro-batch, its tokens, and both for the log."""
    mask = mask.view(-1).float()
    loss, tokens = (losses.view(-1).float() * mask).sum(), mask.sum().int()
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=torch.isnan, message="NaN in a local loss", fatal=True
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(batches, model, return_schedule_plan=False):
    """The forward pass of one micro-batch."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(loss_func, batch["loss_mask"])


def main():
    """Train as the command line says."""
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
