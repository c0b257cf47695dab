"""Measures optimizer steps: ``python -m bench --help``."""
