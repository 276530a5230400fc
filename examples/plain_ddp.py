"""Dobb under PyTorch's DistributedDataParallel: the GPT of plain_pytorch.py in several processes, saved and resumed.

    torchrun --nproc-per-node 2 examples/plain_ddp.py              # CPU processes
    torchrun --nproc-per-node 8 examples/plain_ddp.py --device cuda

There are two differences from a single process. Dobb gets the wrapped model, from which it knows the ranks that train
on different data and share the refreshes, and every rank takes its own sequences of the global batch. The optimizer's
state is the same on every rank: rank 0 saves it, and a run with a different number of processes can resume from it.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from plain_pytorch import BATCH, GPT, batches, loss_of, validate
from torch.nn.parallel import DistributedDataParallel

from megatron_dobb import Dobb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="number of the last step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3.54e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="file to continue from, if it is there, and to save to")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/plain_ddp.py")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        parser.error(f"{ranks} processes do not share the {BATCH} sequences of a batch evenly: use 1, 2, 3, 4, 6 or 12")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    data = batches(text[: -len(text) // 10], args.steps, seed=0)
    held_out = batches(text[-len(text) // 10 :], 4, seed=1).to(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT().to(device))
    optimizer = Dobb(model, lr=args.lr, weight_decay=0.1, blocks=4)
    first = 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if first > args.steps:
            parser.error(f"{args.checkpoint} is of step {first} already: give --steps {first} or more")
    elif rank == 0:
        print(optimizer, flush=True)

    for step in range(first, args.steps):
        own = data[step].chunk(ranks)[rank].to(device)
        optimizer.zero_grad()
        loss = loss_of(model, own)
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        if rank == 0 and (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1:4d}  loss {loss / ranks:.6f}", flush=True)
    loss = validate(model.module, held_out)
    if rank == 0:
        print(f"held-out loss after {args.steps} steps on {ranks} processes: {loss:.6f}")
        if args.checkpoint:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
            torch.save(state, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
