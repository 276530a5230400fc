"""Describe the settings of a method once: flags, help, tables, keywords and stored metadata follow from it.

Imports nothing of this package but `errors`, and knows no method.
"""
