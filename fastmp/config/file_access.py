"""Reading of untrusted files, and durable writes. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, Literal

__all__ = [
    "FOREIGN_ERRORS",
    "open_binary",
    "open_directory",
    "open_regular",
    "open_writable",
    "read_file",
    "read_json",
    "read_json_value",
    "read_or_name",
    "replace_text",
    "sync_and_close",
    "sync_directory",
    "write_synced",
    "write_whole",
]

# What reading values out of JSON from elsewhere raises where it has another form than expected.
FOREIGN_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_PIECE = 1 << 16  # bytes that are read of a file beyond its size


def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> int:
    """Open a regular file for reading and return its descriptor.

    Args:
        path: of the file; a pipe, which would block, and a device, which may never end, are not supported.
        links: follow symbolic links.

    Raises:
        OSError: the file cannot be opened; `strerror` is the reason, for a message.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a null byte") from None
    except OSError:
        if not links and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a link") from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "not a regular file")


def open_binary(path: str | os.PathLike[str], *, links: bool = True) -> BinaryIO:
    """Open a regular file for reading, as `open_regular`."""
    return open(open_regular(path, links=links), "rb")


def open_writable(path: str | os.PathLike[str], mode: Literal["wb", "r+b", "ab"]) -> BinaryIO:
    """Open a regular file for writing; `mode` as for `open`, and each can read. OSError as `open_regular`.

    Only "r+b" needs a file that is there.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= {"wb": os.O_CREAT, "r+b": 0, "ab": os.O_CREAT | os.O_APPEND}[mode]
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    if mode == "wb":
        os.ftruncate(descriptor, 0)
    return open(descriptor, "r+b")


def open_directory(path: str | os.PathLike[str]) -> int:
    """Open a directory and return its descriptor, for a lock or to flush its entries."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def read_file(path: str | os.PathLike[str], limit: int, *, links: bool = True) -> bytes:
    """Read a regular file of at most `limit` bytes, whole; OSError as `open_regular`, or for a larger one."""
    descriptor = open_regular(path, links=links)
    with open(descriptor, "rb", buffering=0) as file:
        # A read allocates all that it asks for: first the size of the file, then pieces, as the file may have
        # grown since, and those of /proc have no size.
        size = os.fstat(descriptor).st_size
        pieces: list[bytes] = []
        length, wanted = size if size > limit else 0, size + 1
        while length <= limit and (piece := file.read(min(wanted, limit + 1 - length))):
            pieces.append(piece)
            length += len(piece)
            wanted = max(size + 1 - length, _PIECE)
    if length > limit:
        found = f"{size}" if size >= length else "more"
        raise OSError(errno.EFBIG, f"larger than any file of its kind: {found} bytes, at most {limit}")
    return b"".join(pieces)


def read_or_name(path: str | os.PathLike[str], limit: int, label: str = "", if_larger: str = "") -> bytes:
    """Read a file as `read_file`.

    Raises:
        ValueError: `label`, the path and the reason; of a file that is too large, `if_larger` as well.
    """
    try:
        return read_file(path, limit)
    except OSError as error:
        advice = f"; {if_larger}" if if_larger and error.errno == errno.EFBIG else ""
        raise ValueError(f"{label}{path}: cannot be read ({error.strerror}){advice}") from None


def read_json(path: str | os.PathLike[str], limit: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most `limit` bytes. Raises ValueError naming the file."""
    content = read_json_value(path, limit)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, got {short(content)}")
    return content


def read_json_value(path: str | os.PathLike[str], limit: int, if_larger: str = "") -> Any:
    """Return the value in a JSON file, as `read_json`; it may be a list. if_larger: as of `read_or_name`."""
    raw = read_or_name(path, limit, if_larger=if_larger)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON (line {error.lineno}: {error.msg})") from None
    except (ValueError, RecursionError):  # also of bytes that are not UTF-8
        raise ValueError(f"{path}: not JSON") from None
    except MemoryError:
        raise ValueError(f"{path}: its content takes more memory than there is") from None


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to disk."""
    file = open_writable(path, "wb")
    try:
        file.write(data)
        sync_and_close(file)
    finally:
        file.close()


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically, without a flush to disk; an existing file or link is replaced."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)  # of a process that was killed, or a link
    with open(staged, "x", encoding="utf-8") as file:
        file.write(text)
    os.replace(staged, path)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically and flush it to disk; an existing file is replaced."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(staged, text.encode())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def sync_and_close(file: Any) -> None:
    """Flush an open file to disk and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk."""
    descriptor = open_directory(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
