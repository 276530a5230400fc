"""Run work beside the training program: a thread and, on a GPU, a stream of its own.

Knows nothing of what it runs, so every method can overlap its communication with it.
"""
