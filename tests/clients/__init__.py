"""Clients that people point at a server, each tried against v0.4: `python -m tests.clients --venvs FOLDER`.

No part of `make test`: it installs each client from its registry into an environment of its own below FOLDER, where
it stays for the next time. What came out goes to `v0_4_http/measurements/clients.json`, and by `--markdown` from there
to the server's page. `clients.py` says which clients there are, `scenarios/` what is asked of each.
"""
