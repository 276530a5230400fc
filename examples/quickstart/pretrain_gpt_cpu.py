"""Megatron's pretrain_gpt.py for a machine without a GPU.

It does the same as Megatron-LM's script for a GPT, with the same dataset, batch, loss and call of `pretrain`, but
without the features that need packed sequences, distillation or FIM data. The only addition is `testbed.enable`, which
maps "cuda" to the CPU. Nothing here refers to Dobb:

    torchrun --nproc-per-node 2 -m megatron_dobb pretrain_gpt_cpu.py --optimizer dobb --distributed-backend gloo ...
"""

import sys
import time
from functools import partial
from pathlib import Path

PROGRAM_START = time.time()
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import testbed  # noqa: E402

testbed.enable(training=True)

import torch  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank  # noqa: E402
from megatron.training import get_args, get_timers, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage  # noqa: E402

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch(data_iterator, vp_stage):
    """Return the next micro-batch: tensor-parallel rank 0 reads it and sends it to the others."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(BATCH_KEYS)
    args = get_args()
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(data_iterator)
        batch = {key: data[key].cuda(non_blocking=True) if key in data else None for key in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return [batch[key] for key in BATCH_KEYS]


def loss_func(loss_mask, output_tensor):
    """The sum of the losses of a micro-batch, its number of tokens, and both as Megatron logs them."""
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for reject, kind in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=reject,
                message=f"found {kind} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Forward pass of one micro-batch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    timers("batch-generator").stop()
    output_tensor = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output_tensor, partial(loss_func, loss_mask)


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Build the training, validation and test sets from Megatron's indexed datasets, or its made-up data."""
    args = get_args()
    MockGPTLowLevelDataset.size = 1000  # documents: with Megatron's 100,000, the index alone takes a minute
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        full_validation=args.full_validation,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_built_on_rank():
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, is_built_on_rank, config).build()


if __name__ == "__main__":
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
