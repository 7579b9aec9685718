"""Extract the text of a PDF where it can do no harm: in a process of its own, with limits of time and memory.

A few bytes of a PDF can name a stream of gigabytes, or objects that name each other. Run as a script, which knows the
library and nothing of localllm: the file on stdin, the reply of `extracted` as JSON on stdout.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from typing import Any, BinaryIO

CPU_S = 30  # a book of 500 pages takes ten
MAX_BYTES = 1 << 30  # of addresses; 100 MB are the interpreter and the library
MAX_CHARACTERS = 16 << 20  # about four million tokens: more than any context


def main() -> None:
    """Read the file and write the reply."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(extracted(sys.stdin.buffer), sys.stdout)


def extracted(file: BinaryIO) -> dict[str, Any]:
    """Return {text, pages, empty}, or {error}: "encrypted", or why it cannot be read. empty: pages without text."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, WrongPasswordError

    logging.disable()
    failure: Exception | None = None
    try:
        reader = PdfReader(file)
        texts = [""] * len(reader.pages)
        for number, page in enumerate(reader.pages):
            try:
                texts[number] = page.extract_text().strip()
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # one bad page
                failure = error
            if sum(map(len, texts)) > MAX_CHARACTERS:
                return {"error": f"its first {number + 1} pages have more than {MAX_CHARACTERS:,} characters"}
        if failure is not None and not any(texts):
            raise failure
    except (DependencyError, FileNotDecryptedError, WrongPasswordError):
        return {"error": "encrypted"}
    except MemoryError:
        return {"error": f"it needs more than the {MAX_BYTES >> 20} MiB of memory that it may take"}
    except Exception as error:  # of any kind: a file is damaged in any way, or asks for more than the library allows
        return {"error": f"it is damaged, or made so: {str(error) or type(error).__name__}"}
    return {"text": "\n\n".join(filter(None, texts)), "pages": len(texts), "empty": texts.count("")}


if __name__ == "__main__":
    main()
