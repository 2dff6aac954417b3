"""The shipped specs: one TOML file a model family, the base they extend (decoder.toml), and the block library (blocks.toml)."""
