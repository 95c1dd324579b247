"""Read files that a user names and somebody else may have written: text of bounded size, gzip included."""

import gzip
import zlib
from pathlib import Path

from kvpp_dag.errors import DumpError

MAX_DUMP_BYTES = 64 << 20
"""Bytes of one dump, after decompression; 10^6 recorded events take about 45 MB."""

_GZIP = b"\x1f\x8b"


def read_dump(path: Path) -> str:
    """Read a dump, decompressed if it is gzip. At most 64 MiB are decompressed and kept.

    Raises DumpError if it is no regular file, larger, damaged, or not UTF-8 text.
    """
    try:
        if path.exists() and not path.is_file():
            raise DumpError(f"{path}: this is not a regular file.")
        with path.open("rb") as file:
            content = file.read(MAX_DUMP_BYTES + 1)
        if content.startswith(_GZIP):
            with gzip.open(path) as unpacked:
                content = unpacked.read(MAX_DUMP_BYTES + 1)
        if len(content) > MAX_DUMP_BYTES:
            raise DumpError(f"{path}: the file is larger than {MAX_DUMP_BYTES >> 20} MiB.")
        return content.decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DumpError(f"{path}: the compressed file is damaged or cut short: {error}.") from error
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DumpError(f"{path}: byte {error.start} is not UTF-8 text.") from error
    except ValueError as error:
        raise DumpError(f"The file name {str(path)[:80]!r} cannot be used: {error}.") from error
