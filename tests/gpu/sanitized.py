"""One call of every kind of CUDA kernel on small tensors, to be run under compute-sanitizer."""

import torch

from megatron_dobb.kernels import dispatch
from megatron_dobb.methods.dobb import kernels
from megatron_dobb.sharding.segment import Segment
from megatron_dobb.sharding.shard import Shard

SETTINGS = {"learning_rate": 0.03, "weight_decay": 0.1, "momentum": 0.95, "nesterov": False, "update_scale": 0.2}


def a_segment(width: int, basis_dtype: torch.dtype, skip: int) -> tuple[Segment, torch.Tensor]:
    """A segment that starts and ends inside a row, `skip` elements after an aligned address, and its gradient."""
    shard = Shard(width, (2 * 20 + 2) * width, 2 * width, width)
    weight, momentum, gradient = (torch.randn(shard.numel + skip, device="cuda")[skip:] for _ in range(3))
    basis = torch.eye(width, device="cuda", dtype=basis_dtype).expand(2, width, width).contiguous()
    return Segment("weight", shard, 22, 2 * width, weight, momentum, basis), gradient


def main() -> None:
    for width in (1, 7, 16, 48, 100, 192, 256, 320, 512, 640):
        for basis_dtype in (torch.bfloat16, torch.float32):
            for skip in (0, 1):
                for precision in ("exact", "bf16"):
                    made, gradient = a_segment(width, basis_dtype, skip)
                    kernels.check(
                        kernels.update([made], [gradient], **SETTINGS, precision=precision, backend="extension")
                    )
                scales = torch.ones(2, width, device="cuda")
                kernels.check(
                    kernels.update([made], [gradient], **SETTINGS, column_scales=[scales], backend="extension")
                )
        total = torch.zeros(2, width, width, device="cuda")
        kernels.gram_(total, torch.randn(70, 2 * width, device="cuda").bfloat16(), width)
    torch.cuda.synchronize()
    print("kernels run:", dict(dispatch.kernels_run))


if __name__ == "__main__":
    main()
