"""The worker: claims certified runs, supervises the trainer, signs and reports what it did."""
