"""What makes the tests deterministic and small: tokenizers, models and scripts that say exactly what they should."""
