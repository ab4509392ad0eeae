"""``guard.opacus``: enforce a certificate in a run of Opacus.

    model, optimizer, data_loader = privacy_engine.make_private(...)
    run = guard.opacus(privacy_engine, optimizer, data_loader, "bundle.json")

Before the loop starts, the sampler, q, B, clip norm, noise, blocks and the model's trainable
tensors are compared with the certificate (``opacus_checks``). At every real step, before any
parameter changes, the guard compares the numbers again, because schedulers change them, charges the
step on disk, draws the noise, and tests the noise of each tensor (``noise_statistics``). No
optimiser of the process may update a tensor of the model that got no noise in this step. After the
last certified step the record ends, and a further step is stopped. Virtual steps
(``BatchMemoryManager``) are not releases and do not count.

With ``generator="chacha20"`` the guard draws lots and noise itself, as the certificate requires.
The noise of Opacus is tested in the first two releases, and not drawn later. With ``"opacus"``,
Opacus' generators are used and recorded, so that conformance reports ``statistical_generator``.

Opacus' optimiser does not know the model of its parameters. If other parameters of the model are in
a second, plain optimiser (matrices under Muon, biases under AdamW), they are released without
noise, and Opacus does not notice. The guard therefore finds the modules of this process with a
parameter of the optimiser, and checks all of their parameters.

Equal states of PyTorch's generator produce equal noise, so the guard compares states. Its own noise
comes from a new ChaCha20 stream for each release, in float64, and is added to the clipped sums.

Tested with Opacus 1.6.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Literal

from affidavit.assessment import StepRequirement, std_of
from affidavit.certificate import VerificationOptions
from affidavit.guard import opacus_checks as checks
from affidavit.guard.certified_run import (
    Certificate,
    CertifiedRun,
    assign_tensors,
    load_certified_run,
    require_certified_parameters,
    tensor_entries,
)
from affidavit.guard.errors import GuardStop, StopState
from affidavit.guard.noise_statistics import (
    NoiseTest,
    digest_of_arrays,
    measure_noise,
)
from affidavit.guard.record import RunRecord
from affidavit.guard.sampler import (
    KeyStream,
    compute_commitment,
    count_gradients,
    guard_sampler,
)
from affidavit.plan import Plan
from affidavit.trust import TrustedKeys

MODULE_PREFIX = "_module."
"""Prefix of parameter names in Opacus' GradSampleModule."""

GHOST_CLIPPING_MODULE = "GradSampleModuleFastGradientClipping"


class TrainedModel:
    """The modules that hold ``parameters``, or only ``module``."""

    def __init__(self, parameters: Iterable[Any], module: Any | None) -> None:
        self._parameters = list(parameters)
        ids = {id(parameter) for parameter in self._parameters}
        self._roots = [
            root
            for root in (_top_level_modules() if module is None else [module])
            if any(id(parameter) in ids for parameter in root.parameters())
        ]

    def tensors(self) -> dict[int, tuple[str, Any]]:
        """Return the current name and tensor of every parameter, by ``id``."""
        tensors: dict[int, tuple[str, Any]] = {}
        for root in self._roots:
            for name, tensor in root.named_parameters():
                tensors.setdefault(id(tensor), (name.removeprefix(MODULE_PREFIX), tensor))
        for index, tensor in enumerate(self._parameters):
            tensors.setdefault(id(tensor), (f"parameter {index}", tensor))
        return tensors

    def clip_norms(self) -> list[float]:
        """Return the clip norms of ghost clipping, which are attributes of modules."""
        return [
            float(module.max_grad_norm)
            for root in self._roots
            for module in root.modules()
            if any(kind.__name__ == GHOST_CLIPPING_MODULE for kind in type(module).__mro__)
        ]


def _top_level_modules() -> list[Any]:
    """Return the top-level modules of this process, largest first."""
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
    unnoised = [
        name
        for key, (name, item) in model.tensors().items()
        if item.requires_grad and key not in noised
    ]
    if unnoised:
        more = f" and {len(unnoised) - 4} more" if len(unnoised) > 4 else ""
        raise GuardStop(
            "tensor_not_noised",
            f"{', '.join(unnoised[:4])}{more}: trainable but not in the private optimizer, so "
            "they get no noise.",
            "Give make_private one optimizer over all trainable parameters, or freeze these "
            "(requires_grad_(False)); pass module= if these belong to another model.",
        )


def add_noise(
    stream: KeyStream, std: float, names: Sequence[str], tensors: Sequence[Any], *, replacing: bool
) -> None:
    """Set each tensor's ``grad`` to its clipped sum plus noise of ``std``.

    With ``replacing``, Opacus has already added its noise and marked the sums as used.

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


def generator_state(optimizer: Any, tensor: Any) -> bytes:
    """Return the state of Opacus' noise generator."""
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
"""Releases in which the noise of Opacus is drawn and tested before it is replaced."""


def opacus(
    privacy_engine: Any,
    optimizer: Any,
    data_loader: Any,
    certificate: Certificate,
    *,
    trusted: TrustedKeys | None = None,
    plan: str | Path | Plan | None = None,
    record: str | Path = "run",
    blocks: dict[str, list[str]] | None = None,
    module: Any = None,
    generator: Generator = "chacha20",
    options: VerificationOptions | None = None,
) -> OpacusRun:
    """Guard the result of ``make_private``; raises ``GuardStop`` if it violates the certificate.

    ``trusted`` are the issuer's keys and their policy (``affidavit.keys.trusted``), by default
    your own keys. ``blocks`` maps releases to tensor names, if the plan has several releases.
    ``module`` is the model; by default the guard finds it.
    """
    stop_state = StopState()
    with stop_state.guarded():
        if generator not in ("chacha20", "opacus"):
            raise GuardStop("bad_argument", f"generator is {generator!r}.", 'Say "chacha20".')
        certified = load_certified_run(certificate, plan=plan, trusted=trusted, options=options)
        checks.require_optimizer(certified, privacy_engine, optimizer)
        sampler = checks.poisson_sampler(certified, data_loader)
        notes = checks.align_sampling(certified, privacy_engine, optimizer, sampler)
        run = OpacusRun(
            certified, optimizer, stop_state, notes, module, blocks, generator=generator
        )
        run.begin(Path(record), sampler)
        return run


class OpacusRun:
    """A guarded run; ``notes`` lists the values that were set to the certified ones.

    The guard is active for the lifetime of the optimiser, without further calls.
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
        generator: Generator,
    ) -> None:
        self.certified, self.notes = certified, notes
        self._optimizer, self._stop_state = optimizer, stop_state
        self._secure = generator == "chacha20"
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
        self._require_certified(certified.execution.at(0))
        self._noised: set[int] = set()
        self._states: set[bytes] = set()
        self._rows = 0

    @property
    def steps_left(self) -> int:
        """Number of releases that the certificate still allows."""
        return self.certified.execution.steps - self._record.charged

    def begin(self, folder: Path, sampler: Any) -> None:
        """Write the header and wrap the optimiser."""
        optimizer, stream = self._optimizer, KeyStream() if self._secure else None
        source = "chacha20" if self._secure else "torch"
        self._record = RunRecord(folder)
        shapes = {
            name: list(item.shape) for name, item in zip(self._names, self._parameters, strict=True)
        }
        self._record.begin(
            self.certified,
            loop=f"opacus {getattr(sys.modules.get('opacus'), '__version__', 'unknown')}",
            generator={"sampling": source, "noise": source},
            tensors=tensor_entries(self.certified, shapes, self._tensors),
            parameters=self._digest(),
        )
        if not self._secure:
            note = f"lots and noise come from {source}, which is not cryptographic."
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
        """Return a bound method, because learning-rate schedulers rebind its function."""

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
        """Replace ``optimizer.step``: take a release or a virtual step."""
        with self._stop_state.guarded():
            self._rows += count_gradients(self._parameters[0])
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
                self._record_release(charged)
        return result

    def _record_release(self, charged: int) -> None:
        if self._record.charged != charged + 1:
            raise GuardStop(
                "tensor_not_noised",
                "the optimizer took a step without noise.",
                "Do not replace add_noise, step or pre_step of the private optimizer.",
            )
        self._noised, self._rows = set(), 0
        self._lots.popleft()
        complete = self.steps_left == 0
        digest = self._digest() if complete else None
        self._record.release(digest)
        if complete:
            self._record.end(digest)
            self._hook.remove()

    def _guarded_noise(self) -> None:
        """Replace ``optimizer.add_noise``: charge the release, add the noise, and test it."""
        optimizer = self._optimizer
        with self._stop_state.guarded():
            self._require_lot()
            self._require_same_tensors()
            step = self._record.charged
            required = self.certified.at(step)
            clips, stds = self._require_certified(required)
            opacus_draws = not self._secure or step < TESTED_RELEASES
            state = self._require_fresh_state() if opacus_draws else ""
            stream = KeyStream() if self._secure else None
            commitment = state if stream is None else stream.commitment
            self._record.charge(
                self.certified, required, clip_norm=clips, noise_std=stds, commitment=commitment
            )
            if opacus_draws:
                self._add_noise()
                self._test_noise()
            if stream is not None:
                std = std_of(float(optimizer.noise_multiplier), float(optimizer.max_grad_norm))
                add_noise(stream, std, self._names, self._parameters, replacing=opacus_draws)
            self._noised = {id(parameter) for parameter in self._parameters}

    def _require_lot(self) -> None:
        if not self._lots:
            raise GuardStop(
                "other_loader",
                "a step uses records that the guarded loader did not draw.",
                "Train with the guarded data loader that make_private returned.",
            )
        accumulated = self._optimizer.accumulated_iterations != 1
        if accumulated or self._rows > max(self._lots):
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

    def _require_certified(
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
        """Return a commitment to the generator's state; raises ``GuardStop`` if it is not new."""
        state = generator_state(self._optimizer, self._parameters[0])
        digest = hashlib.sha256(state).digest()
        if digest in self._states:
            raise GuardStop(
                "noise_repeated",
                "the noise generator has an earlier state: this release would repeat the noise of "
                "an earlier one, and their difference reveals the data.",
                "Do not seed a generator twice.",
            )
        self._states.add(digest)
        return compute_commitment(digest)

    def _test_noise(self) -> None:
        std = float(self._optimizer.noise_multiplier) * float(self._optimizer.max_grad_norm)
        self._noise_test.check(
            {
                name: (measure_noise(item.grad, item.summed_grad), std)
                for name, item in zip(self._names, self._parameters, strict=True)
            }
        )

    def _before_update(self, stepping: Any) -> None:
        """Stop any optimiser that would update a tensor of the model without noise."""
        tensors = [tensor for group in stepping.param_groups for tensor in group["params"]]
        model = self._model.tensors()
        updated = [tensor for tensor in tensors if id(tensor) in model and tensor.grad is not None]
        if not updated:
            return
        with self._stop_state.guarded():
            for tensor in updated:
                if id(tensor) not in self._noised:
                    raise GuardStop(
                        "tensor_not_noised",
                        f"{type(stepping).__name__} would update {model[id(tensor)][0]} "
                        "without noise.",
                        "Update the model only with the private optimizer.",
                    )

    def _digest(self) -> str:
        return digest_of_arrays(dict(zip(self._names, self._parameters, strict=True)))
