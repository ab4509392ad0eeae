"""DP-Muon and its rivals at one certified ε, on E2E's text, with a model trained on public text."""
