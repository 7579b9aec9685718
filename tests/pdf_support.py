"""Small PDFs, as bytes."""

from __future__ import annotations

import io
import zlib

_PAGE = (
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {} 0 R /Resources << /Font << /F1 3 0 R >> >> >>"
)


def pdf(*pages: str, draws: str = "BT /F1 12 Tf 72 720 Td ({}) Tj ET") -> bytes:
    """A PDF whose pages show these texts; an empty one shows none. draws: the operators of a page, for its text."""
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", f"<< /Kids [{kids}] /Count {len(pages)} >>".encode(), font]
    for number, text in enumerate(pages):
        content = zlib.compress((draws.format(text) if text else "").encode())
        head = f"<< /Length {len(content)} /Filter /FlateDecode >>\nstream\n".encode()
        objects += [_PAGE.format(5 + 2 * number).encode(), head + content + b"\nendstream"]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    rows = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + table.encode() + trailer.encode()


def encrypted(data: bytes, password: str) -> bytes:
    from pypdf import PdfWriter

    writer, file = PdfWriter(clone_from=io.BytesIO(data)), io.BytesIO()
    writer.encrypt(password, "of the owner", algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()
