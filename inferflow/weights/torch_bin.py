"""stub"""

from typing import Any


class TorchSource:
    def __init__(self, *a: Any, **k: Any) -> None:
        raise NotImplementedError
