"""Whether the files of a checkpoint are all there. Nothing here needs Megatron, so that tools can ask it too."""

from pathlib import Path
from typing import Any

USE_ANOTHER = "use the checkpoint of another iteration"


def incomplete_files(folder: str, metadata: Any) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    needed: dict[str, int] = {}
    for part in metadata.storage_data.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        file = Path(folder) / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            return f"the checkpoint {folder} lacks its file {name}: {USE_ANOTHER}"
        if found < size:
            return f"{file} is cut off: it has {found} bytes of at least {size}; {USE_ANOTHER}"
    return None
