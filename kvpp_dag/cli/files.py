"""Reading and writing the files that a user names."""

from pathlib import Path

from kvpp_dag.errors import ConfigError, DumpError

MAX_DUMP_BYTES = 256 << 20


def check_new(path: Path) -> None:
    """Raise ConfigError if something is at `path` already, unless it is an empty file."""
    if path.exists() and (not path.is_file() or path.stat().st_size > 0):
        raise ConfigError(f"{path} exists and is not overwritten; give another name or remove it.")


def write_new(path: Path, text: str) -> None:
    """Write `text` to `path`. Raises ConfigError as `check_new` does."""
    check_new(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read_dump(path: Path) -> str:
    """Read a dump. Raises DumpError if it is no readable text file, or larger than 256 MiB."""
    try:
        if path.stat().st_size > MAX_DUMP_BYTES:
            raise DumpError(f"{path}: the file is larger than {MAX_DUMP_BYTES >> 20} MiB.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DumpError(f"{path}: byte {error.start} is not UTF-8 text.") from error
