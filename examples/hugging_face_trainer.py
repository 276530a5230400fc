"""Dobb in the Trainer of Hugging Face's transformers: a Llama of two layers on the text that comes with Python.

    pip install -e ".[huggingface]"
    python examples/hugging_face_trainer.py                            # or, on several processes:
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py

Takes about a minute on a CPU and downloads nothing: the model starts from random weights and reads bytes. Four
things matter for Dobb:

* Build it for the model that the Trainer trains, after the `TrainingArguments`, and hand it over as
  `optimizers=(optimizer, None)`. The Trainer then makes the learning-rate schedule of its own arguments for it.
  (`optimizer_cls_and_kwargs` hands the class groups of parameters; Dobb wants the model, whose activations it sees.)
* Its layers must be `nn.Linear`, as those of Llama, Qwen, Mistral and most others are. GPT-2's are `Conv1D`, which
  keeps its weights transposed; Dobb says so and stops.
* Gradient accumulation, clipping and mixed precision need nothing: every forward pass counts as a micro-batch.
* `resume_from_checkpoint` continues bit for bit: the Trainer keeps Dobb's state in its `optimizer.pt`.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from megatron_dobb import Dobb

CONTEXT, WIDTH = 64, 128


def model() -> LlamaForCausalLM:
    """A Llama over bytes; its output layer is tied to the embedding, which AdamW updates."""
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
    """Pieces of text to train on, and held-out ones."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    pieces = [{"input_ids": piece, "labels": piece} for piece in text.split(CONTEXT) if len(piece) == CONTEXT]
    cut = len(pieces) * 9 // 10
    return pieces[:cut], pieces[cut:][:96]


def trainer(out: Path, steps: int, save_steps: int, accumulation: int) -> Trainer:
    """The Trainer with Dobb, on a new model."""
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
    # Behind the arguments, which start torch.distributed under torchrun: Dobb asks then which ranks train together.
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
