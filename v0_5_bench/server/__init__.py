"""HTTP, and nothing else: the engine below knows none of it.

A reading order: `app` (the routes) and `process`, `protocol` (what is asked), `bodies` and `limits` (what is too much),
`serving` (from a question to a stream of outputs), `answers` and `responses` (what is answered), then `errors`,
`middleware` and `metrics`. `listening`, `connection`, `server_args` and `defaults` are the operator's.
"""
