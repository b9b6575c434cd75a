"""What measurements need and no engine does: a process of its own (`child`), where a number comes from (`recipe`)."""
