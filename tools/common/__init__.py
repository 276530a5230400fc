"""Parts that planning, inspection and reproduction share: tables, plots, files and the payload of other methods."""
