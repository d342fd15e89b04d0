"""What upstream and torch warn of while they are imported, unheard."""

import logging
import warnings

__all__ = ["silence_warnings_of_imports"]


def silence_warnings_of_imports() -> None:
    """To be called before they are imported, by the packages whose programs import them.

    They tell, a dozen times on every rank, that Apex, Transformer Engine or a CUDA runtime are
    absent: known, and enough to hide the one line that an error is.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
