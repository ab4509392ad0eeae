"""The rows of the DP-Muon paper's tables 1 and 2, from a certificate to scores of texts."""
