"""Blocks: the mapping of a plan's releases to a model's tensors.

The adapter groups the model's parameters by release. The plan defines for each release the number
of groups, their clip norm and their noise. Under flat clipping, all groups are one block with one
clip norm. A release, tensor or count without a counterpart is refused by name. ``PrivateModel``
checks that each trainable tensor is in exactly one group.

Guarantees
    * The noise of a tensor has the standard deviation σ_g C_g of its release, rounded up.
    * The clip norms of a step are those of its phase times the plan's clip schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from affidavit.assessment import (
    FLAT,
    Execution,
    StepRequirement,
    block_name,
)
from affidavit.plan import Phase
from affidavit.trainer.adapters import Group, ModelAdapter
from affidavit.trainer.clipping.requirements import BlockSpec
from affidavit.trainer.distributed.shards import Box
from affidavit.trainer.errors import NotCertified
from affidavit.trainer.noise.source import TensorNoise


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The groups of each release, in the plan's order, and the tensors themselves.

    ``boxes`` are the local parts of sharded tensors.
    """

    groups: Mapping[str, tuple[Group, ...]]
    parameters: Mapping[str, nn.Parameter]
    flat: bool
    boxes: Mapping[str, Box] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, dict[str, nn.Parameter]]:
        """The tensors by release and name, from which an optimiser is built."""
        return {
            release: {name: self.parameters[name] for group in groups for name in group.names}
            for release, groups in self.groups.items()
        }

    def specs(self, required: StepRequirement) -> tuple[BlockSpec, ...]:
        """Return the blocks of a step with its clip norms."""
        if self.flat:
            names = tuple(name for of in self.tensors.values() for name in of)
            (clip_norm,) = set(required.clip_norm.values())
            return (BlockSpec(name=FLAT, clip_norm=clip_norm, names=names),)
        result = []
        for release, groups in self.groups.items():
            for place, group in enumerate(groups):
                clip_norm = block_value(required.clip_norm, release, place)
                uses = {path: share * clip_norm for path, share in group.uses.items()}
                name = block_name(release, place)
                spec = BlockSpec(name=name, clip_norm=clip_norm, names=group.names, uses=uses)
                result.append(spec)
        return tuple(result)

    def noise(self, required: StepRequirement) -> dict[str, TensorNoise]:
        """Return the noise of each tensor, in the order of ``tensors``."""
        return {
            name: TensorNoise(
                shape=tuple(self.parameters[name].shape),
                scale=block_value(required.noise_std, release, place),
                box=self.boxes.get(name),
            )
            for release, groups in self.groups.items()
            for place, group in enumerate(groups)
            for name in group.names
        }

    def as_entries(self) -> list[dict[str, Any]]:
        """Return the tensors with their shapes and blocks, for a run record."""
        return [
            {
                "name": name,
                "shape": list(self.parameters[name].shape),
                "release": release,
                "block": FLAT if self.flat else block_name(release, place),
            }
            for release, groups in self.groups.items()
            for place, group in enumerate(groups)
            for name in group.names
        ]


def block_value(values: Mapping[str, float], release: str, place: int) -> float:
    """Return the value of a block, or else of its release."""
    block = block_name(release, place)
    return values[block] if block in values else values[release]


def build_layout(execution: Execution, model: ModelAdapter) -> Layout:
    """Map the plan's releases to the adapter's groups; raises ``NotCertified``."""
    first, *others = execution.plan.phases
    if any(phase.clipping != first.clipping for phase in others):
        raise _refused("clipping differs between phases. Give all phases the same clipping.")
    result = {name: tuple(groups) for name, groups in model.blocks().items()}
    requested = [release.name for release in first.releases]
    if result.keys() != set(requested):
        raise _refused(
            f"the plan releases {', '.join(requested)}, but the model has blocks for "
            f"{', '.join(sorted(result)) or 'nothing'}. Name the plan's releases as the model does."
        )
    flat = first.clipping == "flat"
    _require_counts(first, result, flat=flat)
    parameters = dict(model.module.named_parameters())
    named = {name for groups in result.values() for group in groups for name in group.names}
    if unknown := sorted(named - parameters.keys()):
        raise _refused(f"{', '.join(unknown)}: the model has no such tensor.")
    return Layout(
        groups={name: result[name] for name in requested}, parameters=parameters, flat=flat
    )


def _require_counts(phase: Phase, blocks: Mapping[str, Sequence[Group]], *, flat: bool) -> None:
    for release in phase.releases:
        groups = blocks[release.name]
        if flat and any(group.uses for group in groups):
            raise _refused("uses with separate clip norms need per-block clipping.")
        if not flat and len(groups) != release.count:
            raise _refused(
                f"release {release.name} has count {release.count}, but the model has "
                f"{len(groups)} blocks for it. Certify the plan with count: {len(groups)}."
            )


def _refused(message: str) -> NotCertified:
    return NotCertified("blocks", f"the plan's releases are not the model's blocks: {message}")
