"""Runs: training that was asked for, claimed by one worker, and settled by what it did."""
