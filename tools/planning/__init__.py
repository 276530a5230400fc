"""Plan what Dobb would cost on a model and a parallel layout, without starting either; see docs/planning.md."""
