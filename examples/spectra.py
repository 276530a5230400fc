# %% [markdown]
# # Spectra and orthogonality during training
#
# Run the cells one by one in VS Code, Spyder or Jupyter (with jupytext), or run the whole script:
#
#     python examples/spectra.py [--steps 160] [--out spectra.png]
#
# A byte-level GPT of width 128 is trained on the text that comes with Python. Every few steps, Dobb's diagnostics
# report how orthogonal its update is and how well the bases fit. At three steps we look at the eigenvalues of the
# blocks' second moments `A`. This takes about a minute on a CPU.

# %%
import argparse
import sys
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib
import torch

matplotlib.use("agg")  # a notebook shows the figure by itself

from matplotlib import pyplot as plt
from plain_pytorch import GPT, batches, loss_of

from megatron_dobb import Dobb
from megatron_dobb.methods.dobb import metrics

parser = argparse.ArgumentParser(description="Spectra and orthogonality during a small training.")
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--out", type=Path, default=Path("spectra.png"), help="where the picture goes")
# A notebook kernel has its own arguments.
args = parser.parse_known_args()[0] if "ipykernel" in sys.modules else parser.parse_args()
if args.steps < 1:
    parser.error(f"--steps {args.steps} trains nothing; give at least 1")
if not args.out.absolute().parent.is_dir():
    parser.error(f"--out {args.out} is in no folder that exists; make it, or give another, such as spectra.png")

# %% [markdown]
# ## Train and record diagnostics
#
# `diagnostics` is called with the step and a dictionary of metrics. Selecting all weights by name makes every log
# compute the spectrum of every update, which is cheap at this size.

# %%
LAYERS = ("blocks.1.qkv", "blocks.1.out", "blocks.1.fc1", "blocks.1.fc2")
every = max(1, args.steps // 20)
figures: dict[int, dict[str, float]] = {}
spectra: dict[int, dict[str, torch.Tensor]] = {}

text = torch.tensor(list("\n".join(topics.values()).encode()))
torch.manual_seed(0)
model = GPT()
optimizer = Dobb(
    model,
    lr=3.54e-3,
    blocks=4,
    diagnostics=figures.__setitem__,
    log_diagnostics_interval=every,
    log_diagnostics_weights=["*"],
)
print(optimizer)
for step, batch in enumerate(batches(text, args.steps, seed=0), start=1):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    if step in (1, max(2, args.steps // 4), args.steps):
        spectra[step] = {
            layer: metrics.eigenvalues(optimizer.state[model.get_submodule(layer).weight]["moment"]) for layer in LAYERS
        }
    if step % every == 0:
        means = {name: figures[step].get(f"dobb/{name}", float("nan")) for name in ("orthogonality", "basis_residual")}
        print(f"step {step:4d}  loss {loss:.3f}  " + "  ".join(f"{name} {value:.3f}" for name, value in means.items()))

# %% [markdown]
# ## Spectra of the second moments
#
# One line per block shows its eigenvalues divided by their mean, largest first. Steep lines are blocks whose inputs
# vary in few directions. There the basis matters most: a coefficient along a direction of small variance gets the same
# step size as one along a direction of large variance.

# %%
figure, axes = plt.subplots(3, 4, figsize=(13, 9), layout="constrained", sharey="row", squeeze=False)
for axis, layer in zip(axes[0], LAYERS, strict=True):
    for (step, moments), colour in zip(spectra.items(), ("#bbbbbb", "#e69f00", "#0072b2"), strict=False):
        for number, values in enumerate(moments[layer].flip(-1)):
            axis.semilogy(values / values.mean(), color=colour, lw=1, label=None if number else f"step {step}")
    axis.set(title=layer, xlabel="eigenvalue of a block of A", ylim=(1e-5, None))
axes[0, 0].set_ylabel("over the block's mean")
axes[0, 0].legend(frameon=False)

# %% [markdown]
# ## Orthogonality of the update and basis residual
#
# Muon aims for an orthogonality of 1. Dobb's rises while the bases, which start from the identity, converge to the
# eigenvectors. The residual is the fraction of `A` that is still off the diagonal in the bases.

# %%
for row, name in zip(axes[1:], ("orthogonality", "basis_residual"), strict=True):
    for axis, layer in zip(row, LAYERS, strict=True):
        axis.plot(
            list(figures), [logged[f"dobb/{name}/{layer}.weight"] for logged in figures.values()], color="#0072b2"
        )
        axis.set(xlabel="step", ylim=(0, 1))
    row[0].set_ylabel(name.replace("_", " "))
for axis in axes.flat:
    axis.spines[["top", "right"]].set_visible(False)
figure.savefig(args.out, dpi=130)
print(f"Picture: {args.out}")
