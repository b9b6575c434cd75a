"""Tools that keep the repository honest: the milestones' ledger and the import rules. Needed by no engine."""
