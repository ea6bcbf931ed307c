"""Measuring: speed against plain decoding and against transformers, with provenance."""
