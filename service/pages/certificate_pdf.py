"""A certificate as PDF: for a file, an annex, or somebody without an account.

It repeats what the page says and proves nothing: the signed bundle does, and the first page
tells how to verify it. The document is made without fonts of its own, so that Greek letters and
relations come from the Symbol font that every reader has; a character that neither font has is
written as an escape, never dropped.

Reference: ISO 32000-1, annex D (Latin and Symbol character sets).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

from fpdf import FPDF, XPos, YPos

from affidavit.certificate.charts import Band, Chart, Dots, Line, Mark, Rule, Scale, is_shown
from affidavit.service.pages.certificate_view import CertificateView
from affidavit.service.pages.text import visible
from affidavit.service.pages.verification import VERIFY

SYMBOLS = {
    "ε": "e",
    "δ": "d",
    "σ": "s",
    "μ": "m",
    "α": "a",
    "λ": "l",
    "ρ": "r",
    "κ": "k",
    "γ": "g",
    "θ": "q",
    "Σ": "S",
    "Δ": "D",
    "≤": "\xa3",
    "≥": "\xb3",
    "∞": "\xa5",
    "√": "\xd6",
    "≠": "\xb9",
}
"""Where the Symbol font has what Latin text lacks."""
PLAIN = {"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "−": "-"}
CODE, SMALL, BODY, HEADING, TITLE = 7, 8, 9.5, 12, 17
MARGIN = 18
CHART_HEIGHT = 68.0
SERIES = ((47, 126, 216), (217, 114, 46), (46, 158, 107), (164, 91, 201))
FAINT = (120, 120, 120)
WORDS = {
    "passed": "passed",
    "failed": "FAILED",
    "unchecked": "not checked here",
    "not_reached": "not reached",
}


def certificate_pdf(view: CertificateView, charts: Sequence[Chart], now: datetime) -> bytes:
    """The document of ``view`` with ``charts``, as it was at ``now``."""
    made = _Document(view, now)
    made.add_page()
    _head(made, view)
    _facts(made, view)
    _verify(made, view)
    for chart in charts:
        _chart(made, chart)
    _lists(made, view)
    return bytes(made.output())


class _Document(FPDF):
    """A4, with the id and the moment at the foot of every page."""

    def __init__(self, view: CertificateView, now: datetime) -> None:
        super().__init__(format="A4")
        self._foot = f"{view.id} - issue {view.issue} - as of {now:%Y-%m-%d %H:%M:%S} UTC"
        self.set_margin(MARGIN)
        self.set_auto_page_break(auto=True, margin=MARGIN)
        self.set_title(f"Certificate {view.id}")
        self.set_creator("Affidavit")
        self.set_creation_date(now)
        self.set_lang("en")

    def footer(self) -> None:
        """Which certificate, and which page."""
        self.set_y(-12)
        self.set_font("Helvetica", size=7)
        self.set_text_color(90)
        self.cell(0, 5, f"{self._foot} - page {self.page_no()}", align="C")
        self.set_text_color(0)

    def say(self, text: str, size: float = BODY, style: str = "") -> None:
        """A paragraph."""
        height = size * 0.5
        for is_symbol, part in runs(text):
            if is_symbol:
                self.set_font("Symbol", size=size)
            else:
                self.set_font("Helvetica", style, size)
            # A piece may begin with the space before its word, which would be dropped.
            kept = f"\xa0{part[1:]}" if part.startswith(" ") else part
            self.write(height, kept)
        self.ln(height + 0.8)

    def heading(self, text: str) -> None:
        """The heading of a section, never alone at the foot of a page."""
        if self.will_page_break(24):
            self.add_page()
        self.ln(3)
        self.say(text, HEADING, "B")
        self.ln(0.5)

    def fact(self, name: str, text: str, size: float = BODY) -> None:
        """A name and what it is, side by side."""
        if self.will_page_break(8):
            self.add_page()
        self.say_at(MARGIN, name, BODY)
        self.set_left_margin(MARGIN + 46)
        self.set_x(MARGIN + 46)
        self.say(text, size)
        self.set_left_margin(MARGIN)
        self.set_x(MARGIN)

    def say_at(self, x: float, text: str, size: float) -> None:
        """A short text at ``x`` of this line, without ending it."""
        self.set_text_color(85)
        self.set_x(x)
        for is_symbol, part in runs(text):
            self.set_font("Symbol" if is_symbol else "Helvetica", size=size)
            self.cell(self.get_string_width(part), size * 0.5, part)
        self.set_text_color(0)

    def code(self, text: str) -> None:
        """Lines of a command."""
        self.set_font("Courier", size=CODE)
        self.set_fill_color(240)
        for line in text.splitlines():
            self.multi_cell(
                0, 4.2, latin(line), fill=True, new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L"
            )
        self.ln(1.5)


def latin(text: str) -> str:
    """``text`` in Latin-1, everything else as escapes.

    >>> latin("naïve – 東")
    'naïve - \\\\u6771'
    """
    plain = "".join(PLAIN.get(item, item) for item in visible(text))
    return plain.encode("latin-1", "backslashreplace").decode("latin-1")


def runs(text: str) -> Iterator[tuple[bool, str]]:
    """``text`` in pieces, each of one font: whether it is Symbol's, and what to write.

    >>> list(runs("ε ≤ 8"))
    [(True, 'e'), (False, ' '), (True, '£'), (False, ' 8')]
    """
    for is_symbol, letters in groupby(text, key=SYMBOLS.__contains__):
        part = "".join(letters)
        yield is_symbol, "".join(map(SYMBOLS.__getitem__, part)) if is_symbol else latin(part)


def _head(made: _Document, view: CertificateView) -> None:
    made.say("Privacy certificate", TITLE, "B")
    made.say(view.name or "A plan without a name", HEADING)
    made.ln(1)
    made.say(view.sentence, HEADING, "B")
    if view.standing is not None:
        made.say(f"DO NOT USE: {view.standing}", BODY, "B")
    for waived in view.waived:
        made.say(
            f"Waived: {waived.code}. {waived.message} {waived.granted_by} let it pass for "
            f"{waived.owner} until {waived.expires}: {waived.reason}"
        )
    if view.untrusted:
        made.say("UNTRUSTED: signed with a development key that nobody vouches for.", BODY, "B")
    made.ln(1)


def _facts(made: _Document, view: CertificateView) -> None:
    said = view.guarantee
    if said is not None:
        made.fact("Proved bracket of ε", f"{said.epsilon_at_least} to {said.epsilon_at_most} nats")
        made.fact("δ", said.delta)
        made.fact("Neighbours", f"{said.adjacency}, per {said.unit}")
        if said.target_epsilon is not None:
            made.fact("Asked for", f"ε = {said.target_epsilon}, δ = {said.target_delta}")
    made.fact("Standing", view.status.value.replace("_", " "))
    made.fact("Data set", view.dataset or "not named")
    made.fact("Mechanism", view.mechanism)
    made.fact("Valid", f"{view.created_at:%Y-%m-%d %H:%M:%S} to {view.not_after:%Y-%m-%d} UTC")
    made.fact("Requested by", view.requester)
    made.fact("Policy", str(view.policy.get("name", view.policy.get("digest", "built in"))))
    made.fact("Certificate", view.id, SMALL)
    made.fact("Plan", view.plan_digest, SMALL)
    made.fact("Envelope", view.envelope_digest, SMALL)
    made.fact("Key", view.key_id, SMALL)
    if view.leaf is not None:
        made.fact("Log", f"leaf {view.leaf} of {view.tree_size}")


def _verify(made: _Document, view: CertificateView) -> None:
    made.heading("Verify it")
    made.say("This page proves nothing. Fetch the bundle and verify it with keys that you trust:")
    made.code(
        f"curl -f -o bundle.json \\\n  SERVICE/v1/certificates/{view.id}/bundle\n"
        f"curl -f -o status.json SERVICE/v1/status\n{VERIFY}"
    )
    for step in view.verification.steps:
        detail = f": {step.detail}" if step.detail else ""
        made.say(f"{step.number}. {step.name}: {WORDS[step.state]}{detail}", SMALL)


def _lists(made: _Document, view: CertificateView) -> None:
    if view.reasons:
        made.heading("Reasons")
        for reason in view.reasons:
            made.say(f"{reason.code} {reason.pointer}: {reason.message} {reason.remedy}")
    made.heading("Engines")
    made.say(view.agreement)
    for engine in view.engines:
        made.say(
            f"{engine.name} ({engine.version}): ε between {engine.at_least} and {engine.at_most}"
        )
    if view.noise:
        made.heading("Noise multipliers")
        for noise in view.noise:
            made.say(
                f"{noise.release}, {noise.blocks} blocks: given {noise.given or 'none'}, "
                f"required {noise.required or 'not solved for'}"
            )
    made.heading("What it rests on (NIST SP 800-226)")
    for item in view.checklist:
        made.say(f"[{item.mark}] {item.topic}: {item.question} {item.answer} ({item.by})", SMALL)
    made.heading("Runs and weights")
    for run in view.runs:
        steps = "no steps charged yet" if run.steps is None else f"{run.steps} steps charged"
        made.say(f"Run {run.id}, {run.state.replace('_', ' ')}: {steps}.", SMALL)
        made.say(f"Record {run.record or 'none'}; weights {run.weights or 'none'}.", SMALL)
    if not view.runs:
        made.say("No run used this certificate here.")
    made.heading("Approvals")
    decisions = [entry for issue in view.issues for entry in issue.decisions]
    for decision in decisions:
        made.say(
            f"{decision['decision']} by {decision['approver']} at {decision['at']}: "
            f"{decision['comment']}"
        )
    if not decisions:
        made.say("None was asked for or given.")


# ---- charts -------------------------------------------------------------------------


def _chart(made: _Document, chart: Chart) -> None:
    if made.will_page_break(CHART_HEIGHT + 36):
        made.add_page()
    made.heading(chart.title)
    made.say(chart.description, SMALL)
    left, top = MARGIN + 16.0, made.get_y() + 2
    right, bottom = made.w - MARGIN, top + CHART_HEIGHT - 14
    xs, ys = _values(chart)
    x = Scale.over(chart.x, xs, left, right)
    y = Scale.over(chart.y, ys, bottom, top)
    _frame(made, chart, x, y)
    with made.local_context(), made.rect_clip(left, top, right - left, bottom - top):
        for number, mark in enumerate(chart.marks):
            made.set_draw_color(*_colour(number, mark))
            _mark(made, mark, x, y)
    made.set_y(bottom + 9)
    for number, mark in enumerate(chart.marks):
        made.set_text_color(*_colour(number, mark))
        made.say(mark.name, SMALL)
    made.set_text_color(0)


def _colour(number: int, mark: Mark) -> tuple[int, int, int]:
    if isinstance(mark, Line) and mark.faint:
        return FAINT
    return SERIES[number % len(SERIES)]


def _values(chart: Chart) -> tuple[list[float], list[float]]:
    xs: list[float] = []
    ys: list[float] = []
    for mark in chart.marks:
        match mark:
            case Line(points=points) | Dots(points=points):
                xs += [p[0] for p in points]
                ys += [p[1] for p in points]
            case Band(points=triples):
                xs += [p[0] for p in triples]
                ys += [end for p in triples for end in p[1:]]
            case Rule(at=at, axis=axis):
                (xs if axis == "x" else ys).append(at)
            case _:
                continue
    return (
        [item for item in xs if is_shown(chart.x, item)],
        [entry for entry in ys if is_shown(chart.y, entry)],
    )


def _frame(made: _Document, chart: Chart, x: Scale, y: Scale) -> None:
    made.set_draw_color(200)
    made.set_line_width(0.15)
    for tick in x.ticks():
        at = x.position(tick.value)
        made.line(at, y.start, at, y.end)
        _label(made, at - 6, y.start + 1, 12, f"{tick.value:g}", "C")
    for tick in y.ticks():
        at = y.position(tick.value)
        made.line(x.start, at, x.end, at)
        _label(made, x.start - 15, at - 1.8, 14, f"{tick.value:g}", "R")
    made.set_draw_color(90)
    made.rect(x.start, y.end, x.end - x.start, y.start - y.end)
    made.set_xy(x.start, y.start + 4.5)
    made.say_at(x.start, f"across: {chart.x.label}; up: {chart.y.label}", SMALL)


def _label(made: _Document, x: float, y: float, width: float, text: str, align: str) -> None:
    made.set_font("Helvetica", size=7)
    made.set_xy(x, y)
    made.cell(width, 3.6, latin(text), align=align)


def _mark(made: _Document, mark: Mark, x: Scale, y: Scale) -> None:
    made.set_line_width(0.45)
    match mark:
        case Band(points=triples):
            _polyline(made, [(px, high) for px, _, high in triples], x, y)
            _polyline(made, [(px, low) for px, low, _ in triples], x, y)
        case Line(points=points):
            _polyline(made, points, x, y)
        case Dots(points=points):
            for across, up in points:
                if is_shown(x.axis, across) and is_shown(y.axis, up):
                    made.circle(x.position(across), y.position(up), 1.1)
        case Rule(at=at, axis="y"):
            made.set_dash_pattern(1.4, 1.1)
            made.line(x.start, y.position(at), x.end, y.position(at))
            made.set_dash_pattern()
        case Rule(at=at):
            made.line(x.position(at), y.start, x.position(at), y.end)


def _polyline(made: _Document, points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> None:
    shown = [
        (x.position(across), y.position(up))
        for across, up in points
        if is_shown(x.axis, across) and is_shown(y.axis, up)
    ]
    if len(shown) > 1:
        made.polyline(shown)
