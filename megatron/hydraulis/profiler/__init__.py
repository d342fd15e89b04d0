"""Measuring a cost profile, and fitting one anew while training runs."""

import logging
import warnings

# As in megatron.hydraulis.loop: what upstream's imports warn of would hide the one line that an
# error is. Filters have to stand before the imports.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
