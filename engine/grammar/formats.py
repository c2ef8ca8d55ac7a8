"""String formats of JSON schema as patterns. Each allows some of what its RFC does, and nothing that it doesn't."""

from __future__ import annotations

_DATE = (
    r"[12]\d{3}-"
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,4}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_URI = rf"[a-z][a-z0-9+]{{1,9}}://{_HOST}(:[1-9]\d{{0,3}})?(/[A-Za-z0-9_.~!&'()*+,;=:@-]*)*(\?[A-Za-z0-9_.~&=-]*)?"
_EMAIL = rf"[A-Za-z0-9_+-]{{1,30}}(\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}"
_POINTER = r"(/([A-Za-z0-9_.-]|~[01])*)*"

FORMATS = {
    "date-time": rf"{_DATE}T{_CLOCK}",
    "date": _DATE,
    "time": _CLOCK,
    "duration": r"P(\d{1,4}W|\d{1,4}Y(\d{1,4}M(\d{1,4}D)?)?|\d{1,4}M(\d{1,4}D)?|\d{1,4}D"
    r"|(\d{1,4}D)?T(\d{1,4}H(\d{1,4}M(\d{1,4}S)?)?|\d{1,4}M(\d{1,4}S)?|\d{1,4}S))",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": rf"{_H16}(:{_H16}){{7}}|{_H16}(:{_H16}){{0,5}}::|::({_H16}(:{_H16}){{0,5}})?"
    rf"|{_H16}::{_H16}(:{_H16}){{0,4}}",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "uri-reference": _URI,
    "uri-template": _URI,
    "iri": _URI,
    "iri-reference": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d{{0,3}})(#|{_POINTER})",
    "regex": r"[A-Za-z0-9_ -]*",
}
"""By name. Feb 29 and leap seconds are left out: whether they exist depends on the year. Names that aren't here are
none of the specification's; it asks that those be taken as notes."""
