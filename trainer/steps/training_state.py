"""The training state: everything that a run has in memory, built from the certified plan.

It consists of the hooked model, the lots, the noise of each phase, the optimiser, and the way to a
clipped sum. It identifies steps only by their number t = 0..T-1: row t of the noise, lot t, charge
t and key t always belong together. ``step`` takes a step. ``skip_step`` skips a step that was
charged and then lost in a crash, so that its lot and its row of the noise are never used again.

``state`` has everything that outlasts a step: the optimiser's state, the stored noise, and the
error state of DP-Dice. When a step is skipped, that error state restarts at zero, because it would
be released a second time otherwise. (From zero, the reach γ_k of k participations splits into
γ_a² + γ_b² ≤ γ_k², k = a + b, by γ_j² = c² + (ρ + γ_(j-1))².)

Reference: docs/theorems/dp-dice.md, Theorem 2 (γ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._pytree import tree_map

from affidavit.assessment import ClipAdaptation, StepRequirement
from affidavit.plan import Plan
from affidavit.trainer.adapters import (
    Batch,
    DataAdapter,
    ModelAdapter,
    digest_of_tensors,
    move_to_device,
    select_records,
)
from affidavit.trainer.clipping import frozen_statistics
from affidavit.trainer.clipping.private_model import PrivateModel
from affidavit.trainer.clipping.probe import PROBE_RECORDS, probe
from affidavit.trainer.distributed.peers import Peers
from affidavit.trainer.distributed.shards import (
    Shards,
    gather_full,
    is_sharded,
    local_part,
    local_tensor,
    to_dtensor,
)
from affidavit.trainer.errors import Diverged, NotCertified, RunFailure, UnsupportedModel
from affidavit.trainer.noise.chacha import Ratchet
from affidavit.trainer.noise.noise_statistics import NoiseTest
from affidavit.trainer.noise.source import NoiseSource, TensorNoise
from affidavit.trainer.norm_bounds import HALF_TYPES, all_finite, checksum
from affidavit.trainer.optimizers.disk import DiSK
from affidavit.trainer.optimizers.inputs import optimizer_inputs
from affidavit.trainer.optimizers.registry import optimizer_of
from affidavit.trainer.run_config import RunConfig
from affidavit.trainer.settings import Settings
from affidavit.trainer.steps.blocks import build_layout
from affidavit.trainer.steps.gradients import (
    ErrorFeedback,
    ErrorFeedbackGradient,
    KalmanGradient,
    Lot,
    PerExampleGradient,
)
from affidavit.trainer.steps.sampling import LotSampler
from affidavit.trainer.steps.untrained_tensors import UntrainedTensors

TensorMap = Callable[[str, Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Keys for a whole run: lots that outlast a step, and the probes of DP-MuonBC."""

    lots: bytes = field(repr=False)
    probes: bytes = field(repr=False)


class TrainingState:
    """A run in memory; it trains the adapter's model in place."""

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
        self._stored, self._stored_groups = dict[str, Any](), list[dict[str, Any]]()
        self.module = model.module.to(peers.device)
        frozen_statistics.freeze(self.module)
        self.module.train()
        self.layout = build_layout(config.execution, model)
        self.shards = Shards.of(self.module, self._trained, peers)
        if self.shards is not None:
            self.layout = replace(self.layout, boxes=self.shards.local_boxes)
        self._parallel = None if self.shards is None else self.shards.tensor_parallel
        self._place = (peers.rank, peers.size) if self.shards is None else self.shards.data
        plan, steps = _with_learning_rate(config.plan), config.execution.steps
        self._rates = _learning_rates(config.plan, settings, steps)
        self._is_own_loop = optimizer is not None
        if optimizer is not None:
            require_same_tensors(optimizer, self.module)
            self._rates = lambda _: float(optimizer.param_groups[0]["lr"])
        self._adaptation = _find_adaptation(config.plan)
        self.clip_counts: dict[str, float] | None = None
        self._records = 0
        self.private = PrivateModel(
            self.module, self.layout.specs(self._requirement(0)), tensor_parallel=self._parallel
        )
        if self._adaptation is not None:
            self.private.count_unclipped()
        if settings.compile:
            self.module.compile()
        self._masters = {} if optimizer is not None else _build_masters(self._trained)
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
        self._updated = _optimized_ids(self.optimizer)
        self._untrained = UntrainedTensors(self.module, self.optimizer)
        self._feedback: ErrorFeedback | None = None
        self._gradient = self._build_gradient(model, data)
        self._lots = [LotSampler(plan, index, keys.lots) for index in range(len(plan.phases))]
        self._noise = self._build_noise()
        self.noise_test = NoiseTest(
            {name: release for release, of in self.layout.tensors.items() for name in of},
            {
                name: local_tensor(item).numel()
                for name, item in self._trained.items()
                if self._parallel is None or self._parallel.contributes(name)
            },
            ranks=1 if self.shards is None else peers.size,
        )

    def _build_gradient(self, model: ModelAdapter, data: DataAdapter) -> PerExampleGradient:
        plan = self._config.plan
        arguments: dict[str, Any] = {
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
            return KalmanGradient(**arguments, optimizer=self.optimizer)
        if plan.optimizer.name == "dp_dice":
            self._feedback = self._new_error_feedback()
            return ErrorFeedbackGradient(
                **arguments, feedback=self._feedback, pre_clip_norm=plan.optimizer.pre_clip_norm
            )
        return PerExampleGradient(**arguments)

    def _new_error_feedback(self) -> ErrorFeedback:
        shapes = {name: item.shape for name, item in self._trained.items()}
        return ErrorFeedback.from_plan(self._config.plan, shapes, device=str(self._peers.device))

    def _build_noise(self) -> list[NoiseSource]:
        execution, result, first = self._config.execution, [], 0
        for steps, strategy, phase in zip(
            execution.lengths, self._config.strategies, execution.plan.phases, strict=True
        ):
            source = NoiseSource(
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

    def require_separate_records(
        self, model: ModelAdapter, collated: Callable[[Tensor], Batch] | None = None
    ) -> None:
        """Probe the model with made-up records; raises if it mixes records.

        ``collated`` makes a batch of only the made-up records with these numbers (n,).
        """
        made_up = move_to_device(model.made_up(PROBE_RECORDS), self._peers.device)

        def losses(batch: Batch) -> Tensor:
            with torch.autocast(
                self._peers.device.type,
                dtype=self._settings.autocast,
                enabled=self._settings.autocast is not None,
            ):
                return model.losses(move_to_device(batch, self._peers.device))

        probe(
            self.private,
            lambda rows: losses(select_records(made_up, rows)),
            isolated=None if collated is None else lambda rows: losses(collated(rows)),
            max_records=min(
                self._settings.microbatch, self._config.plan.dataset.size or PROBE_RECORDS
            ),
        )
        self._probed_modules = _list_modules(self.module)

    def require_unchanged_tensors(self) -> None:
        """Raise ``UnsupportedModel`` if tensors changed since they were recorded or accepted."""
        now = self._checksums()
        changed = [name for name, item in self._recorded.items() if now[name] != item]
        if changed := changed + self._untrained.find_changed():
            raise UnsupportedModel(
                f"{', '.join(changed)}: changed since the run's last step, and not by it, so "
                "they may contain values without noise. Train by run.loss and optimizer.step(), "
                "and restore weights that you swap for an evaluation. If they consist only of "
                "released or public values, call run.accept_weights().",
                code="changed_weights",
            )

    def record_tensors(self) -> None:
        """Note what a step changed, for ``require_unchanged_tensors``."""
        self._recorded = self._checksums()
        self._untrained.accept_state()

    def accept_tensors(self) -> None:
        """Note all tensors, also those that no step changes."""
        self.record_tensors()
        self._untrained.accept()

    def _checksums(self) -> dict[str, int]:
        sums = [checksum(local_tensor(item)) for item in self._trained.values()]
        return dict(zip(self._trained, torch.stack(sums).tolist(), strict=True))

    def require_unchanged_model(self) -> None:
        """Raise ``UnsupportedModel`` if tensors or modules changed since the run began."""
        now = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        changed = now.keys() ^ self._trained.keys()
        if self.shards is None:  # fully_shard has two parameters for one tensor
            changed |= {n for n in now.keys() - changed if now[n] is not self._trained[n]}
        if changed:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: made trainable, frozen, added or replaced after "
                "the run began; only tensors that were trainable then are clipped and noised. "
                "Change them before the run, and freeze what is not to be trained.",
                code="changed_model",
            )
        modules = _list_modules(self.module)
        if changed := {
            n
            for n in modules | self._probed_modules
            if modules.get(n) != self._probed_modules.get(n)
        }:
            raise UnsupportedModel(
                f"{', '.join(sorted(changed))}: added, replaced, removed or hooked after the run "
                "began; the probe for mixed records did not see the change. Change modules and "
                "their hooks before the run, and remove hooks after use.",
                code="changed_model",
            )
        if _optimized_ids(self.optimizer) != self._updated:
            raise UnsupportedModel(
                "the optimiser's tensors changed after the run began. Give it all tensors before.",
                code="changed_optimizer",
            )

    def public_parameters(self, step: int) -> dict[str, Any]:
        """Return the public parameters of ``step``."""
        required = self._apply_clip_norms(step)
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

    def _requirement(self, step: int) -> StepRequirement:
        """Return the requirement of ``step``, with the current clip norms if they are adapted."""
        required = self._config.execution.at(step)
        return required if self._adaptation is None else self._adaptation.at(required)

    def _apply_clip_norms(self, step: int) -> StepRequirement:
        required = self._requirement(step)
        specs = self.layout.specs(required)
        if specs != self.private.specs:
            self.private.set_clip_norms(specs)
        return required

    def step(self, step: int, ratchet: Ratchet, on_losses: Callable[[Tensor], None]) -> int:
        """Take ``step`` and return the number of records of its lot, which is private.

        ``on_losses`` receives the losses of its records, in parts of shape (m,). Raises
        ``Diverged`` if a parameter is not finite afterwards.
        """
        lot, records = self.draw(step, ratchet)
        self.begin_lot(step, lot)
        self.release(step, ratchet, self._gradient.clipped_sum(lot, on_losses))
        return records

    def draw(self, step: int, ratchet: Ratchet) -> tuple[Lot, int]:
        """Return this rank's part of the lot of ``step``, and the size of the whole lot."""
        required = self._requirement(step)
        lot = self._lots[required.phase].of(required.place, ratchet.key_for("lot"))
        rank, size = self._place
        local_lot = Lot(
            records=lot[rank::size],
            microbatch=self._settings.microbatch,
            dropout_key=ratchet.key_for(f"dropout of rank {rank}"),
            max_records=0 if self.shards is None else -(-len(lot) // size),
        )
        return local_lot, len(lot)

    def begin_lot(self, step: int, lot: Lot) -> None:
        """Begin the sums of ``step`` over ``lot``, this rank's part."""
        self._apply_clip_norms(step)
        self.private.take_unclipped_counts()
        self._records = len(lot.records)

    def batch(self, lot: Lot, place: int, records: Tensor) -> Any:
        """Return microbatch ``place`` of ``lot`` on the device, and seed its dropout.

        ``records`` are its numbers, shape (m,); an empty microbatch gets a made-up record.
        """
        batch = self._gradient.batch(records)
        lot.seed_dropout(place)  # not before, because reading may draw
        return batch

    def reduce(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add ``sums`` over all ranks, in place.

        Each has the shape of its parameter, or of its local part.
        """
        return self._gradient.reduce(sums)

    def release(self, step: int, ratchet: Ratchet, sums: dict[str, Tensor]) -> None:
        """Add the noise of ``step`` to ``sums``, once, and update with the noisy means.

        Each has the shape of its parameter. Raises ``Diverged``.
        """
        required, self._released_step = self._requirement(step), step
        noise_std = {name: item.scale for name, item in self.layout.noise(required).items()}
        before = self.noise_test.read(sums)
        self._noise_source(required).add_to(
            sums, ratchet.key_for("noise"), noise_std if self._adaptation else None
        )
        self.noise_test.observe(
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
            self._adaptation.update(self.clip_counts, required)

    def _noisy_counts(
        self, adaptation: ClipAdaptation, ratchet: Ratchet, *, exact: bool
    ) -> dict[str, float]:
        """Return the noisy sum of ±1/2 per record, by block: plus if it is within the clip norm."""
        unclipped = self.private.take_unclipped_counts()
        sums = torch.tensor(
            [unclipped[block] - self._records / 2 for block in adaptation.factors],
            device=self._peers.device,
        )
        if self._parallel is not None and self._parallel.rank:
            sums.zero_()  # the first of the ranks with the same records counts them
        self._peers.all_reduce({"counts": sums})
        noise = TensorNoise(shape=tuple(sums.shape), scale=adaptation.event.noise_std)
        key, device = ratchet.key_for("clipping counts"), str(self._peers.device)
        NoiseSource({"counts": noise}, device=device, exact=exact).add_to({"counts": sums}, key)
        return dict(zip(adaptation.factors, sums.tolist(), strict=True))

    def skip_step(self, step: int, ratchet: Ratchet) -> None:
        """Skip ``step``, which was charged and lost."""
        self._noise_source(self._config.execution.at(step)).skip_step(ratchet.key_for("noise"))
        if self._feedback is not None:
            self._feedback.load_private_state_dict(self._new_error_feedback().private_state_dict())

    def _noise_source(self, required: StepRequirement) -> NoiseSource:
        source = self._noise[required.phase]
        if source.step != required.place:
            raise RuntimeError("the noise and the run are at different steps")
        return source

    def _update(self, sums: dict[str, Tensor], required: StepRequirement, rate: float) -> None:
        divisor = float(Fraction(required.divisor))
        if self.shards is not None:  # all ranks must continue, or none
            self._require_finite(sums, "a mean is not finite")
        updated = {**self._trained, **self._masters}
        torch._foreach_div_([sums[name] for name in updated], divisor)
        for name, parameter in updated.items():
            mean = sums[name].to(parameter.dtype)
            parameter.grad = to_dtensor(mean, parameter) if is_sharded(parameter) else mean
        for name, master in self._masters.items():
            if master.dtype == self._trained[name].dtype:
                master.data = local_tensor(self._trained[name])  # fully_shard may have moved it
        if not self._is_own_loop:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        with self._watched_hooks(updated):
            try:
                type(self.optimizer).step(self.optimizer)
            except ValueError as error:
                raise Diverged("diverged", f"{error} The steps until here stay charged.") from None
        for parameter in updated.values():
            parameter.grad = None
        with torch.no_grad():
            for name, master in self._masters.items():
                if (narrow := local_tensor(self._trained[name])).dtype != master.dtype:
                    narrow.copy_(master)
        self._require_finite(self._trained, "a parameter is not finite after the update")

    @contextmanager
    def _watched_hooks(self, updated: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Check that the optimiser gets the tested means, and that only it changes ``updated``.

        Its own hooks run between its caller and its update, and may read raw data.
        """
        optimizer = self.optimizer
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # a framework's optimiser around it
        divisor = float(Fraction(self._config.execution.at(self._released_step).divisor))
        sums: dict[str, int] = {}

        def check(*_: Any) -> None:
            grads = {name: item.grad for name, item in updated.items()}
            means = {n: None if item is None else local_tensor(item) for n, item in grads.items()}
            self.noise_test.require_released(means, divisor)

        def note(*_: Any) -> None:
            if len(hooks) > 1 or _global_optimizer_post_hooks:
                sums.update(self._checksums())

        hooks: Any = optimizer._optimizer_step_post_hooks
        before = optimizer.register_step_pre_hook(check)
        after = optimizer.register_step_post_hook(note)
        hooks.move_to_end(after.id, last=False)
        try:
            yield
        finally:
            before.remove()
            after.remove()
        if (hooks or _global_optimizer_post_hooks) and (
            changed := [name for name, item in self._checksums().items() if sums[name] != item]
        ):
            raise UnsupportedModel(
                f"{', '.join(changed)}: changed by a hook of the optimiser after its step, so they "
                "may contain values without noise. Remove the hook; change weights after "
                "optimizer.step() by released or public values, and call run.accept_weights().",
                code="changed_weights",
            )

    def _require_finite(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Raise ``Diverged`` if tensors are not finite, on all ranks if each has its own rows."""
        finite = all_finite(local_tensor(item) for item in tensors.values())
        if not (finite if self.shards is None else all(self._peers.gather(finite))):
            raise Diverged(
                "diverged",
                f"{what}. Certify the plan with a smaller "
                "optimizer.learning_rate; the steps until here stay charged.",
            )

    def digest(self) -> str:
        """Return the digest of all trainable tensors, in the layout's order.

        All ranks must call it for sharded tensors, which are gathered one by one. Only the first
        rank of each replica gets the digest.
        """
        if self.shards is None or self.shards.compares_digest or self._peers.is_leader:
            return digest_of_tensors(gather_full(item) for item in self._trained.values())
        for item in self._trained.values():
            gather_full(item)
        return ""

    def weights(self) -> dict[str, Tensor]:
        """Return the module's full state on rank 0; all ranks must call it for sharded tensors.

        Each has its own shape.
        """
        result = {}
        for name, item in self.module.state_dict().items():
            full = gather_full(item)
            if self._peers.is_leader:
                result[name] = full.cpu() if is_sharded(item) else item
        return result

    def noise_entry(self) -> dict[str, Any]:
        """Return the result of the noise test, over all ranks that test their own noise."""
        if self.shards is None:
            return self.noise_test.as_entry()
        entries = 0 if self.shards.replica else self.noise_test.entries  # equal on all replicas
        return self.noise_test.as_entry(self._peers.gather(entries))

    def replicated_state(self) -> dict[str, Tensor]:
        """Return the module's state without sharded tensors, each tensor in its shape."""
        state = self.module.state_dict()
        return {name: item for name, item in state.items() if not is_sharded(item)}

    def load_replicated_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy what ``replicated_state`` returned on another rank, each tensor in its shape."""
        with torch.no_grad():
            for name, item in self.replicated_state().items():
                item.copy_(state[name])

    def state(self) -> dict[str, Any]:
        """Return everything that outlasts a step, which is as secret as the data.

        Sharded tensors are ``DTensor``s.
        """
        noise = [
            {**stored, "kept": _map_tensors(stored["kept"], self._to_dtensor)}
            for stored in (source.state_dict() for source in self._noise)
        ]
        masters = {
            name: item.detach()
            for name, item in self._masters.items()
            if item.dtype != self._trained[name].dtype
        }
        return {
            "module": self.module.state_dict(),
            "masters": _map_tensors(masters, self._to_dtensor),
            "optimizer": self._map_optimizer_state(self.optimizer.state_dict(), self._to_dtensor),
            "noise": noise,
            "error": {} if self._feedback is None else self._feedback.private_state_dict(),
            "clip_factors": dict(self._adaptation.factors) if self._adaptation else {},
            "extra": {name: item.state_dict() for name, item in self.extra.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore ``state``; raises ``ValueError`` or ``RuntimeError`` for another run's state."""
        if self.shards is None:
            self.module.load_state_dict(state["module"])
        with torch.no_grad():
            if self.shards is not None:
                for name, item in self.module.state_dict().items():
                    local_tensor(item).copy_(local_part(state["module"][name], item))
            for name, master in self._masters.items():
                master.copy_(
                    self._to_local(name, state["masters"].get(name, state["module"][name]))
                )
        self._require_same_optimizer(state["optimizer"])
        self.optimizer.load_state_dict(
            self._map_optimizer_state(state["optimizer"], self._to_optimizer_form)
        )
        for source, stored in zip(self._noise, state["noise"], strict=True):
            source.load_state_dict({**stored, "kept": _map_tensors(stored["kept"], self._to_local)})
        if self._feedback is not None:
            self._feedback.load_private_state_dict(state["error"])
        if self._adaptation is not None:
            self._adaptation.factors = dict(state["clip_factors"])
        self._stored = state.get("extra", {})
        self._stored_groups = state["optimizer"]["param_groups"]

    def _require_same_optimizer(self, state: dict[str, Any]) -> None:
        """Raise ``RunFailure`` if ``state`` belongs to other groups or settings."""
        stored, current = state["param_groups"], self.optimizer.state_dict()["param_groups"]
        same = len(stored) == len(current) and all(
            len(old["params"]) == len(new["params"]) and _setting_names(new) <= old.keys()
            for old, new in zip(stored, current, strict=True)
        )
        if not same:
            raise RunFailure(
                "other_run",
                f"the run was begun with another optimiser than {type(self.optimizer).__name__} "
                "with these groups. Use the one that the run started with.",
            )

    def _to_dtensor(self, name: str, item: Any) -> Any:
        """Return the local rows of ``name`` as a ``DTensor``."""
        like = self._trained[name]
        sharded = is_sharded(like) and isinstance(item, Tensor) and not is_sharded(item)
        return (
            to_dtensor(item, like) if sharded and item.shape == local_tensor(like).shape else item
        )

    def _to_local(self, name: str, item: Any) -> Any:
        """Return the local rows of all rows of ``name``, or the item if it is local already."""
        return local_part(item, self._trained[name]) if isinstance(item, Tensor) else item

    def _to_optimizer_form(self, name: str, item: Any) -> Any:
        """Return the item in the form of the tensor that the optimiser updates."""
        item = self._to_local(name, item)
        return self._to_dtensor(name, item) if self._is_own_loop else item

    def _map_optimizer_state(self, state: dict[str, Any], function: TensorMap) -> dict[str, Any]:
        """Apply ``function`` to each tensor in the optimiser's ``state``."""
        if self.shards is None:
            return state
        updated = {**self._trained, **self._masters}
        names = {id(item): name for name, item in updated.items()}
        numbered = [item for group in self.optimizer.param_groups for item in group["params"]]
        tensors = {
            number: tree_map(partial(function, names[id(numbered[number])]), values)
            for number, values in state["state"].items()
        }
        return {**state, "state": tensors}

    def keep(self, name: str, item: Any) -> None:
        """Save ``item`` in checkpoints, and restore its saved state if there is one.

        A scheduler has set the optimiser's learning rates to its first ones when it was made, so
        those of the checkpoint are restored too.
        """
        self.extra[name] = item
        if name in self._stored:
            item.load_state_dict(self._stored[name])
            for group, stored in zip(self.optimizer.param_groups, self._stored_groups, strict=True):
                group.update({key: value for key, value in stored.items() if key != "params"})

    def close(self) -> None:
        """Restore the model's own layers."""
        self.private.detach()
        frozen_statistics.unfreeze(self.module)


def _find_adaptation(plan: Plan) -> ClipAdaptation | None:
    """Return the plan's adaptation of clip norms.

    Raises ``NotCertified`` if the plan does not define which count steers which norm.
    """
    try:
        return ClipAdaptation.of(plan)
    except ValueError as error:
        raise NotCertified("unsupported", f"/extra: {error}, and certify the plan again.") from None


def _setting_names(group: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings, without switches, which depend on PyTorch's version."""
    return {key for key, value in group.items() if not isinstance(value, bool | None)}


def _map_tensors(values: Mapping[str, Any], function: TensorMap) -> dict[str, Any]:
    """Apply ``function`` to each tensor, also in lists."""
    return {name: tree_map(partial(function, name), item) for name, item in values.items()}


def _build_masters(trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the tensors that the optimiser updates instead of the parameters.

    A bfloat16 parameter has a copy in float32, because updates are often too small to change it in
    bfloat16. A sharded parameter has its local rows.
    """
    return {
        name: nn.Parameter(
            local_tensor(item).float() if item.dtype in HALF_TYPES else local_tensor(item)
        )
        for name, item in trained.items()
        if item.dtype in HALF_TYPES or is_sharded(item)
    }


def _with_learning_rate(plan: Plan) -> Plan:
    """Return ``plan`` with a learning rate if its workload lists one for each step."""
    listed = plan.workload.learning_rates if plan.workload else None
    if plan.optimizer.learning_rate is not None or not listed:
        return plan
    optimizer = plan.optimizer.model_copy(update={"learning_rate": listed[0]})
    return plan.model_copy(update={"optimizer": optimizer})


def _learning_rates(plan: Plan, settings: Settings, steps: int) -> Callable[[int], float]:
    """Return the learning rates of the plan's workload, or else of the settings' schedule."""
    listed = plan.workload.learning_rates if plan.workload else None
    if listed and len(listed) >= steps:
        return lambda step: listed[step]
    # A plan without a learning rate was refused.
    rate = settings.learning_rate or plan.optimizer.learning_rate or 0.0
    return lambda step: rate * settings.learning_rate_factor(step, steps)


def _list_modules(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return each module by its path, with the numbers of its hooks."""
    return {
        path or "the model": (layer, *layer._forward_hooks, *layer._forward_pre_hooks,
                              *layer._backward_hooks, *layer._backward_pre_hooks)
        for path, layer in module.named_modules()
    }  # fmt: skip


def _optimized_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(item) for group in optimizer.param_groups for item in group["params"]}


def require_same_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Raise ``UnsupportedModel`` unless ``optimizer`` updates exactly the released tensors."""
    trained = {id(item): name for name, item in module.named_parameters() if item.requires_grad}
    updated = _optimized_ids(optimizer)
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
