"""HTTP, and nothing else: the engine below knows none of it.

A reading order: `app` (the routes) and `process`, `protocol` and `fields` (what is asked), `bodies` and `limits` (what
is too much), `serving` (from a question to a stream of outputs), `answers`, `completion_answers` and `responses` (what
is answered; `totals`, `echo` and `offsets` are parts of it), then `errors`, `middleware`, `metrics` and `connection`.
`listening`, `server_args` and `defaults` are the operator's.
"""
