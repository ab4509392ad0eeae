"""The training: everything a run has in memory, put together from the certified plan.

Model with its taps, lots, noise of every phase, optimiser, and the way to a clipped sum. It
knows steps by their number t = 0..T-1 alone: row t of the noise, lot t, charge t and key t
belong together for good. ``step`` takes a step; ``pass_over`` goes past one that was charged
and then lost in a crash, so that its lot and its row of the noise are never used for
anything else.

Every state that outlasts a step is in ``state``: the optimiser's, what is kept of the noise,
and, of DP-Dice, the error state. When a step is passed over that error state starts again at
zero. (It would be released a second time otherwise; from zero, the reach γ_k of k
participations falls apart into γ_a² + γ_b² ≤ γ_k², k = a + b, by γ_j² = c² + (ρ + γ_(j-1))².)

Reference: docs/theorems/dp-dice.md, Theorem 2 (γ).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from affidavit.certificate import ClipAdaptation, StepRequirement
from affidavit.plan import Plan
from affidavit.trainer.adapters import (
    Batch,
    DataAdapter,
    ModelAdapter,
    digest_of_tensors,
    on_device,
    picked_records,
)
from affidavit.trainer.clipping.private import PrivateModel
from affidavit.trainer.clipping.probe import PROBE_RECORDS, probe
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.distributed.shards import Shards, here, is_sharded, local, placed, whole
from affidavit.trainer.errors import Diverged, NotCertified, RunFailure, UnsupportedModel
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.noise.noise_statistics import NoiseTest
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.numerics import HALF_TYPES, all_finite, checksum
from affidavit.trainer.optimizers.dice import ErrorFeedback
from affidavit.trainer.optimizers.disk import DiSK
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import optimizer_of
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.blocks import layout_of
from affidavit.trainer.steps.sampling import LotSampler
from affidavit.trainer.steps.step import (
    ErrorFeedbackGradient,
    KalmanGradient,
    Lot,
    PerExampleGradient,
)

_OfTensor = Callable[[str, Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Keys that serve a whole run: lots that outlast a step, and the probes of DP-MuonBC."""

    lots: bytes
    probes: bytes


class TrainingState:
    """A run in memory; the model is the adapter's own, and is trained in place."""

    def __init__(
        self,
        config: RunConfig,
        model: ModelAdapter,
        data: DataAdapter,
        *,
        settings: Settings,
        peers: Peers,
        keys: RunKeys,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._config, self._settings, self._peers = config, settings, peers
        self._data, self.extra = data, dict[str, Any]()
        self.module = model.module.to(peers.device).train()
        self.layout = layout_of(config.execution, model)
        self.shards = Shards.of(self.module, self._trained, peers)
        if self.shards is not None:
            self.layout = replace(self.layout, boxes=self.shards.here)
        parallel = None if self.shards is None else self.shards.tensor_parallel
        self._place = (peers.rank, peers.size) if self.shards is None else self.shards.data
        plan, steps = _with_learning_rate(config.plan), config.execution.steps
        self._rates = _learning_rates(config.plan, settings, steps)
        self._own_loop = optimizer is not None
        if optimizer is not None:
            require_trained(optimizer, self.module)
            self._rates = lambda _: float(optimizer.param_groups[0]["lr"])
        self._adaptation = _adaptation_of(config.plan)
        self.clip_counts: dict[str, float] | None = None
        self._records = 0
        self.private = PrivateModel(
            self.module, self.layout.specs(self._required(0)), tensor_parallel=parallel
        )
        if self._adaptation is not None:
            self.private.count_unclipped()
        if settings.compile:
            self.module.compile()
        self._masters = {} if optimizer is not None else _masters(self._trained)
        self.optimizer: torch.optim.Optimizer = optimizer or optimizer_of(
            optimizer_inputs(
                plan,
                {
                    release: {name: self._masters.get(name, item) for name, item in of.items()}
                    for release, of in self.layout.tensors.items()
                },
                strategies=config.strategies,
                probe_key=keys.probes if plan.optimizer.name == "dp_muonbc" else None,
                newton_schulz_dtype=settings.autocast if peers.device.type == "cuda" else None,
                shards=self.shards,
            )
        )
        self._updated = _updated_by(self.optimizer)
        self._feedback: ErrorFeedback | None = None
        self._gradient = self._way_of(model, data)
        self._lots = [LotSampler(plan, index, keys.lots) for index in range(len(plan.phases))]
        self._noise = self._noise_of_phases()
        self.noise_test = NoiseTest(
            {name: release for release, of in self.layout.tensors.items() for name in of},
            {
                name: local(item).numel()
                for name, item in self._trained.items()
                if parallel is None or parallel.contributes(name)
            },
            ranks=1 if self.shards is None else peers.size,
        )

    def _way_of(self, model: ModelAdapter, data: DataAdapter) -> PerExampleGradient:
        plan = self._config.plan
        provided: dict[str, Any] = {
            "model": model,
            "private": self.private,
            "data": data,
            "peers": self._peers,
            "autocast": self._settings.autocast,
            "shards": self.shards,
        }
        if self.shards is not None and plan.optimizer.name in ("dp_disk", "dp_dice"):
            raise UnsupportedModel(
                f"{plan.optimizer.name} computes gradients in its own way, without sharded "
                "parameters. Remove fully_shard."
            )
        if self._adaptation is not None and plan.optimizer.name in ("dp_disk", "dp_dice"):
            raise UnsupportedModel(
                f"{plan.optimizer.name} clips gradients in its own way, so its clip norms cannot "
                "be adapted. Remove adaptive_clipping_quantile from extra."
            )
        if isinstance(self.optimizer, DiSK):
            if self._masters:
                raise UnsupportedModel(
                    f"{', '.join(self._masters)}: dp_disk trains parameters in float32 and float64 "
                    "only. Load the model in float32, and use autocast for speed."
                )
            return KalmanGradient(**provided, optimizer=self.optimizer)
        if plan.optimizer.name == "dp_dice":
            self._feedback = self._no_error()
            return ErrorFeedbackGradient(
                **provided, feedback=self._feedback, pre_clip_norm=plan.optimizer.pre_clip_norm
            )
        return PerExampleGradient(**provided)

    def _no_error(self) -> ErrorFeedback:
        shapes = {name: item.shape for name, item in self._trained.items()}
        return ErrorFeedback.of(self._config.plan, shapes, device=str(self._peers.device))

    def _noise_of_phases(self) -> list[NoiseSource]:
        execution, result, first = self._config.execution, [], 0
        for steps, strategy, phase in zip(
            execution.lengths, self._config.strategies, execution.plan.phases, strict=True
        ):
            source = NoiseSource(
                bytes(32),  # every step brings a key of its own
                self.layout.noise(execution.at(first)),
                strategy=strategy,
                device=str(self._peers.device),
                exact=phase.has_exact_noise,
            )
            result.append(source)
            first += steps
        return result

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: item for of in self.layout.tensors.values() for name, item in of.items()}

    def require_apart(
        self, model: ModelAdapter, collated: Callable[[Tensor], Batch] | None = None
    ) -> None:
        """Probe the model with made-up records; raises where it mixes records.

        ``collated`` makes a batch of some of them, by their numbers (n,), that knows no others.
        """
        made_up = on_device(model.made_up(PROBE_RECORDS), self._peers.device)

        def losses(batch: Batch) -> Tensor:
            with torch.autocast(
                self._peers.device.type,
                dtype=self._settings.autocast,
                enabled=self._settings.autocast is not None,
            ):
                return model.losses(on_device(batch, self._peers.device))

        probe(
            self.private,
            lambda rows: losses(picked_records(made_up, rows)),
            isolated=None if collated is None else lambda rows: losses(collated(rows)),
            max_records=min(
                self._settings.microbatch, self._config.plan.dataset.size or PROBE_RECORDS
            ),
        )
        self._probed = _modules(self.module)

    def require_as_left(self) -> None:
        """Raise ``UnsupportedModel`` if trained tensors changed since they were left."""
        now = self._checksums()
        if changed := [name for name, item in self._left.items() if now[name] != item]:
            raise UnsupportedModel(
                f"{', '.join(changed)}: changed since the run's last step, and not by it, so "
                "they may hold what got no noise. Train by run.loss and optimizer.step() alone, "
                "and put back weights that you swap for an evaluation. If they are made of "
                "released or public values alone, call run.accept_weights()."
            )

    def leave(self) -> None:
        """Note the trained tensors as they are, for ``require_as_left``."""
        self._left = self._checksums()

    def _checksums(self) -> dict[str, int]:
        sums = [checksum(local(item)) for item in self._trained.values()]
        return dict(zip(self._trained, torch.stack(sums).tolist(), strict=True))

    def require_as_begun(self) -> None:
        """Raise ``UnsupportedModel`` if tensors or modules changed since the run began."""
        now = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        changed = now.keys() ^ self._trained.keys()
        if self.shards is None:  # fully_shard has two parameters for one tensor
            changed |= {n for n in now.keys() - changed if now[n] is not self._trained[n]}
        if changed:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: made trainable, frozen, added or replaced after "
                "the run began; only tensors that were trainable then are clipped and noised. "
                "Change them before the run, and freeze what is not to be trained."
            )
        modules = _modules(self.module)
        if changed := {n for n in modules | self._probed if modules.get(n) != self._probed.get(n)}:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: added, replaced, removed or hooked after the run "
                "began; only what was there then was probed for mixing records. Change modules and "
                "their hooks before the run, and remove hooks after use."
            )
        if _updated_by(self.optimizer) != self._updated:
            raise UnsupportedModel(
                "the optimiser's tensors changed after the run began. Give it all tensors before."
            )

    def public(self, step: int) -> dict[str, Any]:
        """The public parameters that the training will use in ``step``."""
        required = self._enter(step)
        clip_norm, noise_std = required.clip_norm, required.noise_std
        if self._adaptation is None:
            norms = {spec.name: spec.clip_norm for spec in self.private.specs}
            blocks = {entry["name"]: entry["block"] for entry in self.layout.as_entries()}
            scales, tensors = self._noise[required.phase].scales(), self.layout.tensors.items()
            clip_norm = {release: max(norms[blocks[n]] for n in of) for release, of in tensors}
            noise_std = {release: min(scales[n] for n in of) for release, of in tensors}
        return {
            "phase": required.phase,
            "clip_norm": clip_norm,
            "noise_std": noise_std,
            "divisor": required.divisor,
            "learning_rate": self._rates(step),
        }

    def _required(self, step: int) -> StepRequirement:
        """What ``step`` must be, with the clip norms of now where they are adapted."""
        required = self._config.execution.at(step)
        return required if self._adaptation is None else self._adaptation.at(required)

    def _enter(self, step: int) -> StepRequirement:
        required = self._required(step)
        specs = self.layout.specs(required)
        if specs != self.private.specs:
            self.private.set_clip_norms(specs)
        return required

    def step(self, step: int, ratchet: Ratchet, seen: Callable[[Tensor], None]) -> int:
        """Take ``step``; how many records its lot had, which is private.

        Raises ``Diverged`` where a parameter is not finite afterwards.

        ``seen`` is handed the losses of its records, in parts of shape (m,).
        """
        lot, records = self.lot(step, ratchet)
        self.release(step, ratchet, self._gradient.clipped_sum(lot, seen))
        return records

    def lot(self, step: int, ratchet: Ratchet) -> tuple[Lot, int]:
        """This rank's part of the lot of ``step``, and how many records the whole lot has."""
        required = self._enter(step)
        lot = self._lots[required.phase].of(required.place, ratchet.key_for("lot"))
        rank, size = self._place
        mine = Lot(
            records=lot[rank::size],
            microbatch=self._settings.microbatch,
            dropout_key=ratchet.key_for(f"dropout of rank {rank}"),
            max_records=0 if self.shards is None else -(-len(lot) // size),
        )
        self.private.take_unclipped_counts()
        self._records = len(mine.records)
        return mine, len(lot)

    def batch(self, lot: Lot, place: int, records: Tensor) -> Any:
        """Microbatch ``place`` of ``lot`` on the device, with its seed for drop-out set.

        ``records`` are its numbers, shape (m,); for none there is a made-up one.
        """
        lot.seed(place)
        return self._gradient.batch(records)

    def summed(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """``sums`` of this rank over all ranks, in place.

        Each has the shape of its parameter, or of its part that is here.
        """
        return self._gradient.summed(sums)

    def release(self, step: int, ratchet: Ratchet, sums: dict[str, Tensor]) -> None:
        """Add the noise of ``step`` to ``sums``, once, and update with the noisy means.

        Each has the shape of its parameter. Raises ``Diverged``.
        """
        required = self._required(step)
        noise_std = {name: item.scale for name, item in self.layout.noise(required).items()}
        before = self.noise_test.entries(sums, noise_std)
        self._source(required, ratchet).add_to(sums, noise_std if self._adaptation else None)
        self.noise_test.see(
            before,
            sums,
            noise_std,
            strategy=self._config.strategies[required.phase],
            place=required.place,
        )
        self._update(sums, required, self._rates(step))
        if self._adaptation is not None:
            self.clip_counts = self._noisy_counts(
                self._adaptation,
                ratchet,
                exact=self._config.plan.phases[required.phase].has_exact_noise,
            )
            self._adaptation.follow(self.clip_counts, required)

    def _noisy_counts(
        self, adaptation: ClipAdaptation, ratchet: Ratchet, *, exact: bool
    ) -> dict[str, float]:
        """By block, how many records were within the clip norm, each as ±1/2, with noise."""
        within = self.private.take_unclipped_counts()
        sums = torch.tensor(
            [within[block] - self._records / 2 for block in adaptation.factors],
            device=self._peers.device,
        )
        if self.shards is not None and (of := self.shards.tensor_parallel) and of.rank:
            sums.zero_()  # the first of the ranks with the same records has counted them
        self._peers.add_up({"counts": sums})
        noise = TensorNoise(shape=tuple(sums.shape), scale=adaptation.event.noise_std)
        key, device = ratchet.key_for("clipping counts"), str(self._peers.device)
        NoiseSource(key, {"counts": noise}, device=device, exact=exact).add_to({"counts": sums})
        return dict(zip(adaptation.factors, sums.tolist(), strict=True))

    def pass_over(self, step: int, ratchet: Ratchet) -> None:
        """Skip ``step``, which was charged and lost."""
        self._source(self._config.execution.at(step), ratchet).pass_over()
        if self._feedback is not None:
            self._feedback.load_private_state_dict(self._no_error().private_state_dict())

    def _source(self, required: StepRequirement, ratchet: Ratchet) -> NoiseSource:
        source = self._noise[required.phase]
        if source.step != required.place:
            raise RuntimeError("the noise and the run are at different steps")
        source.rekey(ratchet.key_for("noise"))
        return source

    def _update(self, sums: dict[str, Tensor], required: StepRequirement, rate: float) -> None:
        divisor = float(Fraction(required.divisor))
        if self.shards is not None:  # one rank must not go on without another
            self._require_finite(sums, "a mean is not finite")
        updated = {**self._trained, **self._masters}
        for name, parameter in updated.items():
            mean = sums[name].div_(divisor).to(parameter.dtype)
            parameter.grad = placed(mean, parameter) if is_sharded(parameter) else mean
        for name, master in self._masters.items():
            if master.dtype == self._trained[name].dtype:
                master.data = local(self._trained[name])  # fully_shard may have moved it
        if not self._own_loop:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        try:
            type(self.optimizer).step(self.optimizer)
        except ValueError as error:
            raise Diverged("diverged", f"{error} The steps until here stay charged.") from None
        for parameter in updated.values():
            parameter.grad = None
        with torch.no_grad():
            for name, master in self._masters.items():
                if (narrow := local(self._trained[name])).dtype != master.dtype:
                    narrow.copy_(master)
        self._require_finite(self._trained, "a parameter is not finite after the update")

    def _require_finite(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise ``Diverged`` where they are not finite; on every rank, where each has its rows."""
        finite = all_finite(local(item) for item in tensors.values())
        if not (finite if self.shards is None else all(self._peers.gathered(finite))):
            raise Diverged(
                "diverged",
                f"{what}. Certify the plan with a smaller "
                "optimizer.learning_rate; the steps until here stay charged.",
            )

    def digest(self) -> str:
        """The digest of all trainable tensors, in the layout's order.

        Of sharded tensors every rank asks, and the first of each replica is told: one tensor after
        the other is gathered, and none is kept.
        """
        if self.shards is None or self.shards.compares or self._peers.leads:
            return digest_of_tensors(whole(item) for item in self._trained.values())
        for item in self._trained.values():
            whole(item)
        return ""

    def weights(self) -> dict[str, Tensor]:
        """The module's state, whole; of sharded tensors every rank asks, and rank 0 is told.

        Each has its own shape.
        """
        result = {}
        for name, item in self.module.state_dict().items():
            full = whole(item)
            if self._peers.leads:
                result[name] = full.cpu() if is_sharded(item) else item
        return result

    def noise_entry(self) -> dict[str, Any]:
        """The result of the noise test, over all ranks that test their own noise."""
        if self.shards is None:
            return self.noise_test.as_entry()
        seen = {} if self.shards.replica else self.noise_test.squares  # replicas see the same
        return self.noise_test.as_entry(self._peers.gathered(seen))

    def replicated(self) -> dict[str, Tensor]:
        """The module's state but for what is sharded, each tensor in its shape."""
        state = self.module.state_dict()
        return {name: item for name, item in state.items() if not is_sharded(item)}

    def load_replicated(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``replicated`` is on another rank, each tensor in its shape."""
        with torch.no_grad():
            for name, item in self.replicated().items():
                item.copy_(state[name])

    def state(self) -> dict[str, Any]:
        """Everything that a step leaves behind; as secret as the data.

        Of what is sharded it has ``DTensor``s.
        """
        own = [source.state_dict() for source in self._noise]
        noise = [{**of, "kept": _each(of["kept"], self._as_stored)} for of in own]
        masters = {
            name: item.detach()
            for name, item in self._masters.items()
            if item.dtype != self._trained[name].dtype
        }
        return {
            "module": self.module.state_dict(),
            "masters": _each(masters, self._as_stored),
            "optimizer": self._each_of_optimizer(self.optimizer.state_dict(), self._as_stored),
            "noise": noise,
            "error": {} if self._feedback is None else self._feedback.private_state_dict(),
            "clip_factors": dict(self._adaptation.factors) if self._adaptation else {},
            "extra": {name: item.state_dict() for name, item in self.extra.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; raises ``ValueError`` or ``RuntimeError`` for another run's."""
        if self.shards is None:
            self.module.load_state_dict(state["module"])
        with torch.no_grad():
            if self.shards is not None:
                for name, item in self.module.state_dict().items():
                    local(item).copy_(here(state["module"][name], item))
            for name, master in self._masters.items():
                master.copy_(self._as_here(name, state["masters"].get(name, state["module"][name])))
        self._require_same_optimizer(state["optimizer"])
        self.optimizer.load_state_dict(
            self._each_of_optimizer(state["optimizer"], self._as_updated)
        )
        for source, stored in zip(self._noise, state["noise"], strict=True):
            source.load_state_dict({**stored, "kept": _each(stored["kept"], self._as_here)})
        if self._feedback is not None:
            self._feedback.load_private_state_dict(state["error"])
        if self._adaptation is not None:
            self._adaptation.factors = dict(state["clip_factors"])
        self._stored = state.get("extra", {})

    def _require_same_optimizer(self, state: dict[str, Any]) -> None:
        """Raise ``RunFailure`` where ``state`` is of one with other groups or settings."""
        then, now = state["param_groups"], self.optimizer.state_dict()["param_groups"]
        alike = len(then) == len(now) and all(
            len(one["params"]) == len(other["params"]) and _settings(other) <= one.keys()
            for one, other in zip(then, now, strict=True)
        )
        if not alike:
            raise RunFailure(
                "other_run",
                f"the run was begun with another optimiser than {type(self.optimizer).__name__} "
                "with these groups. Use the one that the run started with.",
            )

    def _as_stored(self, name: str, item: Any) -> Any:
        """What is of the rows of ``name`` that are here, as a ``DTensor``."""
        like = self._trained[name]
        sharded = is_sharded(like) and isinstance(item, Tensor) and not is_sharded(item)
        return placed(item, like) if sharded and item.shape == local(like).shape else item

    def _as_here(self, name: str, item: Any) -> Any:
        """What is of all rows of ``name``, or already of those that are here, as the latter."""
        return here(item, self._trained[name]) if isinstance(item, Tensor) else item

    def _as_updated(self, name: str, item: Any) -> Any:
        """The same as the tensor is that the optimiser updates."""
        item = self._as_here(name, item)
        return self._as_stored(name, item) if self._own_loop else item

    def _each_of_optimizer(self, state: dict[str, Any], function: _OfTensor) -> dict[str, Any]:
        """``state`` of the optimiser with ``function`` of every tensor in it."""
        if self.shards is None:
            return state
        updated = {**self._trained, **self._masters}
        names = {id(item): name for name, item in updated.items()}
        numbered = [item for group in self.optimizer.param_groups for item in group["params"]]
        of = {
            number: tree_map(partial(function, names[id(numbered[number])]), own)
            for number, own in state["state"].items()
        }
        return {**state, "state": of}

    def keep(self, name: str, item: Any) -> None:
        """Save ``item`` in checkpoints, and restore its saved state if there is one."""
        self.extra[name] = item
        if name in self._stored:
            item.load_state_dict(self._stored[name])

    def close(self) -> None:
        """Give the model its own layers back."""
        self.private.detach()


def _adaptation_of(plan: Plan) -> ClipAdaptation | None:
    """Raises ``NotCertified`` where the plan does not say which count steers which norm."""
    try:
        return ClipAdaptation.of(plan)
    except ValueError as error:
        raise NotCertified("unsupported", f"/extra: {error}, and certify the plan again.") from None


def _settings(group: Mapping[str, Any]) -> set[str]:
    """What an optimiser was set to, without switches, of which each release of PyTorch has more."""
    return {key for key, value in group.items() if not isinstance(value, bool | None)}


def _each(values: Mapping[str, Any], function: _OfTensor) -> dict[str, Any]:
    """``function`` of every tensor, or of every one in a list."""
    return {name: tree_map(partial(function, name), item) for name, item in values.items()}


def _masters(trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """What the optimiser updates where that is not the parameter itself.

    Of a narrower parameter a copy in float32: an update is often smaller than what bfloat16 can add
    to it, and would be lost. Of a sharded one the rows that are here.
    """
    return {
        name: nn.Parameter(local(item).float() if item.dtype in HALF_TYPES else local(item))
        for name, item in trained.items()
        if item.dtype in HALF_TYPES or is_sharded(item)
    }


def _with_learning_rate(plan: Plan) -> Plan:
    """``plan`` with a learning rate where its workload lists one for every step."""
    listed = plan.workload.learning_rates if plan.workload else None
    if plan.optimizer.learning_rate is not None or not listed:
        return plan
    optimizer = plan.optimizer.model_copy(update={"learning_rate": listed[0]})
    return plan.model_copy(update={"optimizer": optimizer})


def _learning_rates(plan: Plan, settings: Settings, steps: int) -> Callable[[int], float]:
    """Those of the plan's workload where it lists them, else by the settings' schedule."""
    listed = plan.workload.learning_rates if plan.workload else None
    if listed and len(listed) >= steps:
        return lambda step: listed[step]
    # An optimiser without one was refused.
    rate = settings.learning_rate or plan.optimizer.learning_rate or 0.0
    return lambda step: rate * settings.learning_rate_factor(step, steps)


def _modules(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Every module by its path, with the numbers of its hooks."""
    return {
        path or "the model": (layer, *layer._forward_hooks, *layer._forward_pre_hooks,
                              *layer._backward_hooks, *layer._backward_pre_hooks)
        for path, layer in module.named_modules()
    }  # fmt: skip


def _updated_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(item) for group in optimizer.param_groups for item in group["params"]}


def require_trained(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Raise ``UnsupportedModel`` unless ``optimizer`` updates exactly what is released."""
    trained = {id(item): name for name, item in module.named_parameters() if item.requires_grad}
    updated = _updated_by(optimizer)
    if missing := [name for key, name in trained.items() if key not in updated]:
        raise UnsupportedModel(
            f"{', '.join(missing)}: trainable, but not in the optimiser. Give it all trainable "
            "tensors, or freeze these."
        )
    frozen = {id(item) for item in module.parameters()} - trained.keys()
    if len(updated - frozen - trained.keys()):
        raise UnsupportedModel(
            "the optimiser updates tensors outside the model, which would be trained without "
            "noise. Give it only the model's tensors."
        )
