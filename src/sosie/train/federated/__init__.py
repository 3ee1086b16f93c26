"""Federated learning with filter atoms."""
