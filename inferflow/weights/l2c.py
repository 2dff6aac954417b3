"""stub"""

from typing import Any


class L2CSource:
    def __init__(self, *a: Any, **k: Any) -> None:
        raise NotImplementedError
