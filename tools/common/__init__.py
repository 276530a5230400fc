"""Parts that planning, inspection and reproduction share: tables, plots and the payload of other methods."""
