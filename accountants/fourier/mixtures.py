"""Laws that are made of other laws: by a coin that is revealed, of two orders, with less mass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from affidavit.accountants.fourier.normal_masses import Array
from affidavit.accountants.fourier.privacy_loss import Atoms, Cells, LossLaw, NormalPair, Survival


@dataclass(frozen=True, kw_only=True, slots=True)
class RevealedMixtureLaw:
    """``second`` with probability ``weight``, else ``first``, and it is known which."""

    first: LossLaw
    second: LossLaw
    weight: float

    @property
    def ceiling(self) -> float:
        """No loss of either exceeds this (nats)."""
        return max(self.first.ceiling, self.second.ceiling)

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        parts = (self.first.atoms(), 1 - self.weight), (self.second.atoms(), self.weight)
        losses = np.concatenate([atoms.losses for atoms, _ in parts])
        weights = np.concatenate([share * atoms.weights for atoms, share in parts])
        order = np.argsort(losses, kind="stable")
        return Atoms(losses=losses[order], weights=weights[order])

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats), weighed."""
        first, second = self.first.survival(losses), self.second.survival(losses)
        rest = 1 - self.weight
        return Survival(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            loss_error=max(first.loss_error, second.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``, weighed."""
        first, second = self.first.cells(edges), self.second.cells(edges)
        rest = 1 - self.weight
        return Cells(
            p=rest * first.p + self.weight * second.p,
            q=rest * first.q + self.weight * second.q,
            relative=np.maximum(first.relative, second.relative) + 2.0**-51,
            misplaced=np.maximum(first.misplaced, second.misplaced),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with at most about this small probability.

        Half of it for either law, since the bound of ε that needs no transform rests on it.
        """
        half = probability / 2
        if self.weight <= half:
            return self.first.top(half)
        return max(self.first.top(half), self.second.top(half / self.weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftedLaw:
    """``law`` with every loss ``shift`` (nats) higher, as Q has e^-shift of its mass."""

    law: LossLaw
    shift: float

    @property
    def ceiling(self) -> float:
        """No loss exceeds this (nats)."""
        return self.law.ceiling + self.shift + 1e-15

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        atoms = self.law.atoms()
        return Atoms(losses=atoms.losses + self.shift, weights=atoms.weights)

    def survival(self, losses: Array) -> Survival:
        """Both survival functions at increasing ``losses`` (nats)."""
        own = self.law.survival(losses - self.shift)
        return Survival(
            p=own.p,
            q=own.q * math.exp(-self.shift),
            relative=own.relative + 2.0**-51,
            loss_error=own.loss_error + float(self._rounding(losses).max()),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses of both laws between ``edges``."""
        own = self.law.cells(edges - self.shift)
        beside = self._rounding(edges)
        return Cells(
            p=own.p,
            q=own.q * math.exp(-self.shift),
            relative=own.relative + 2.0**-51,
            misplaced=own.misplaced + np.maximum(np.append(beside, 0), np.insert(beside, 0, 0)),
        )

    def top(self, probability: float) -> float:
        """A loss (nats) that is exceeded under P with about this small probability."""
        return self.law.top(probability) + self.shift

    def _rounding(self, losses: Array) -> Array:
        return np.asarray(2.0**-52 * (np.abs(losses) + abs(self.shift)))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorseOfBothLaw:
    """The law whose curve is that of ``remove`` for α >= 1 and that of ``add`` below.

    That is ``remove`` where the loss is positive, ``add`` where it is negative, and an ``atom``
    (its probability) at zero, where the two curves meet with a kink: the dominating law of
    sampling without replacement (docs/theorems/without-replacement.md) and of displaced records
    (docs/theorems/truncated-poisson.md). No single pair of data sets need attain it, so it
    serves upper bounds only.
    """

    remove: NormalPair
    add: NormalPair
    atom: float

    @property
    def ceiling(self) -> float:
        """That of ``remove`` (nats), whose part the positive losses are."""
        return self.remove.ceiling

    def atoms(self) -> Atoms:
        """The law under P, for parameters."""
        low, high = self.add.atoms(), self.remove.atoms()
        below, above = low.losses < 0, high.losses > 0
        weights = np.concatenate((low.weights[below], [0.0], high.weights[above]))
        weights[int(below.sum())] = max(0.0, 1.0 - float(weights.sum()))
        losses = np.concatenate((low.losses[below], [0.0], high.losses[above]))
        return Atoms(losses=losses, weights=weights / weights.sum())

    def top(self, probability: float) -> float:
        """A loss that is exceeded under P with about this small probability."""
        return max(0.0, self.remove.top(probability))

    def survival(self, losses: Array) -> Survival:
        """Both survival functions; at zero the atom counts as reached, which is ``add``."""
        split = int(np.searchsorted(losses, 0.0, side="right"))
        if split == 0:
            return self.remove.survival(losses)
        low = self.add.survival(losses[:split])
        if split == losses.size:
            return low
        high = self.remove.survival(losses[split:])
        return Survival(
            p=np.concatenate((low.p, high.p)),
            q=np.concatenate((low.q, high.q)),
            relative=np.concatenate((low.relative, high.relative)),
            loss_error=max(low.loss_error, high.loss_error),
        )

    def cells(self, edges: Array) -> Cells:
        """The masses between ``edges``; the cell that holds zero has both laws and the atom."""
        if edges[0] >= 0.0 or edges[-1] <= 0.0:
            return self._cells_on_one_side(edges)
        split = int(np.searchsorted(edges, 0.0))
        low = self.add.cells(np.append(edges[:split], 0.0))
        high = self.remove.cells(np.insert(edges[split:], 0, 0.0))

        def joined(below: Array, above: Array, middle: float) -> Array:
            return np.concatenate((below[:split], [middle], above[2:]))

        return Cells(
            p=joined(low.p, high.p, float(low.p[split] + high.p[1]) + self.atom),
            q=joined(low.q, high.q, float(low.q[split] + high.q[1]) + self.atom),
            relative=joined(
                low.relative, high.relative, float(max(low.relative[split], high.relative[1]))
            ),
            misplaced=joined(
                low.misplaced, high.misplaced, float(max(low.misplaced[split], high.misplaced[1]))
            ),
        )

    def _cells_on_one_side(self, edges: Array) -> Cells:
        """The cells when no two edges have zero between them: one more edge, and less."""
        beyond = float(np.abs(edges).max()) + 1.0
        if edges[0] >= 0.0:
            cells, ends = self.cells(np.insert(edges, 0, -beyond)), slice(0, 2)
        else:
            cells, ends = self.cells(np.append(edges, beyond)), slice(-2, None)

        def merged(values: Array, joined: float) -> Array:
            if ends.start == 0:
                return np.insert(values[2:], 0, joined)
            return np.append(values[:-2], joined)

        return Cells(
            p=merged(cells.p, float(cells.p[ends].sum())),
            q=merged(cells.q, float(cells.q[ends].sum())),
            relative=merged(cells.relative, float(cells.relative[ends].max())),
            misplaced=merged(cells.misplaced, float(cells.misplaced[ends].max())),
        )
