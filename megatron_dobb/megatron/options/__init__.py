"""Read command-line flags and Megatron's config objects, and refuse what cannot work.

Every refusal names the option, the reason and what to use instead.
"""
