"""Run work in the background of training, on a separate thread and, on a GPU, a separate stream.

It is independent of the work it runs, so every method can overlap its communication with training.
"""
