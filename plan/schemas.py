"""The two forms of a plan as JSON Schemas: with phases, and with one phase's fields at the top.

>>> sorted(set(plan_schemas("#/$defs/{model}")) & {"PlanOfOnePhase", "PlanOfPhases"})
['PlanOfOnePhase', 'PlanOfPhases']
"""

from __future__ import annotations

from typing import Any

from affidavit.plan.document import PHASE_FIELDS, Plan

Schema = dict[str, Any]


def plan_schemas(ref_template: str) -> dict[str, Schema]:
    """``PlanOfOnePhase``, ``PlanOfPhases`` and their parts by name.

    They name one another by ``ref_template``, in which ``{model}`` stands for the name.
    """
    phased = Plan.model_json_schema(ref_template=ref_template)
    parts: dict[str, Schema] = phased.pop("$defs")
    phase = parts["Phase"]
    single = {
        **phased,
        "title": "PlanOfOnePhase",
        "properties": {
            **{name: part for name, part in phased["properties"].items() if name != "phases"},
            **{name: phase["properties"][name] for name in sorted(PHASE_FIELDS)},
        },
        "required": sorted({*phased["required"], *phase["required"]} - {"phases"}),
    }
    return {"PlanOfOnePhase": single, "PlanOfPhases": phased, **parts}
