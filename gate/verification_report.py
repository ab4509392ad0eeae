"""Print the numbered steps of a verification, or the step that rejected what was verified."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich.markup import escape

from affidavit.gate.console import out, print_json
from affidavit.trust import StepError

Step = tuple[int, str, str]
"""Number, name and detail."""


def print_steps(steps: Iterable[Step], unchecked: Collection[int]) -> None:
    """Print a line for each step, marked as checked or not."""
    for number, name, detail in steps:
        mark = "[yellow]–[/]" if number in unchecked else "[green]✓[/]"
        out.print(f"{mark} {number}. {name}: {escape(detail)}")


def steps_as_documents(steps: Iterable[Step], unchecked: Collection[int]) -> list[dict[str, Any]]:
    """Return a JSON object for each step."""
    return [
        {"step": number, "name": name, "detail": detail, "checked": number not in unchecked}
        for number, name, detail in steps
    ]


def print_rejection(name: str, error: StepError, *, as_json: bool) -> None:
    """Print which step rejected what is called ``name``, and why."""
    if as_json:
        print_json(
            {
                "verified": False,
                "step": error.step,
                "step_name": error.step_name,
                "code": error.code,
                "message": error.message,
                "remedy": error.remedy,
            }
        )
        return
    out.print(
        f"[red]✗ {escape(name)}: rejected at step {error.step} ({error.step_name}), "
        f"{error.code}:[/] {escape(error.message)} {escape(error.remedy)}"
    )
