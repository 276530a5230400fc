"""Figures of the paper that ours are put beside."""

TABLE_1A = {
    80: {"Y": 0.736, "sign(Y)": 0.775},
    50: {"Y": 0.412, "sign(Y)": 0.643},
    20: {"Y": 0.205, "sign(Y)": 0.543},
    5: {"Y": 0.109, "sign(Y)": 0.457},
}
"""Orthogonality by entropy effective rank in per cent, for 768 x 768."""

TABLE_2 = {"Dobb": {1: 0.849, 4: 0.834, 16: 0.815}, "Dion": {1: 0.804, 4: 0.427, 16: 0.208}}
"""Orthogonality of updates on a GPT-2 Small checkpoint: of Dobb by blocks, of Dion by n / rank."""

FINAL_LOSS = {
    "adamw": 3.044, "muon": 3.004, "rmnp": 3.083,
    "dion-1": 3.002, "dion-4": 3.038, "dion-16": 3.108,
    "dobb-1": 3.017, "dobb-4": 3.024, "dobb-16": 3.026, "dobb-64": 3.037,
    "dobb-nesterov-1": 3.014,
    "dobb-l2-1": 3.043, "dobb-l2-4": 3.037, "dobb-l2-16": 3.036, "dobb-l2-64": 3.045,
    "dobb-g-1": 3.071, "dobb-g-4": 3.067, "dobb-g-16": 3.076, "dobb-g-64": 3.072,
    "dobb-g-l2-1": 3.077, "dobb-g-l2-4": 3.071, "dobb-g-l2-16": 3.075, "dobb-g-l2-64": 3.083,
}  # fmt: skip
"""Final validation loss on GPT-2 Small (nats per token), by the names that `comparison` uses."""
