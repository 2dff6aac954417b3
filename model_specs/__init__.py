"""Data: what is known about model families, as TOML files. Holds no code and imports nothing; the engine reads the
files with `importlib.resources`."""
