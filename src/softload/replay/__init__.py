"""Replay of request traces against a store: scheduler, byte contents, measures and checks."""
