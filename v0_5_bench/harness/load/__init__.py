"""Requests, the client that sends them, and what came of them."""
