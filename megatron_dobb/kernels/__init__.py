"""Find and load the compiled extension.

The only room that knows how csrc is built, loaded and identified; each method has one door to its own operators.
"""
