"""Print what a run says of the whole job."""

import torch.distributed as dist


def say(text: str) -> None:
    """Print on the first rank of the job, where Megatron prints its own start-up messages."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def log_whole_model(method: str, matrices: int, elements: int) -> None:
    """Say how much of the model a method updates, over all pipeline stages and experts.

    Args:
        method: its name.
        matrices, elements: of the model.
    """
    size = f"{matrices} matrices ({elements:,} elements)"
    say(f"{method}: {size} of the whole model are on {method.capitalize()}; the first rank's part:")
