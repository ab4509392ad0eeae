"""What becomes of a certificate after it was signed: superseded, approved, revoked, expired."""
