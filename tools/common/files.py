"""Files that a tool writes, checked before its work."""

from pathlib import Path

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def why_not_written(option: str, path: Path, example: str) -> str | None:
    """Say why the file of an option, such as `plot`, cannot be written; None if it can.

    Args:
        option: its name; `plot` stands for a picture.
        path: the file.
        example: a name for it.
    """
    if path.is_dir():
        return f"--{option} {path} is a folder: name a file in it, such as {path / example}"
    if not path.resolve().parent.is_dir():
        return f"--{option} {path}: there is no folder {path.parent}; make it first"
    if option == "plot" and path.suffix.lower() not in PICTURES:
        return f"--{option} {path} does not end in a picture's format: use one of {', '.join(PICTURES)}"
    return None
