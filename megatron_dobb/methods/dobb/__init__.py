"""Dobb: the sign of the momentum in block-diagonal eigenbases of each layer's inputs.

Read update, moment and orthogonalize for the mathematics, refresh_group for its one exchange between ranks.
"""
