"""Lines of a trace file, gzipped or not, as JSON objects. A file may hold anything, so the length of its lines, the number of
their values, and its size are bounded: a line of short values takes 25 times its size once it is parsed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from gateway.dialects.json_structure import exceeds
from router.simulation.workloads import TraceError

MAX_LINE_BYTES: Final = 64 << 20  # a session of the agents' traces is one line
MAX_VALUES: Final = 4_000_000  # of a line
MAX_BYTES: Final = 4 << 30  # decompressed
_GZIP: Final = b"\x1f\x8b"


def trace_lines(
    path: Path, max_line: int = MAX_LINE_BYTES, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> Iterator[dict[str, Any]]:
    """The lines as objects. Raises TraceError."""
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == _GZIP
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            for line in _bounded(file, max_line, max_bytes):
                number += 1
                if not line.strip():
                    continue
                if exceeds(line, max_values):
                    raise TraceError(f"row {number} has more than {max_values} values")
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TraceError("JSON objects, one a line, are expected")
                yield row
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"a damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(error.strerror or str(error)) from error
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"row {number} is not JSON: {error}") from error


def _bounded(file: IO[bytes], max_line: int, max_bytes: int) -> Iterator[bytes]:
    size = number = 0
    while line := file.readline(max_line + 1):
        size, number = size + len(line), number + 1
        if len(line) > max_line:
            raise TraceError(f"row {number} has more than {max_line} bytes")
        if size > max_bytes:
            raise TraceError(f"it has more than {max_bytes} bytes, decompressed")
        yield line
