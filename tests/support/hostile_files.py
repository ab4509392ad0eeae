"""Files on which two readers may disagree: odd zips, JSON, base64, signatures, dates and names."""

from __future__ import annotations

import io
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from affidavit.trust import SigningKey

# ---- JSON -------------------------------------------------------------------------------

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|[{}\[\],:]|true|false|null')
NUMBERS = (
    *("0", "-0", "-0.0", "0.0", "1", "1.0", "1e0", "1E+0", "10e-1", "01", "+1", ".5", "5.", "0x1"),
    *("1_0", "NaN", "-Infinity", "1e400", "-1e400", "1e-400", "5e-324", "1e-310", "2.5e-308"),
    *("9007199254740991", "9007199254740992", "9007199254740993", "-9007199254740992"),
    *("9223372036854775808", "1e16", "1e21", "0.1e1", "1" + "0" * 400, "1" * 5000, "\uff11"),
)
SPACES = (" ", "\t", "\r\n", "\n", "\x0b", "\x0c", "\xa0", "\u2028", "\ufeff", "\x00", "/**/", "#")
WHOLE: tuple[Callable[[str], bytes], ...] = (
    lambda text: b"\xef\xbb\xbf" + text.encode(),
    lambda text: text.encode() + b"\xef\xbb\xbf",
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-16-le"),
    lambda text: text.encode("utf-32-be"),
    lambda text: text.encode("latin-1", errors="replace"),
    lambda text: text.encode() + b"\x00",
    lambda text: text.encode() * 2,
    lambda text: b" \n" + text.encode() + b"\r\n",
    lambda text: f"[{text}]".encode(),
    lambda text: b"null" * (not text),
)
DATES = (
    *("2026-01-01T00:00:00Z", "2026-1-2T3:4:5Z", "2026-01-01t00:00:00z", "2026-01-01 00:00:00Z"),
    *("2026-01-01T00:00:00", "2026-01-01T00:00:00.000Z", "2026-01-01T00:00:00+00:00", "20260101"),
    *(
        "2026-01-01T24:00:00Z",
        "2026-01-01T23:59:60Z",
        "2026-01-01T00:00:61Z",
        "2026-02-29T00:00:00Z",
    ),
    *(
        "2028-02-29T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59Z",
    ),
    *(
        "10000-01-01T00:00:00Z",
        "999-01-01T00:00:00Z",
        "-2026-01-01T00:00:00Z",
        " 2026-01-01T00:00:00Z",
    ),
    *(
        "2026-01-01T00:00:00Z\n",
        "2026- 1-01T00:00:00Z",
        "2026-01- 1T00:00:00Z",
        "2026-13-01T00:00:00Z",
    ),
    *(
        "２０２６-01-01T00:00:00Z",
        "2026-01-01T0٣:00:00Z",
        "2026-01-01T00:00:00Ｚ",
        "2026-01-00T00:00:00Z",
    ),
    *(
        "1969-12-31T23:59:59Z",
        "2026-W01-1T00:00:00Z",
        "2026-001T00:00:00Z",
        "\ufeff2026-01-01T00:00:00Z",
    ),
)
NAMES = (
    *("example.com/log", "Example.com/log", "example.com/log/", "example.com /log", "a+b", "", "a"),
    *("e\u0301xample", "\xe9xample", "\u212b", "\xc5", "a\u200b", "a\u200d", "a\xad", "a\u2060"),
    *("a\xa0b", "a\u3000b", "a\u2028b", "a\x85b", "a\x1cb", "a\x7fb", "a\x00b", "a\tb", "a\ue000b"),
    *(
        "a\u0378b",
        "a\U0001fae8b",
        "a\U0002ebf0b",
        "a\ufdd0b",
        "a\U000e0041b",
        "a\u202eb",
        "a\ufeffb",
    ),
    *(
        "x" * 255,
        "x" * 256,
        "\xe9" * 127,
        "\xe9" * 128,
        "a\ud800b",
        "\U0001f600" * 63,
        "\U0001f600" * 64,
    ),
)


def altered_text(raw: bytes, chance: random.Random) -> bytes:
    """Write one JSON text otherwise, or nearly: as readers disagree whether it is the same."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw[::-1]
    if chance.random() < 0.1:
        return chance.choice(WHOLE)(text)
    tokens = list(_TOKEN.finditer(raw))
    if not tokens:
        return chance.choice(WHOLE)(text)
    kinds = {bytes([token[0][0]]) for token in tokens}
    kind = chance.choice(sorted(kinds))
    token = chance.choice([token for token in tokens if token[0].startswith(kind)])
    start, end = token.span()
    if chance.random() < 0.15:
        return raw[:start] + chance.choice(SPACES).encode() + raw[start:]
    return raw[:start] + _other(token[0], raw[end:], chance) + raw[end:]


def _other(token: bytes, rest: bytes, chance: random.Random) -> bytes:
    if token.startswith(b'"'):
        return altered_string(token, chance)
    match token:
        case b"{":
            again = re.match(rb'("(?:[^"\\]|\\.)*"):', rest)
            name = again[1] if again and chance.random() < 0.7 else b'"__proto__"'
            value = chance.choice((b"null", b"1", b"{}", b'""'))
            return b"{" + name + b":" + value + chance.choice((b"", b",", b",", b","))
        case b"[":
            return chance.choice((b"[null,", b"[,", b"[[", b"", b"[{},", _nested(chance) + b"["))
        case b"}" | b"]":
            return chance.choice((b"," + token, token * 2, b"", b",null" + token))
        case b"," | b":":
            return chance.choice((token * 2, b"", b";", b"=", token + b"\n"))
        case b"true" | b"false" | b"null":
            return chance.choice((b"True", b"None", b"nul", b"1", b"0", b'""', b"[]", token * 2))
    return chance.choice(NUMBERS).encode() if chance.random() < 0.9 else _nested(chance)


def _nested(chance: random.Random) -> bytes:
    depth = chance.choice((20, 27, 28, 29, 30, 31, 32, 33, 200, 490, 510, 900, 1100, 9000))
    return b"[" * depth + b"]" * depth


def altered_string(token: bytes, chance: random.Random) -> bytes:
    """Write a JSON string otherwise, with what its content is taken for: base64, date, name."""
    inner = token[1:-1]
    if re.fullmatch(rb"[0-9]{4}-[0-9]{2}-[0-9]{2}T.*", inner) and chance.random() < 0.8:
        return _quoted(chance.choice(DATES))
    if re.fullmatch(rb"[A-Za-z0-9+/]{8,}={0,2}", inner) and chance.random() < 0.7:
        return b'"' + altered_base64(inner, chance) + b'"'
    at = chance.randrange(len(inner) + 1)
    odd = (
        *(b"\\ud800", b"\\udc00\\ud800", b"\\ud83d\\ude00", b"\xed\xa0\x80", b"\xc0\xaf", b"\xff"),
        *(b"\x00", b"\x1f", b"\x7f", b"\n", b"\\n", b"\\/", b"\\u0000", b"\\x41", b"\\u12", b"\\"),
        *(
            "\u2028".encode(),
            "\xe9".encode(),
            "e\u0301".encode(),
            "\ufeff".encode(),
            b" ",
            b"\\u002B",
        ),
        *(b"\xf4\x90\x80\x80", b"\xf0\x9f\x98\x80", b"\xe2\x80\xae", b"<b>", b"'", b'"'),
    )
    match chance.randrange(6):
        case 0 if inner and inner[:1].isalnum():
            return b'"\\u00%02x' % inner[0] + inner[1:] + b'"'
        case 1:
            return b'"' + inner.swapcase() + b'"'
        case 2:
            return _quoted(chance.choice(NAMES))
        case 3:
            return chance.choice((b'""', b"null", b"0", b"[]", b"{}", b"'" + inner + b"'"))
    return b'"' + inner[:at] + chance.choice(odd) + inner[at:] + b'"'


def _quoted(text: str) -> bytes:
    inner = "".join(c if c >= " " and c not in '"\\' else f"\\u{ord(c):04x}" for c in text)
    return b'"' + inner.encode(errors="surrogatepass") + b'"'


def altered_base64(text: bytes, chance: random.Random) -> bytes:
    """Write base64 in a form that some readers take for the same bytes."""
    at = chance.randrange(len(text))
    match chance.randrange(9):
        case 0:
            return text.rstrip(b"=")
        case 1:
            return text + chance.choice((b"=", b"==", b"===", b"===="))
        case 2:
            return text.replace(b"+", b"-").replace(b"/", b"_")
        case 3:
            odd = (b"\\n", b" ", b"\\r\\n", b"\\u0000", b"=", b"-", b"\xef\xbc\xa1", b"\\u00ad")
            return text[:at] + chance.choice(odd) + text[at:]
        case 4:  # the bits beyond the last byte
            ends = len(text.rstrip(b"="))
            return text[: ends - 1] + chance.choice((b"A", b"B", b"f", b"/")) + text[ends:]
        case 5:
            return text[:-1]
        case 6:
            return text[:at] + chance.choice((b"A", b"+", b"/")) + text[at + 1 :]
        case 7:
            return text[:at]
    return text[: at // 4 * 4] + b"AA==" + text[at // 4 * 4 :]


# ---- zips -------------------------------------------------------------------------------

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"


def altered_zip(raw: bytes, files: Mapping[str, bytes], chance: random.Random) -> bytes:
    """Write the files in another zip that most readers of zips take for the same."""
    locals_ = [raw.index(name.encode() + content) - 30 for name, content in files.items()]
    directory, end = raw.index(_CENTRAL + b"\x14\x03"), len(raw) - 22
    name = chance.choice(sorted(files))
    match chance.randrange(14):
        case 0:  # a field of a local header
            return _with_field(raw, chance.choice(locals_), 30, chance)
        case 1:
            starts = [m.start() for m in re.finditer(re.escape(_CENTRAL), raw[directory:])]
            return _with_field(raw, directory + chance.choice(starts), 46, chance)
        case 2:
            return _with_field(raw, end, 22, chance)
        case 3:  # data before, between and after
            at = chance.choice([0, *locals_, directory, end, len(raw)])
            odd = (b"\x00", b"PK\x07\x08" + bytes(12), raw[:40], b"PK\x03\x04", bytes(1000), raw)
            return raw[:at] + chance.choice(odd) + raw[at:]
        case 4:  # the zip64 records of APPNOTE 4.3.14 and 4.3.15
            count = len(files)
            sizes = (count, count, end - directory, directory)
            wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *sizes)
            locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
            last = (
                raw[end:] if chance.random() < 0.5 else _END + b"\x00" * 4 + b"\xff" * 12 + b"\0\0"
            )
            return raw[:end] + wide + locator + last
        case 5:  # a comment, which may hold another end
            comment = chance.choice((b"x", raw[end:], b"\x00" * 40))
            return raw[:-2] + struct.pack("<H", len(comment)) + comment
        case 6:
            return raw[: chance.randrange(len(raw))]
        case 7:
            return _zip_of([*files.items(), (name, b"{}")])
        case 8:
            return _zip_of([(name, b"{}"), *files.items()])
        case 9:
            return _zip_of(chance.sample(sorted(files.items()), len(files)))
        case 10:
            return _zip_of(files.items(), zipfile.ZIP_DEFLATED)
        case 11:
            other = chance.choice(
                (
                    *(name.upper(), f"./{name}", f"/{name}", f"../{name}", name.replace("/", "\\")),
                    *(f"{name}\x00", f"{name} ", "\uff41bout.json", "log/", "about.json/x", ""),
                )
            )
            return _zip_of([(other if n == name else n, content) for n, content in files.items()])
        case 12:  # an extra field, in the local header alone
            at = chance.choice(locals_)
            length = int.from_bytes(raw[at + 26 : at + 28], "little")
            extra = struct.pack("<2HQ", 1, 8, 0)
            head = raw[at : at + 28] + struct.pack("<H", len(extra))
            return (
                raw[:at] + head + raw[at + 30 : at + 30 + length] + extra + raw[at + 30 + length :]
            )
    cut = chance.choice([*locals_, directory, end])
    return raw[:cut] + raw[cut + chance.choice((1, 4, 30)) :]


def _with_field(raw: bytes, start: int, size: int, chance: random.Random) -> bytes:
    at = start + chance.randrange(0, size, 2)
    value = chance.choice((0, 1, 8, 0x14, 0x2D, 0x800, 0x808, 0xFFFF, chance.randrange(0x10000)))
    return raw[:at] + struct.pack("<H", value) + raw[at + 2 :]


def _zip_of(files: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, part in files:
            info = zipfile.ZipInfo(name or "x", (1980, 1, 1, 0, 0, 0))
            info.compress_type, info.external_attr = compression, 0o100644 << 16
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                archive.writestr(info, part)
    return content.getvalue()


# ---- signatures -------------------------------------------------------------------------

ORDER = 2**252 + 27742317777372353535851937790883648493
_P = 2**255 - 19
_EIGHT = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
LOW_ORDER = tuple(
    (y | sign << 255).to_bytes(32, "little")
    for y in (0, 1, _P - 1, _EIGHT, _P - _EIGHT, _P, _P + 1)
    for sign in (0, 1)
)
"""The points of small order, also as some readers decode them from coordinates beyond p."""
IDENTITY = (1).to_bytes(32, "little")


def altered_signature(signature: bytes, chance: random.Random) -> bytes:
    """Return a signature that lax verifiers take for the same, or that is of another form."""
    point, scalar = signature[:32], int.from_bytes(signature[32:], "little")
    match chance.randrange(8):
        case 0:  # S + kL, which RFC 8032 refuses
            wide = scalar + chance.choice((1, 2, 7, 15)) * ORDER
            return point + (wide % 2**256).to_bytes(32, "little")
        case 1:
            return point + (scalar | chance.choice((1, 2, 4)) << 253).to_bytes(32, "little")
        case 2:
            return point[:31] + bytes([point[31] ^ 0x80]) + signature[32:]
        case 3:
            return chance.choice(LOW_ORDER) + signature[32:]
        case 4:
            return chance.choice(LOW_ORDER) + bytes(32)
        case 5:
            return signature[: chance.choice((0, 1, 32, 63))]
        case 6:
            return signature + bytes(chance.choice((1, 64)))
    return point + (ORDER - scalar).to_bytes(32, "little")


def weak_key(like: SigningKey, raw: bytes) -> Any:
    """The public record of a key whose point has small order: it signs every eighth message."""
    return replace(like.public, key=Ed25519PublicKey.from_public_bytes(raw))
