"""Torch modules and functions as calls: graphs of ATen operations, tried before use."""
