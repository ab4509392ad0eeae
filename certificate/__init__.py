"""The signed statement: certify, sign, verify."""
