"""Find and load the compiled extension.

Only this package knows how csrc is built, loaded and identified; each method calls its operators from one module.
"""
