"""Elements that the plainest row-sharded form of each method passes between the shards of a weight, or its replicas."""


def muon(rows: int, columns: int) -> int:
    """For one update: every shard gathers the whole momentum."""
    return rows * columns


def dion(rows: int, columns: int, rank: int) -> int:
    """For one update: a gathered `[m, r]`, and a sum over the shards of `[n, r]`."""
    return rank * (rows + columns)


def papers_refresh(columns: int, width: int) -> int:
    """For one refresh of the paper's Dobb: all-reduced whole blocks of the moments of `n` features."""
    return columns * width
