"""Writing the files that a user names."""

from collections.abc import Mapping
from pathlib import Path

from kvpp_dag.errors import ConfigError


def check_new(path: Path) -> None:
    """Raise ConfigError if something is at `path` already, unless it is an empty file."""
    if path.exists() and (not path.is_file() or path.stat().st_size > 0):
        raise ConfigError(f"{path} exists and is not overwritten; give another name or remove it.")


def write_new(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises ConfigError as `check_new` does."""
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def check_new_directory(path: Path) -> None:
    """Raise ConfigError if something is at `path` already, unless it is an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not overwritten; give an empty or a new directory.")


def write_new_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Write `files`, by name, into the directory `path`. Raises ConfigError as `check_new_directory` does."""
    check_new_directory(path)
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
