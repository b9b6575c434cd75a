"""HTTP, and nothing else: the engine below knows none of it.

A reading order: `app` (routes and the process), `protocol` (what is asked), `serving` (from a question to a stream of
outputs), `answers` and `responses` (what is answered), then `errors`, `middleware` and `metrics`.
"""
