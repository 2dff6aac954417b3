"""Load on an engine or a server: requests that arrive over time, what was seen of each, and figures of all."""
