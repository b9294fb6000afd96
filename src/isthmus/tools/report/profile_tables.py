"""The tables of a step's time and memory, read from the Markdown that the profile of a run wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SHARE = re.compile(r"(\d{1,4}(?:\.\d+)?)%")
_MOST_ROWS = 200


@dataclass(slots=True)
class ProfileTable:
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    @property
    def share_column(self) -> int | None:
        """The column that becomes a bar."""
        return self.columns.index("share") if "share" in self.columns else None

    def width(self, row: list[str]) -> float:
        """The bar of a row in percent; 0 for a total."""
        column = self.share_column
        share = None if column is None or column >= len(row) or row[0] == "total" else _SHARE.fullmatch(row[column])
        return 0.0 if share is None else min(100.0, float(share[1]))


@dataclass(slots=True)
class RankProfile:
    title: str = ""
    remarks: list[str] = field(default_factory=list)
    tables: list[ProfileTable] = field(default_factory=list)


def parse_profile(markdown: str) -> RankProfile:
    """Title, paragraphs and tables; other Markdown is text."""
    profile, is_in_table = RankProfile(), False
    for line in markdown.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not is_in_table:
                profile.tables.append(ProfileTable(cells))
            elif not all(re.fullmatch(":?-+:?", cell) for cell in cells) and len(profile.tables[-1].rows) < _MOST_ROWS:
                profile.tables[-1].rows.append(cells)
        elif line.startswith("# "):
            profile.title = profile.title or line[2:]
        elif line:
            profile.remarks.append(line)
        is_in_table = line.startswith("|")
    return profile
