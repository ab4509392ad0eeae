"""``guard.opacus``: enforce a certificate in a run of Opacus.

    model, optimizer, data_loader = privacy_engine.make_private(...)
    run = guard.opacus(privacy_engine, optimizer, data_loader, "bundle.json")

Before the loop starts, sampler, q, B, clip norm, noise, blocks and the model's trainable tensors
are compared with the certificate (``opacus_checks``). At every real step, before
any parameter changes, the guard compares the numbers again, because schedulers change them;
charges the step on disk; draws the noise, and tests that of each tensor (``noise_statistics``). No
optimiser of the process may update a tensor of the model that got no noise in this step. After
the last certified step the record ends, and a further step is stopped. Virtual steps
(``BatchMemoryManager``) are no releases and do not count.

With ``generator="chacha20"`` the guard draws lots and noise itself, as the certificate requires;
the noise of Opacus is tested in the first two releases and then not drawn. With ``"opacus"``
Opacus' generators are kept and recorded, so that conformance reports ``statistical_generator``.

Opacus' optimiser knows its own parameters but not their model. If the model's other parameters
are in a second, plain optimiser (matrices under Muon, biases under AdamW), they are released
without noise, and Opacus does not notice. The guard therefore finds the modules of this process
that hold a parameter of the optimiser, and covers all of their parameters.

Equal states of PyTorch's generator produce equal noise, so the guard compares states. Its own
noise is drawn in float64 from a new ChaCha20 stream for each release, and added to the clipped
sums like Opacus' own.

Tested with Opacus 1.6.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from types import MethodType
from typing import Any, Literal

from affidavit.certificate import StepRequirement, VerificationOptions, std_of
from affidavit.gate.guard import opacus_checks as checks
from affidavit.gate.guard.errors import GuardStop, StopState
from affidavit.gate.guard.noise_statistics import NoiseTest, digest_of_arrays, noise_in
from affidavit.gate.guard.obligations import (
    Certificate,
    CertifiedRun,
    Keys,
    assign_tensors,
    certified_run,
    require_certified_parameters,
    tensor_entries,
)
from affidavit.gate.guard.record import RunRecord
from affidavit.gate.guard.sampler import Stream, commitment_to, gradient_rows, guard_sampler
from affidavit.plan import Plan

WRAPPED = "_module."
"""Prefix of parameter names in Opacus' GradSampleModule."""

GHOST = "GradSampleModuleFastGradientClipping"


class TrainedModel:
    """The models that hold ``parameters``; only ``module``, if one is given."""

    def __init__(self, parameters: Iterable[Any], module: Any | None) -> None:
        self._own = list(parameters)
        own = {id(parameter) for parameter in self._own}
        self._roots = [
            root
            for root in (_roots() if module is None else [module])
            if any(id(parameter) in own for parameter in root.parameters())
        ]

    def tensors(self) -> dict[int, tuple[str, Any]]:
        """The current name and tensor of every parameter, by identity."""
        tensors: dict[int, tuple[str, Any]] = {}
        for root in self._roots:
            for name, tensor in root.named_parameters():
                tensors.setdefault(id(tensor), (name.removeprefix(WRAPPED), tensor))
        for index, tensor in enumerate(self._own):
            tensors.setdefault(id(tensor), (f"parameter {index}", tensor))
        return tensors

    def clip_norms(self) -> list[float]:
        """The clip norms of ghost clipping, which are in modules instead of the optimiser."""
        return [
            float(module.max_grad_norm)
            for root in self._roots
            for module in root.modules()
            if any(kind.__name__ == GHOST for kind in type(module).__mro__)
        ]


def _roots() -> list[Any]:
    """Top-level modules of this process, largest first."""
    kind = sys.modules["torch"].nn.Module
    modules = [value for value in gc.get_objects() if issubclass(type(value), kind)]
    inner = {
        id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()
    }
    roots = [module for module in modules if id(module) not in inner]
    return sorted(roots, key=lambda module: -sum(1 for _ in module.modules()))


def require_all_noised(model: TrainedModel, parameters: Iterable[Any]) -> None:
    """Raise ``GuardStop`` unless every trainable tensor is in the private optimiser."""
    noised = {id(parameter) for parameter in parameters}
    plain = [
        name
        for key, (name, item) in model.tensors().items()
        if item.requires_grad and key not in noised
    ]
    if plain:
        some = ", ".join(plain[:4]) + (f" and {len(plain) - 4} more" if len(plain) > 4 else "")
        raise GuardStop(
            "tensor_not_noised",
            f"{some}: trainable but not in the private optimizer, so they get no noise.",
            "Give make_private one optimizer over all trainable parameters, or freeze these "
            "(requires_grad_(False)); pass module= if these belong to another model.",
        )


def add_noise(
    stream: Stream, std: float, names: Sequence[str], tensors: Sequence[Any], *, replacing: bool
) -> None:
    """Set each tensor's ``grad`` to its clipped sum plus noise of ``std``.

    With ``replacing`` Opacus has already added its own noise and marked the sums as used.

    Raises ``GuardStop`` for a sum that is missing, stale or not finite.
    """
    torch = sys.modules["torch"]
    for name, item in zip(names, tensors, strict=True):
        total = item.summed_grad
        if total is None or (hasattr(total, "_processed") and not replacing):
            raise GuardStop(
                "accumulation",
                f"{name} has no new sum for this release.",
                "Call optimizer.zero_grad() after each step, and train every tensor.",
            )
        if not bool(total.isfinite().all()):
            raise GuardStop(
                "non_finite",
                f"the sum of {name} is not finite, which reveals a record.",
                "Let records whose gradient is not finite contribute zero.",
            )
        noise = torch.from_numpy(std * stream.normal(total.numel())).to(total)
        item.grad = (total + noise.view_as(total)).view_as(item)
        total._processed = True


def state_of(optimizer: Any, tensor: Any) -> bytes:
    """The state of Opacus' noise generator."""
    torch, source = sys.modules["torch"], optimizer.generator
    if source is not None:
        state = source.get_state()
    elif tensor.device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = getattr(torch, tensor.device.type).get_rng_state(tensor.device)
    return bytes(state.cpu().numpy().tobytes())


Generator = Literal["chacha20", "opacus"]
TESTED_RELEASES = 2
"""Releases in which Opacus' own noise is drawn and tested, although it is replaced."""


def opacus(
    privacy_engine: Any,
    optimizer: Any,
    data_loader: Any,
    certificate: Certificate,
    *,
    keys: Keys = None,
    plan: str | Path | Plan | None = None,
    record: str | Path = "run",
    blocks: dict[str, list[str]] | None = None,
    module: Any = None,
    generator: Generator = "chacha20",
    options: VerificationOptions | None = None,
    now: datetime | None = None,
) -> OpacusRun:
    """Guard the result of ``make_private``; raises ``GuardStop`` if it violates the certificate.

    ``keys`` are the issuer's public keys, by default your own key directory. ``blocks`` maps
    releases to tensor names, if the plan has several releases. ``module`` is the model; by
    default the guard finds it.
    """
    stop_state = StopState()
    with stop_state.guarded():
        if generator not in ("chacha20", "opacus"):
            raise GuardStop("bad_argument", f"generator is {generator!r}.", 'Say "chacha20".')
        certified = certified_run(certificate, plan=plan, keys=keys, options=options, now=now)
        checks.require_optimizer(certified, privacy_engine, optimizer)
        sampler = checks.poisson_sampler(certified, data_loader)
        notes = checks.align(certified, optimizer, sampler)
        run = OpacusRun(certified, optimizer, stop_state, notes, module, blocks, secure=generator)
        run.begin(Path(record), sampler)
        return run


class OpacusRun:
    """A guarded run; ``notes`` list values that were set to the certified ones.

    The guard is active for the lifetime of the optimiser; there is nothing to call.
    """

    def __init__(
        self,
        certified: CertifiedRun,
        optimizer: Any,
        stop_state: StopState,
        notes: tuple[str, ...],
        module: Any,
        blocks: dict[str, list[str]] | None,
        *,
        secure: Generator,
    ) -> None:
        self.certified, self.notes = certified, notes
        self._optimizer, self._stop_state, self._secure = (
            optimizer,
            stop_state,
            secure == "chacha20",
        )
        self._noise_test = NoiseTest()
        self._parameters = list(optimizer.params)
        self._model = TrainedModel(self._parameters, module)
        require_all_noised(self._model, self._parameters)
        tensors = self._model.tensors()
        self._names = [tensors[id(parameter)][0] for parameter in self._parameters]
        self._tensors = assign_tensors(certified, blocks or self._one_release())
        if missing := set(self._names) ^ self._tensors.keys():
            raise GuardStop(
                "other_blocks",
                f"{', '.join(sorted(missing))}: not in exactly one of the blocks and the model.",
                "Name every trainable tensor of the model in blocks=.",
            )
        self._require_public(certified.execution.at(0))
        self._noised: set[int] = set()
        self._states: set[bytes] = set()
        self._rows = 0

    @property
    def steps_left(self) -> int:
        """Number of releases that the certificate still allows."""
        return self.certified.execution.steps - self._record.charged

    def begin(self, folder: Path, sampler: Any) -> None:
        """Write the header and wrap the optimiser."""
        optimizer, stream = self._optimizer, Stream() if self._secure else None
        drawn_from = "chacha20" if self._secure else "torch"
        self._record = RunRecord(folder)
        shapes = {
            name: list(item.shape) for name, item in zip(self._names, self._parameters, strict=True)
        }
        self._record.begin(
            self.certified,
            loop=f"opacus {getattr(sys.modules.get('opacus'), '__version__', 'unknown')}",
            generator={"sampling": drawn_from, "noise": drawn_from},
            tensors=tensor_entries(self.certified, shapes, self._tensors),
            parameters=self._digest(),
        )
        if not self._secure:
            note = f"lots and noise come from {drawn_from}, which is not cryptographic."
            self.notes = (*self.notes, note)
            warnings.warn(note, stacklevel=4)
        self._lots = guard_sampler(sampler, self.certified.probability, stream)
        self._step, self._add_noise = optimizer.step, optimizer.add_noise
        optimizer.step, optimizer.add_noise = self._method_for_step(), self._guarded_noise
        guard = weakref.ref(self)

        def before_update(stepping: Any, *_: Any) -> None:
            if (alive := guard()) is not None:
                alive._before_update(stepping)

        hooks = sys.modules["torch.optim.optimizer"]
        self._hook = hooks.register_optimizer_step_pre_hook(before_update)
        weakref.finalize(self, self._hook.remove)

    def _method_for_step(self) -> MethodType:
        """A method of the optimiser, because learning-rate schedulers rebind its function."""

        def step(_optimizer: Any, closure: Callable[[], float] | None = None) -> Any:
            return self._guarded_step(closure)

        step.__dict__.update(getattr(self._step, "__dict__", {}))
        return MethodType(step, self._optimizer)

    def _one_release(self) -> dict[str, list[str]]:
        releases = self.certified.phase.releases
        if len(releases) > 1:
            raise GuardStop(
                "other_blocks",
                "the plan has several releases, but blocks= is missing.",
                "Give blocks={release: [tensor names]}.",
            )
        return {releases[0].name: self._names}

    def _guarded_step(self, closure: Callable[[], float] | None = None) -> Any:
        """Replacement of ``optimizer.step``: a release or a virtual step."""
        with self._stop_state.guarded():
            self._rows += gradient_rows(self._parameters[0])
            charged = self._record.charged
        try:
            result = self._step(closure)
        except GuardStop:
            raise
        except BaseException:
            if self._record.charged > charged:
                self._stop_state.reason = GuardStop(
                    "step_lost",
                    f"step {charged + 1} was charged but did not finish.",
                    "Start a new run with a new certificate; this one stays charged.",
                )
            raise
        with self._stop_state.guarded():
            if not self._optimizer._is_last_step_skipped:
                self._released(charged)
        return result

    def _released(self, charged: int) -> None:
        if self._record.charged != charged + 1:
            raise GuardStop(
                "tensor_not_noised",
                "the optimizer took a step without noise.",
                "Do not replace add_noise, step or pre_step of the private optimizer.",
            )
        self._noised, self._rows = set(), 0
        self._lots.popleft()
        whole = self.steps_left == 0
        digest = self._digest() if whole else None
        self._record.release(digest)
        if whole:
            self._record.end(digest)
            self._hook.remove()

    def _guarded_noise(self) -> None:
        """Replacement of ``optimizer.add_noise``: charge the release, add noise, test it."""
        optimizer = self._optimizer
        with self._stop_state.guarded():
            self._require_lot()
            self._require_same_tensors()
            step = self._record.charged
            required = self.certified.at(step)
            clips, stds = self._require_public(required)
            theirs = not self._secure or step < TESTED_RELEASES
            state = self._require_fresh_state() if theirs else ""
            ours = Stream() if self._secure else None
            commitment = state if ours is None else ours.commitment
            self._record.charge(
                self.certified, required, clip_norm=clips, noise_std=stds, commitment=commitment
            )
            if theirs:
                self._add_noise()
                self._test_noise()
            if ours is not None:
                std = std_of(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))
                add_noise(ours, std, self._names, self._parameters, replacing=theirs)
            self._noised = {id(parameter) for parameter in self._parameters}

    def _require_lot(self) -> None:
        if not self._lots:
            raise GuardStop(
                "other_loader",
                "a step uses records that the guarded loader did not draw.",
                "Train with the guarded data loader that make_private returned.",
            )
        gathered = self._optimizer.accumulated_iterations != 1
        if gathered or self._rows > max(self._lots):
            raise GuardStop(
                "accumulation",
                "a release combines several lots, or several gradients of a record.",
                "Take one step per lot (BatchMemoryManager splits large ones), with one gradient "
                "per record.",
            )

    def _require_same_tensors(self) -> None:
        if [id(param) for param in self._optimizer.params] != [
            id(parameter) for parameter in self._parameters
        ]:
            raise GuardStop(
                "other_blocks",
                "the optimizer's parameters changed after the run started.",
                "Freeze and add parameters before the run starts.",
            )
        require_all_noised(self._model, self._parameters)

    def _require_public(
        self, required: StepRequirement
    ) -> tuple[dict[str, float], dict[str, float]]:
        optimizer = self._optimizer
        clips = checks.clip_norms(optimizer, self._tensors, self._names)
        for norm in self._model.clip_norms():
            clips = {release: max(norm, other) for release, other in clips.items()}
        std = std_of(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))
        stds = dict.fromkeys(clips, std)
        divisor = optimizer.expected_batch_size
        require_certified_parameters(required, clip_norm=clips, noise_std=stds, divisor=divisor)
        return clips, stds

    def _require_fresh_state(self) -> str:
        """A digest of the noise generator's state; the same state draws the same noise."""
        state = state_of(self._optimizer, self._parameters[0])
        digest = hashlib.sha256(state).digest()
        if digest in self._states:
            raise GuardStop(
                "noise_repeated",
                "the noise generator has an earlier state: this release would repeat the noise of "
                "an earlier one, and their difference reveals the data.",
                "Do not seed a generator twice.",
            )
        self._states.add(digest)
        return commitment_to(digest)

    def _test_noise(self) -> None:
        std = float(self._optimizer.noise_multiplier) * float(self._optimizer.max_grad_norm)
        self._noise_test.see(
            {
                name: (noise_in(item.grad, item.summed_grad), std)
                for name, item in zip(self._names, self._parameters, strict=True)
            }
        )

    def _before_update(self, stepping: Any) -> None:
        """Stop any optimiser that would update a tensor of the model without noise."""
        tensors = [tensor for group in stepping.param_groups for tensor in group["params"]]
        model = self._model.tensors()
        ours = [tensor for tensor in tensors if id(tensor) in model and tensor.grad is not None]
        if not ours:
            return
        with self._stop_state.guarded():
            for our in ours:
                if id(our) not in self._noised:
                    raise GuardStop(
                        "tensor_not_noised",
                        f"{type(stepping).__name__} would update {model[id(our)][0]} "
                        "without noise.",
                        "Update the model only with the private optimizer.",
                    )

    def _digest(self) -> str:
        return digest_of_arrays(dict(zip(self._names, self._parameters, strict=True)))
