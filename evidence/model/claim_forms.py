"""The forms of a model's claim for other ecosystems, which ``sign_model`` writes on request."""

from __future__ import annotations

CARD, BOM = EXPORTS = ("model-card", "cyclonedx")
"""A section of Hugging Face's model card, and a CycloneDX bill of materials."""
