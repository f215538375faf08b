"""The process that ranks are forked from, for whoever starts one."""

from helpers.forkserver.server import (
    PRELOAD,
    SOCKETS_FOLDER,
    context,
    main_module_hidden,
    warm_up,
)

__all__ = ["PRELOAD", "SOCKETS_FOLDER", "context", "main_module_hidden", "warm_up"]
