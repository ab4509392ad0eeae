"""The page of the results: ``contributing/mutation.md``."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REASONS = Path(__file__).with_name("survivors.toml")
TEMPLATE = Path(__file__).with_name("page.md")
Record = Mapping[str, Any]


def write(records: Sequence[Record], totals: Mapping[str, int], seed: int, page: Path) -> None:
    """Write the page of ``records``, mutants drawn with ``seed`` from files of ``totals``."""
    entries = _reasons()
    reasons = {_what(entry): entry["reason"] for entry in entries}
    equivalent = {_what(entry) for entry in entries if entry.get("equivalent")}
    survivors = sorted(
        (record for record in records if record["killed_by"] is None),
        key=lambda record: (record["file"], record["line"], record["now"]),
    )
    page.write_text(
        TEMPLATE.read_text().format(
            seed=seed,
            drawn=len(records),
            possible=f"{sum(totals.values()):,}",
            rooms=_table("room", _by_room(records), _by_room_totals(totals), equivalent),
            files=_table("file", _grouped(records, "file"), totals, equivalent),
            operators=_table("change", _grouped(records, "operator"), None, equivalent),
            survivors="\n".join(_survivor(record, reasons) for record in survivors),
        )
    )


def interval(killed: int, drawn: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share.

    >>> [round(end, 3) for end in interval(90, 100)]
    [0.826, 0.945]
    """
    z = 1.959964
    share, spread = killed / drawn, z * z / drawn
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / drawn + spread / (4 * drawn))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def _reasons() -> list[dict[str, Any]]:
    return list(tomllib.loads(REASONS.read_text()).get("survivor", []))


def _what(record: Record) -> tuple[str, str, str]:
    return record["file"], record["was"], record["now"]


def _grouped(records: Iterable[Record], by: str) -> dict[str, list[Record]]:
    result: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record[by]):
        result[record[by]].append(record)
    return result


def _by_room(records: Sequence[Record]) -> dict[str, list[Record]]:
    rooms: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record["file"]):
        rooms[record["file"].partition("/")[0]].append(record)
    return rooms | {"both": list(records)}


def _by_room_totals(totals: Mapping[str, int]) -> dict[str, int]:
    rooms: dict[str, int] = defaultdict(int)
    for file, total in totals.items():
        rooms[file.partition("/")[0]] += total
        rooms["both"] += total
    return rooms


def _table(
    head: str,
    groups: Mapping[str, Sequence[Record]],
    totals: Mapping[str, int] | None,
    equivalent: Collection[tuple[str, str, str]],
) -> str:
    columns = [head, *(["possible"] if totals else []), "tried", "killed", "killed since"]
    columns += ["equivalent", "of all, at first", "score at first", "score"]
    lines = [" | ".join(columns), "|".join("---" for _ in columns)]
    for name, group in groups.items():
        killed = sum(record["killed_by"] is not None for record in group)
        since = sum("since" in record for record in group)
        same = sum(is_open(record) and _what(record) in equivalent for record in group)
        cells = [f"`{name}`" if "/" in name else name.replace("_", " ")]
        cells += [str(totals[name])] if totals else []
        cells += [str(number) for number in (len(group), killed, since, same)]
        cells += [_score(killed, len(group)), _share(killed, len(group) - same)]
        cells += [_share(killed + since, len(group) - same)]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def is_open(record: Record) -> bool:
    """Whether no test has killed it, neither at first nor since."""
    return record["killed_by"] is None and "since" not in record


def _score(killed: int, drawn: int) -> str:
    """The share, and where it says something the interval that it stands for."""
    if drawn < 30:
        return _share(killed, drawn)
    low, high = interval(killed, drawn)
    return f"{_share(killed, drawn)} ({low:.1%} to {high:.1%})"


def _share(killed: int, drawn: int) -> str:
    return f"{killed / drawn:.{0 if drawn < 30 else 1}%}" if drawn else "-"


def _survivor(record: Record, reasons: Mapping[tuple[str, str, str], str]) -> str:
    reason = reasons.get(_what(record), "Not examined yet.")
    if "since" in record:
        reason = f"Killed since by `{record['since'].rpartition('::')[2]}`."
    change = f"``{_code(record['was'])}`` became ``{_code(record['now'])}``"
    return f"- `{record['file']}:{record['line']}`: {change}. {reason}"


def _code(text: str) -> str:
    return text.replace("`", "'") if text else "(nothing)"
