"""Control the precision of products and check tensors for non-finite values.

Tensors in, tensors out; every method uses these, and nothing here knows of one.
"""
