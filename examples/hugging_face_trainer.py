"""Dobb in Hugging Face's Trainer: a Llama with two layers, trained on the text that comes with Python.

    pip install -e ".[huggingface]"
    python examples/hugging_face_trainer.py                            # or, in several processes:
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py

This takes about a minute on a CPU and downloads nothing: the model reads bytes and starts from random weights. Four
points to note:

* Build Dobb for the model that the Trainer trains, after the `TrainingArguments`, and pass it as
  `optimizers=(optimizer, None)`. The Trainer then creates the learning-rate schedule from its own arguments.
  (`optimizer_cls_and_kwargs` passes groups of parameters to the class, but Dobb needs the model to capture
  activations.)
* The layers must be `nn.Linear`, as in Llama, Qwen, Mistral and most other models. GPT-2 uses `Conv1D`, which stores
  its weights transposed; Dobb raises an error for it.
* Gradient accumulation, clipping and mixed precision work as usual: every forward pass counts as a micro-batch.
* `resume_from_checkpoint` is bit-identical: the Trainer saves Dobb's state in its `optimizer.pt`.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from megatron_dobb import Dobb

CONTEXT, WIDTH = 64, 128


def model() -> LlamaForCausalLM:
    """A byte-level Llama whose output layer is tied to the embedding, which AdamW updates."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def datasets() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Pieces of text for training and for evaluation."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    pieces = [{"input_ids": piece, "labels": piece} for piece in text.split(CONTEXT) if len(piece) == CONTEXT]
    cut = len(pieces) * 9 // 10
    return pieces[:cut], pieces[cut:][:96]


def trainer(out: Path, steps: int, save_steps: int, accumulation: int) -> Trainer:
    """A Trainer with Dobb and a new model."""
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=12 // accumulation,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 10),
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 10),
        eval_strategy="no",
        save_strategy="steps",
        save_steps=save_steps,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    llama, (train, held_out) = model(), datasets()
    # After the arguments, which initialize torch.distributed under torchrun: Dobb needs to know the ranks.
    optimizer = Dobb(llama, lr=3.54e-3, weight_decay=0.1, blocks=4)
    if arguments.process_index == 0:
        print(optimizer, flush=True)
    return Trainer(
        model=llama, args=arguments, train_dataset=train, eval_dataset=held_out, optimizers=(optimizer, None)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--save-steps", type=int, default=80)
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("hugging_face_out"))
    parser.add_argument("--resume", metavar="CHECKPOINT", help="such as hugging_face_out/checkpoint-80")
    args = parser.parse_args()
    if args.accumulation not in (1, 2, 3, 4, 6, 12):
        parser.error(f"--accumulation {args.accumulation} does not divide a batch of 12; give 1, 2, 3, 4, 6 or 12")
    training = trainer(args.out, args.steps, args.save_steps, args.accumulation)
    training.train(resume_from_checkpoint=args.resume)
    print(f"held-out loss after {args.steps} steps: {training.evaluate()['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
