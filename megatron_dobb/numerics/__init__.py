"""Control the precision of products and check tensors for non-finite values.

Tensors in, tensors out: shared by all methods, and independent of each.
"""
