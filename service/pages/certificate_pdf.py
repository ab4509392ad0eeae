"""A certificate as PDF, for review boards, files, and people without an account.

The first page has the facts for a decision, the second the curves, the checklist and the runs. If
something does not fit on two pages, the PDF says so and refers to the technical documentation. The
PDF proves nothing by itself: its first page says how to verify the signed bundle. No fonts are
embedded, so Greek letters and relations come from the standard Symbol font, and characters that
neither font has are printed as escapes.

Reference: ISO 32000-1, annex D (Latin and Symbol character sets).
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import unescape
from itertools import groupby
from operator import attrgetter

from fpdf import FPDF, XPos, YPos

from affidavit.certificate.charts import Chart, draw
from affidavit.service.certificates.issue_status import Status
from affidavit.service.pages.certificate_view import VERIFY, CertificateView
from affidavit.service.pages.text import capitalized, date_time, escape_invisible, truncate

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
"""Characters that Latin-1 lacks, with their codes in the Symbol font."""
PLAIN = {"–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"', "…": "...", "−": "-"}
CODE, SMALL, BODY, HEADING, TITLE = 7, 8, 9.5, 12, 17
"""Font sizes in points; lengths below are in millimetres."""
MARGIN = 18
POINTS_PER_MILLIMETRE = 72 / 25.4
CHART_WIDTH, CHART_HEIGHT = 340, 300
GAP = 4
MAX_PAGES = 2
MAX_LISTED = 8
"""Releases and decisions that are listed."""
MAX_PARAGRAPH_LENGTH = 700
"""Characters of a paragraph."""
NOTE_HEIGHT = 6
OVERFLOW_NOTE = "More does not fit on two pages: see the technical documentation."
CHART_COLOUR = "#1b1f24"
STEP_LABELS = {
    "passed": "passed",
    "failed": "FAILED",
    "unchecked": "not checked here",
    "not_reached": "not reached",
}


def certificate_pdf(view: CertificateView, charts: Sequence[Chart], now: datetime) -> bytes:
    """Return ``view`` with ``charts`` as PDF, as of ``now``."""
    pdf = Document(view, now, title=f"Certificate {view.id}", max_pages=MAX_PAGES)
    pdf.add_page()
    _head(pdf, view)
    _facts(pdf, view)
    _decision(pdf, view)
    if pdf.page_no() < MAX_PAGES:
        pdf.add_page()
    _charts(pdf, charts)
    _details(pdf, view)
    return bytes(pdf.output())


def documentation_pdf(view: CertificateView, text: str, now: datetime) -> bytes:
    """Return ``text``, the Markdown of ``documents.technical_documentation``, as PDF."""
    pdf = Document(view, now, title=f"Technical documentation of {view.id}")
    pdf.add_page()
    code: list[str] | None = None
    for line in text.splitlines():
        plain = _ESCAPE.sub(r"\1", _MARKUP.sub("", line))
        if line.startswith("```"):
            if code is not None:
                pdf.code("\n".join(code))
            code = [] if code is None else None
        elif code is not None:
            code.append(line)
        elif line.startswith("# "):
            pdf.paragraph(plain[2:], TITLE, "B")
        elif line.startswith("#"):
            pdf.heading(plain.lstrip("# "))
        elif line.startswith("**"):
            pdf.paragraph(plain, BODY, "B")
        elif line:
            pdf.paragraph(plain)
    return bytes(pdf.output())


class Document(FPDF):
    """A4 pages, at most ``max_pages``, with the id and the time in their footers."""

    def __init__(
        self, view: CertificateView, now: datetime, *, title: str, max_pages: int | None = None
    ) -> None:
        super().__init__(format="A4")
        self._footer_text = f"{view.id} - issue {view.issue} - as of {now:%Y-%m-%d %H:%M:%S} UTC"
        self._max_pages = max_pages
        self.is_full = False
        self.set_margin(MARGIN)
        self.set_auto_page_break(auto=True, margin=MARGIN)
        self.set_title(title)
        self.set_creator("Affidavit")
        self.set_creation_date(now)
        self.set_lang("en")

    def footer(self) -> None:
        """Print the certificate, the time and the page number."""
        self.set_y(-12)
        self.set_font("Helvetica", size=7)
        self.set_text_color(90)
        self.cell(0, 5, f"{self._footer_text} - page {self.page_no()}", align="C")
        self.set_text_color(0)

    def fits(self, height: float) -> bool:
        """Return whether ``height`` more fits; once something did not fit, nothing does."""
        if self._max_pages is not None and self.page_no() >= self._max_pages and not self.is_full:
            self.is_full = self.will_page_break(height + NOTE_HEIGHT)
            if self.is_full:
                self.label(MARGIN, self.h - MARGIN - 1, OVERFLOW_NOTE, SMALL, style="B")
        return not self.is_full

    def paragraph(self, text: str, size: float = BODY, style: str = "") -> None:
        """Print a paragraph."""
        height = size * 0.5
        if self._max_pages is not None:
            text = truncate(text, MAX_PARAGRAPH_LENGTH)
        self._font(False, style, size)
        # Escapes are longer than their characters, and long words leave lines half empty.
        lines = 1 + 1.3 * self.get_string_width(latin(text)) // (self.w - self.l_margin - MARGIN)
        if not self.fits(height * lines + 0.8):
            return
        for is_symbol, part in font_runs(text):
            self._font(is_symbol, style, size)
            # A leading space would be dropped.
            self.write(height, f"\xa0{part[1:]}" if part.startswith(" ") else part)
        self.ln(height + 0.8)

    def heading(self, text: str) -> None:
        """Print the heading of a section, never at the end of a page."""
        if not self.fits(24):
            return
        if self.will_page_break(24):
            self.add_page()
        self.ln(3)
        self.paragraph(text, HEADING, "B")
        self.ln(0.5)

    def fact(self, name: str, text: str, size: float = BODY) -> None:
        """Print a name and its value side by side."""
        if not self.fits(8):
            return
        if self.will_page_break(8):
            self.add_page()
        self.set_text_color(85)
        self.label(MARGIN + self.c_margin, self.get_y() + BODY * 0.38, name, BODY)
        self.set_text_color(0)
        self.set_left_margin(MARGIN + 46)
        self.set_x(MARGIN + 46)
        self.paragraph(text, size)
        self.set_left_margin(MARGIN)
        self.set_x(MARGIN)

    def label(
        self, x: float, y: float, text: str, size: float, anchor: str = "start", style: str = ""
    ) -> None:
        """Print a short text with its baseline at ``y``, anchored at ``x`` as in SVG."""
        parts = []
        for is_symbol, part in font_runs(text):
            self._font(is_symbol, style, size)
            parts.append((is_symbol, part, self.get_string_width(part)))
        width = sum(part_width for _, _, part_width in parts)
        x -= {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        for is_symbol, part, part_width in parts:
            self._font(is_symbol, style, size)
            self.text(x, y, part)
            x += part_width

    def _font(self, is_symbol: bool, style: str, size: float) -> None:
        if is_symbol:
            self.set_font("Symbol", size=size)
        else:
            self.set_font("Helvetica", style, size)

    def code(self, text: str) -> None:
        """Print the lines of a command."""
        if not self.fits(4.2 * (1 + text.count("\n"))):
            return
        self.set_font("Courier", size=CODE)
        self.set_fill_color(240)
        for line in text.splitlines():
            self.multi_cell(
                0, 4.2, latin(line), fill=True, new_x=XPos.LMARGIN, new_y=YPos.NEXT, align="L"
            )
        self.ln(1.5)


def latin(text: str) -> str:
    """Return ``text`` in Latin-1, with other characters as escapes.

    >>> latin("naïve – 東")
    'naïve - \\\\u6771'
    """
    plain = "".join(PLAIN.get(char, char) for char in escape_invisible(text))
    return plain.encode("latin-1", "backslashreplace").decode("latin-1")


def font_runs(text: str) -> Iterator[tuple[bool, str]]:
    """Split ``text`` into parts of one font: whether it is Symbol, and the text to print.

    >>> list(font_runs("ε ≤ 8"))
    [(True, 'e'), (False, ' '), (True, '£'), (False, ' 8')]
    """
    for is_symbol, letters in groupby(text, key=SYMBOLS.__contains__):
        part = "".join(letters)
        yield is_symbol, "".join(map(SYMBOLS.__getitem__, part)) if is_symbol else latin(part)


def _head(pdf: Document, view: CertificateView) -> None:
    pdf.paragraph("Privacy certificate", TITLE, "B")
    pdf.paragraph(view.name or "Unnamed plan", HEADING)
    pdf.ln(1)
    pdf.paragraph(view.sentence, HEADING, "B")
    if view.standing is not None:
        pdf.paragraph(f"DO NOT USE: {view.standing}", BODY, "B")
    for waived in view.waived:
        pdf.paragraph(
            "Waived: {code}. {message} Granted by {granted_by}, owned by {owner}, until {expires}: "
            "{reason}".format_map(waived)
        )
    if view.untrusted:
        pdf.paragraph("UNTRUSTED: signed with a development key.", BODY, "B")
    pdf.ln(1)


def _facts(pdf: Document, view: CertificateView) -> None:
    guarantee = view.guarantee
    if guarantee is not None:
        pdf.fact(
            "Proved bracket of ε",
            f"{guarantee.epsilon_at_least} to {guarantee.epsilon_at_most} nats",
        )
        pdf.fact("δ", guarantee.delta)
        pdf.fact("Adjacency", f"{guarantee.adjacency}, per {guarantee.unit}")
        if guarantee.target_epsilon is not None:
            pdf.fact("Target", f"ε = {guarantee.target_epsilon}, δ = {guarantee.target_delta}")
    certified = view.verdict == "certified"
    in_force = certified or view.status is not Status.ACTIVE
    pdf.fact("Status", view.status.value.replace("_", " ") if in_force else "not in force")
    pdf.fact("Data set", view.dataset or "not named")
    pdf.fact("Mechanism", view.mechanism)
    pdf.fact("Issued", f"{view.created_at:%Y-%m-%d %H:%M:%S} UTC")
    if certified:
        pdf.fact("Expires", f"{view.not_after:%Y-%m-%d}")
    pdf.fact("Requested by", view.requester)
    pdf.fact("Policy", str(view.policy.get("name", view.policy.get("digest", "built in"))))
    pdf.fact("Certificate", view.id, SMALL)
    pdf.fact("Plan", view.plan_digest, SMALL)
    pdf.fact("Envelope", view.envelope_digest, SMALL)
    pdf.fact("Key", view.key_id, SMALL)
    if view.leaf is not None:
        pdf.fact("Log", f"leaf {view.leaf} of {view.tree_size}")


def _decision(pdf: Document, view: CertificateView) -> None:
    """Print reasons, noise, approvals, engines, and how to verify the certificate."""
    for number, reason in enumerate(view.reasons):
        if not number:
            pdf.heading("Reasons")
        remedy = f" What to do: {reason['remedy']}" if reason["remedy"] else ""
        pdf.paragraph(f"{capitalized(reason['message'])} ({reason['code']}){remedy}")
    if view.noise:
        pdf.heading("Noise multipliers")
        for noise in view.noise[:MAX_LISTED]:
            blocks = "1 block" if noise.blocks == 1 else f"{noise.blocks} blocks"
            sigma = f"σ = {noise.given}" if noise.given else "computed"
            needed = noise.required or "not computed"
            pdf.fact(
                f"{truncate(noise.release, 14)}, {blocks}", f"{sigma}; the target needs {needed}"
            )
        if len(view.noise) > MAX_LISTED:
            pdf.paragraph(f"and {len(view.noise) - MAX_LISTED} more releases.")
    pdf.heading("Approvals")
    decisions = [entry for issue in view.issues for entry in issue.approvals.decisions]
    for decision in decisions[:MAX_LISTED]:
        what = "Approved" if decision.decision == "approve" else "Rejected"
        comment = f": {decision.comment}" if decision.comment else "."
        pdf.paragraph(f"{what} by {decision.approver} at {date_time(decision.at)}{comment}")
    if not decisions:
        required = view.approvals_required
        pdf.paragraph(f"None of {required} required." if required else "None required.")
    pdf.heading("What the checks cover")
    for check in view.checks:
        pdf.paragraph(f"{capitalized(check.covers)}: {check.sentence}", SMALL)
    for engine in view.engines:
        pdf.paragraph(
            f"{engine.name} ({engine.version}): ε between {engine.at_least} and {engine.at_most}",
            SMALL,
        )
    pdf.heading("Verification")
    pdf.paragraph(
        "This document is not a proof. Verify the signed bundle with keys that you trust:"
    )
    pdf.code(
        f"curl -f -o bundle.json \\\n  SERVICE/v1/certificates/{view.id}/bundle\n"
        f"curl -f -o status.json SERVICE/v1/status\n{VERIFY}"
    )
    steps = view.verification["steps"]
    states = Counter(STEP_LABELS[step["state"]] for step in steps)
    counts = ", ".join(f"{count} {word}" for word, count in states.items())
    pdf.paragraph(f"Of the {len(steps)} steps of verification: {counts}.", SMALL)


def _details(pdf: Document, view: CertificateView) -> None:
    pdf.heading("Runs")
    for run in view.runs[:3]:
        steps = "no steps charged yet" if run.steps is None else f"{run.steps} steps charged"
        pdf.paragraph(f"Run {run.id}, {run.state.replace('_', ' ')}: {steps}.", SMALL)
        pdf.paragraph(f"Record {run.record or 'none'}; weights {run.weights or 'none'}.", SMALL)
    if not view.runs:
        pdf.paragraph("No runs.", SMALL)
    elif len(view.runs) > 3:
        pdf.paragraph(f"and {len(view.runs) - 3} earlier runs.", SMALL)
    pdf.heading("Assumptions and scope (NIST SP 800-226)")
    for (mark, topic, by), items in groupby(view.checklist, attrgetter("mark", "topic", "by")):
        answers = " ".join(f"{capitalized(item.answer).rstrip('.')}." for item in items)
        pdf.paragraph(f"{topic}: {answers} ({capitalized(mark)}: {by})", SMALL)


# ---- charts -------------------------------------------------------------------------

_TEXT = re.compile(r"<text (?P<attributes>[^>]*)>(?P<content>[^<]*)</text>")
_TEXT_ELEMENTS = re.compile(r"<(title|desc|text)\b[^>]*>[^<]*</\1>")
_POWER = re.compile("10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_ESCAPE = re.compile(r"\\(.)")
_MARKUP = re.compile(r"(?<!\\)(\*\*|`)")
_CLIP = re.compile(r"<clipPath .*?</clipPath>")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


def _charts(pdf: Document, charts: Sequence[Chart]) -> None:
    """Print the charts side by side."""
    top, width = pdf.get_y(), (pdf.epw - GAP * (len(charts) - 1)) / max(1, len(charts))
    for place, chart in enumerate(charts):
        _chart(pdf, chart, MARGIN + place * (width + GAP), top, width)
    if charts:
        pdf.set_xy(MARGIN, top + CHART_HEIGHT * width / CHART_WIDTH + 1)


def _chart(pdf: Document, chart: Chart, left: float, top: float, width: float) -> None:
    """Print a chart: fpdf2 draws the shapes of its SVG, and the texts are printed in two fonts."""
    svg = draw(chart, width=CHART_WIDTH, height=CHART_HEIGHT).replace("currentColor", CHART_COLOUR)
    scale = width / CHART_WIDTH
    shapes = _CLIP.sub(r"<defs>\g<0></defs>", _TEXT_ELEMENTS.sub("", svg))
    pdf.image(io.BytesIO(shapes.encode()), x=left, y=top, w=width, alt_text=chart.title)
    for match in _TEXT.finditer(svg):
        attributes = dict(_ATTRIBUTE.findall(match["attributes"]))
        text = _POWER.sub(lambda power: f"1e{power[1].translate(_DIGITS)}", match["content"])
        x = left + float(attributes["x"]) * scale
        y = top + float(attributes["y"]) * scale
        angle = 90 if "transform" in attributes else 0
        with pdf.rotation(angle, x, y):
            pdf.label(
                x,
                y,
                unescape(text),
                float(attributes.get("font-size", 11)) * scale * POINTS_PER_MILLIMETRE,
                attributes.get("text-anchor", "start"),
                "B" if "font-weight" in attributes else "",
            )
