"""Adapters to inference engines. Each imports its engine; the core imports none of them."""
